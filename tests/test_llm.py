"""``LLM``: arguments, budgets, errors and results as vLLM names them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model

from ascend_kv.engine.engine import Engine
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import UsageError
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.llm import LLM
from ascend_kv.ops import platform

INT8 = {"kv_cache_dtype": "int8"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_model(tmp_path_factory.mktemp("llama")))


def make_llm(weights: LoadedModel, **options: Any) -> LLM:
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20} | options
    options = {"skip_tokenizer_init": True} | options
    return LLM(weights.path, weights=weights, **options)


def token_ids(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_int8_cache_has_the_bytes_of_the_geometry_and_fits_the_budget(weights: LoadedModel) -> None:
    budget = 100_000
    llm = make_llm(weights, kv_cache_dtype="int8", kv_cache_memory_bytes=budget)
    # 3 layers x (key + value) x 2 heads x (8 codes + a float32 scale)
    assert llm.geometry.token_bytes(llm.formats) == 3 * 2 * 2 * (8 + 4)
    block_bytes = 16 * 144
    assert llm.cache.num_blocks == budget // block_bytes
    assert llm.cache.allocated_bytes == llm.cache.num_blocks * block_bytes
    assert len(token_ids(llm, [[1, 2, 3]])[0]) == 8


def test_skipped_layers_stay_in_the_models_type(weights: LoadedModel) -> None:
    llm = make_llm(weights, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[0, 2])
    assert [layer.key.dtype for layer in llm.cache.layers] == [
        torch.float32,
        torch.int8,
        torch.float32,
    ]
    assert len(token_ids(llm, [[4, 5]])[0]) == 8


@pytest.mark.parametrize("granularity", ["token", "token_head"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_generates_nearly_what_the_unquantized_cache_does(
    weights: LoadedModel, granularity: str, symmetric: bool
) -> None:
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    plain = token_ids(make_llm(weights), prompts)
    quantized = token_ids(
        make_llm(weights, kv_cache_dtype="int8", granularity=granularity, symmetric=symmetric),
        prompts,
    )
    pairs = [pair for x, y in zip(plain, quantized, strict=True) for pair in zip(x, y, strict=True)]
    assert sum(ours == theirs for ours, theirs in pairs) >= 12


def test_results_come_in_the_order_of_the_prompts_and_repeat(weights: LoadedModel) -> None:
    llm = make_llm(weights, max_num_seqs=2)
    prompts = [[5] * 30, [6], [7] * 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    together = token_ids(llm, prompts, params)
    assert [len(tokens) for tokens in together] == [9, 2, 5]
    alone = [token_ids(llm, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone


def test_a_seed_repeats_in_another_batch(weights: LoadedModel) -> None:
    llm = make_llm(weights)
    seeded = SamplingParams(temperature=1.5, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
    alone = token_ids(llm, [[8, 9]], seeded)[0]
    assert token_ids(llm, [[5] * 9, [8, 9], [4]], [GREEDY, seeded, GREEDY])[1] == alone
    other = SamplingParams(temperature=1.5, seed=4, max_tokens=12, ignore_eos=True)
    assert token_ids(llm, [[8, 9]], other)[0] != alone


def test_bad_prompts_get_an_error_and_the_others_are_served(
    weights: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(weights)
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2], [], [3] * 64, [97], [4])]
    with caplog.at_level(logging.WARNING):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "length",
        "error",
        "error",
        "error",
        "length",
    ]
    assert "an empty prompt" in str(outputs[1].error)
    assert "'64 tokens'; legal: at most 63" in str(outputs[2].error)
    assert "got 97; legal: 0 to 96" in str(outputs[3].error)
    assert all(output.finished for output in outputs)
    assert len(caplog.records) == 3
    assert outputs[4].outputs[0].token_ids == token_ids(llm, [[4]])[0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_dtype": "int7"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8", "granularity": "row"}, "granularity"),
        ({"kv_cache_dtype": "int8", "granularity": "channel"}, "granularity"),
        ({"kv_allocator": "slab"}, "kv_allocator"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": "x"}, "max_model_len"),
        ({"max_model_len": 8.0}, "max_model_len"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"kv_cache_dtype_skip_layers": 3}, "kv_cache_dtype_skip_layers"),
        ({"kv_cache_dtype_skip_layers": None}, "kv_cache_dtype_skip_layers"),
        ({"kv_cache_config": [1]}, "kv_cache_config"),
        ({"kv_cache_config": "x"}, "kv_cache_config"),
        ({"kv_cache_config": []}, "kv_cache_config"),
        ({"scale_type": "static", "kv_cache_scales": [1], **INT8}, "kv_cache_scales"),
        ({"scale_type": "static", "kv_cache_scales": {1: 2}, **INT8}, "kv_cache_scales"),
        (
            {"scale_type": "static", "kv_cache_scales": {"__metadata__": 5}, **INT8},
            "kv_cache_scales: __metadata__",
        ),
        ({"gpu_memory_utilization": 5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        ({"skip_tokenizer_init": "x"}, "skip_tokenizer_init"),
        ({"kv_cache_memory_bytes": 10**15}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": "much"}, "kv_cache_memory_bytes"),
        ({"granularity": "group", "group_size": 16}, "group_size"),
        ({"scale_type": "static", "kv_cache_scales": "/nope"}, "scale_type"),
        ({"scale_type": "static"}, "scale_type"),
        ({"granularity": "token"}, "granularity"),
        ({"symmetric": False, "kv_cache_dtype": "float16"}, "symmetric"),
        ({"dtype": "foo"}, "dtype"),
        ({"dtype": 5}, "dtype"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "float16"}, "dtype"),
        ({"kv_cache_dtype_skip_layers": [3]}, "kv_cache_dtype_skip_layers"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    weights: LoadedModel, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_llm(weights, **options)
    assert caught.value.field == field
    assert caught.value.legal


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("text without a tokenizer", "prompt"),
        ({"text": "x"}, "prompt"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "prompt": 5}, "prompt"),
        (7, "prompt"),
    ],
)
def test_prompts_of_the_wrong_kind_are_refused(
    weights: LoadedModel, prompt: Any, field: str
) -> None:
    llm = make_llm(weights)
    with pytest.raises(UsageError) as caught:
        llm.generate([prompt], GREEDY, use_tqdm=False)
    assert caught.value.field == field
    assert not llm.engine.has_unfinished_requests()


def test_a_missing_model_and_dtypes_that_are_the_weights_own(weights: LoadedModel) -> None:
    with pytest.raises(UsageError, match="model: got None"):
        LLM(None)  # type: ignore[arg-type]
    assert make_llm(weights, dtype="float32").weights.dtype == "float32"


def test_a_budget_beyond_what_is_free_is_refused_before_it_is_taken(
    weights: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "free_memory_bytes", lambda device: 1 << 20)
    assert make_llm(weights, kv_cache_memory_bytes="1MiB").cache.num_blocks > 0
    for budget in ((1 << 20) + 1, None):  # None: the default
        with pytest.raises(UsageError, match=r"at most 1048576 \(1.00 MiB\).* are free"):
            make_llm(weights, kv_cache_memory_bytes=budget)


@pytest.mark.parametrize("prompts", [5, None])
def test_what_are_no_prompts_is_refused(weights: LoadedModel, prompts: Any) -> None:
    llm = make_llm(weights)
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError) as caught:
            call(prompts)
        assert caught.value.field == "prompts"


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, [GREEDY, {"max_tokens": 3}], {}, "xy"])
def test_what_are_no_params_is_refused(weights: LoadedModel, params: Any) -> None:
    llm = make_llm(weights)
    prompts: Any = [{"prompt_token_ids": [1]}] * 2
    for call in (
        lambda: llm.generate(prompts, params),
        lambda: llm.stream(prompts, params),
        lambda: llm.add_request("x", prompts[0], params),
        lambda: llm.generate_async(prompts[0], params),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.field == "sampling_params"
    assert not llm.has_unfinished_requests()


def test_a_wrong_number_of_params_is_refused(weights: LoadedModel) -> None:
    with pytest.raises(UsageError, match="sampling_params: got '2 of them'; legal: 1 or 3"):
        token_ids(make_llm(weights), [[1]] * 3, [GREEDY] * 2)


def test_an_interruption_leaves_the_engine_usable(
    weights: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(weights)
    before = token_ids(llm, [[1, 2, 3]])
    with monkeypatch.context() as patch:
        steps = iter(range(3))
        step = Engine.step

        def interrupted(engine: Engine) -> Any:
            if next(steps) == 2:
                raise KeyboardInterrupt
            return step(engine)

        patch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            token_ids(llm, [[1, 2, 3], [5] * 20])
    assert llm.tables.stats().used_blocks == 0
    assert token_ids(llm, [[1, 2, 3]]) == before


def test_a_missing_tokenizer_is_named(weights: LoadedModel) -> None:
    with pytest.raises(UsageError, match="skip_tokenizer_init"):
        LLM(Path(weights.path), weights=weights, max_model_len=64)
