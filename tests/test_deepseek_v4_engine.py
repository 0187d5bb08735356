"""DeepSeek-V4 through the engine: batching, chunks, preemption, statistics, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_models import load_theirs, make_deepseek

from ascend_kv import LLM, SamplingParams, UsageError
from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.errors import UnsupportedModelError
from ascend_kv.geometry import FORMATS
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.model_files import load_geometry
from ascend_kv.ops import platform

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = [3, 140, 61, 29, 126, 8]
PROMPTS = [
    {"prompt_token_ids": [(7 * number + 13 * place) % 90 + 3 for place in range(length)]}
    for number, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek(tmp_path_factory.mktemp("deepseek"), "window", "csa", "hca")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What transformers generates, one prompt after another, with its own cache."""
    model, outputs = load_theirs(checkpoint), []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt["prompt_token_ids"]])
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=24,
            eos_token_id=None,
        )  # fmt: skip
        outputs.append(made[0, tokens.shape[1] :].tolist())
    return outputs


def make(loaded: LoadedModel, **options: Any) -> LLM:
    given = {"max_model_len": 200, "max_num_seqs": 6, "max_num_batched_tokens": 300, **options}
    return LLM(loaded.path, weights=loaded, skip_tokenizer_init=True, **given)


def generate(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 37},
        {"max_num_seqs": 1},
        {"enable_chunked_prefill": False},
        {"block_size": 4},
    ],
)
def test_generates_what_transformers_does(
    loaded: LoadedModel, expected: list[list[int]], options: dict[str, Any]
) -> None:
    llm = make(loaded, **options)
    assert generate(llm) == expected
    assert all(one.used_blocks == one.used_tokens == 0 for _, one in llm.tables.stats().groups)


def test_preempted_requests_resume(loaded: LoadedModel, expected: list[list[int]]) -> None:
    roomy = make(loaded, block_size=4, max_model_len=170)
    assert isinstance(roomy.cache, CompressedKVCache)
    layers = loaded.geometry.compressed
    assert layers is not None
    blocks = roomy.cache.blocks._replace(csa=24, hca=6)  # 24 blocks are 384 tokens of 367 + 144
    memory = sum(layers.cache_bytes(blocks, roomy.cache.formats).values())
    llm = make(loaded, block_size=4, max_model_len=170, kv_cache_memory_bytes=memory)
    assert generate(llm) == expected
    stats = llm.engine.stats
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert max(dict(step.cache.groups)["csa"].used_blocks for step in stats.steps) >= 20


def test_statistics_show_every_group(loaded: LoadedModel) -> None:
    llm = make(loaded)
    llm.generate(PROMPTS[1:3], GREEDY, use_tqdm=False)
    last = dict(llm.engine.stats.steps[-1].cache.groups)
    tokens = [140 + 23, 61 + 23]
    assert set(last) == {"window", "csa", "hca", "state"}
    assert last["window"].used_blocks == last["state"].used_blocks == 2
    assert last["csa"].used_tokens == sum(n // 4 for n in tokens)
    assert last["hca"].used_tokens == sum(n // 128 for n in tokens)


def test_int8_takes_less_and_generates(loaded: LoadedModel) -> None:
    plain, int8 = make(loaded), make(loaded, kv_cache_dtype="int8", indexer_cache_dtype="int8")
    assert isinstance(plain.cache, CompressedKVCache) and isinstance(int8.cache, CompressedKVCache)
    assert int8.cache.blocks == plain.cache.blocks
    assert int8.cache.bytes_by_group["csa"] < 0.6 * plain.cache.bytes_by_group["csa"]
    assert [len(tokens) for tokens in generate(int8)] == [24] * 6


def test_a_request_longer_than_the_cache_is_refused(loaded: LoadedModel) -> None:
    llm = make(loaded)
    (output,) = llm.generate({"prompt_token_ids": [5] * 200}, GREEDY, use_tqdm=False)
    assert output.error is not None and "199" in output.error


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("granularity", {"kv_cache_dtype": "int8", "granularity": "token"}),
        ("symmetric", {"kv_cache_dtype": "int8", "symmetric": False}),
        ("kv_cache_dtype_skip_layers", {"kv_cache_dtype_skip_layers": (0,)}),
        ("kv_allocator", {"kv_allocator": "contiguous"}),
        ("pair_scaling", {"pair_scaling": True}),
        ("key_offset_layers", {"key_offset_layers": "all"}),
        ("kv_cache_dtype", {"kv_cache_dtype": "float16"}),
        ("kv_cache_dtype", {"kv_cache_dtype": "int8/group32/asymmetric"}),
        ("kv_cache_dtype", {"kv_cache_dtype": "int8/head/static"}),
        ("indexer_cache_dtype", {"indexer_cache_dtype": "bfloat16"}),
        ("indexer_cache_dtype", {"indexer_cache_dtype": "int4"}),
        ("kv_cache_memory_bytes", {"kv_cache_memory_bytes": "1KiB"}),
    ],
)
def test_settings_that_have_no_meaning_are_refused(
    loaded: LoadedModel, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as error:
        make(loaded, **options)
    assert error.value.field == field


def test_words_that_say_what_int8_is_anyway(loaded: LoadedModel) -> None:
    cache = make(loaded, kv_cache_dtype="int8/token_head/symmetric").cache
    assert isinstance(cache, CompressedKVCache) and cache.formats.entries == "int8"


@pytest.mark.parametrize("int8", [{}, {"kv_cache_dtype": "int8", "indexer_cache_dtype": "int8"}])
def test_a_device_is_asked_for_every_type_of_the_cache(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, int8: dict[str, str]
) -> None:
    """The window is kept in the model's type, float32 here, whatever the entries are."""
    monkeypatch.setattr(platform, "device_name", lambda device: "910B3")
    with pytest.raises(UsageError) as error:
        make(loaded, **int8)
    assert (error.value.field, error.value.given) == ("kv_cache_dtype", "float32")


def test_a_device_is_asked_for_the_indexer_keys(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = load_model(checkpoint, "bfloat16")
    monkeypatch.setattr(platform, "device_name", lambda device: "910B3")
    assert make(half, block_size=16).block_size == 16
    with pytest.raises(UsageError, match="For int8 on 910B3"):
        make(half, block_size=16, indexer_cache_dtype="int8")


def test_other_models_have_no_indexer(tmp_path: Path) -> None:
    from tiny_models import make_model

    with pytest.raises(UsageError, match="indexer"):
        LLM(make_model(tmp_path), indexer_cache_dtype="int8", skip_tokenizer_init=True)


def test_plans_by_the_token_are_refused(checkpoint: Path) -> None:
    geometry = load_geometry(checkpoint)
    with pytest.raises(UnsupportedModelError, match="deepseek_v4"):
        geometry.block_bytes([FORMATS["float16"]] * 3, 16)
