"""Hugging Face models on the paged cache against transformers' own generate."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError, UnsupportedModelError, UsageError
from ascend_kv.geometry import format_spec
from ascend_kv.integrations.attention import STEP_KEYWORD, probe_attention
from ascend_kv.integrations.huggingface import HuggingFaceModel
from ascend_kv.integrations.loading import LoadedModel, load_model, load_tokenizer
from ascend_kv.llm import LLM

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 40, "num_key_value_heads": 1},
    "llama-tied-no-groups": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 6,
    },
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
}
MODELS |= {
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-partly-windows": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 12},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 12},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 10,
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


def reference_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompts_of_mixed_lengths() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, 97) for _ in range(length)] for length in (1, 2, 17, 33, 40, 64, 90)]


@torch.inference_mode()
def assert_same_greedy(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Equal to transformers' generate, or its two best logits are within 1e-4 where they part."""
    ids = torch.tensor([prompt])
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=len(tokens),
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    for position, (ours, theirs) in enumerate(zip(tokens, want, strict=True)):
        if ours != theirs:
            prefix = torch.tensor([prompt + want[:position]])
            best = model(prefix).logits[0, -1].topk(2)
            assert {ours, theirs} == set(best.indices.tolist())
            assert best.values[0] - best.values[1] < 1e-4
            return


@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 3}, False),
        ({"kv_cache_blocks": 10, "max_num_batched_tokens": 48, "max_num_seqs": 7}, True),
        ({"kv_allocator": "contiguous", "kv_cache_blocks": 27}, False),
    ],
    ids=["one batch", "chunked", "preempted", "contiguous"],
)
def test_greedy_tokens_equal_transformers(
    checkpoint: Path, limits: dict[str, Any], preempts: bool
) -> None:
    limits = dict(limits)
    blocks = limits.pop("kv_cache_blocks", 64)
    weights = load_model(checkpoint)
    geometry = weights.geometry
    bytes_a_token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * 4
    llm = LLM(
        checkpoint,
        weights=weights,
        skip_tokenizer_init=True,
        max_model_len=136,
        block_size=16,
        kv_cache_memory_bytes=blocks * 16 * bytes_a_token,
        **limits,
    )
    assert llm.cache.num_blocks == blocks
    for layer in llm.cache.layers:  # memory that must be written before it is read
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    prompts = prompts_of_mixed_lengths()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        use_tqdm=False,
    )
    model = reference_model(checkpoint)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.outputs[0].token_ids) == 40
        assert_same_greedy(model, prompt, output.outputs[0].token_ids)
    assert (llm.engine.stats.preemptions > 0) == preempts


def run_in_chunks(weights: LoadedModel, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Teacher-forced logits [T, vocab] of one sequence, cut as ``chunks`` says, blocks of 4."""
    geometry = weights.geometry
    formats = [format_spec(weights.dtype)] * geometry.num_layers
    table = list(range(40))
    random.Random(0).shuffle(table)
    model = HuggingFaceModel(weights, PagedKVCache(geometry, formats, 40, 4))
    logits, start = [], 0
    for size in chunks:
        stop = start + size
        slots = [table[i // 4] * 4 + i % 4 for i in range(start, stop)]
        batch = Batch(
            token_ids=tokens[start:stop],
            positions=list(range(start, stop)),
            slot_mapping=slots,
            block_tables=[table],
            query_lengths=[size],
            kv_lengths=[stop],
            logits_indices=list(range(size)),
        )
        logits.append(model.forward(batch))
        start = stop
    return torch.cat(logits)


@pytest.mark.parametrize(
    "chunks", [[90], [1] * 90, [40, 1, 30, 19]], ids=["whole", "ones", "mixed"]
)
def test_teacher_forced_logits_equal_transformers(checkpoint: Path, chunks: list[int]) -> None:
    tokens = prompts_of_mixed_lengths()[-1]
    ours = run_in_chunks(load_model(checkpoint), tokens, chunks)
    with torch.inference_mode():
        theirs = reference_model(checkpoint)(torch.tensor([tokens])).logits[0]
    assert theirs.std() > 0.1  # a flat model would agree with anything
    assert (ours - theirs).abs().max() < 1e-4


def test_loading_says_what_it_loaded(checkpoint: Path) -> None:
    weights = load_model(checkpoint, dtype="bfloat16")
    assert weights.dtype == "bfloat16"
    assert next(weights.hf_model.parameters()).dtype == torch.bfloat16
    assert weights.geometry.num_layers == weights.hf_model.config.num_hidden_layers


def test_the_loaded_model_refuses_a_plain_forward(llama: Path) -> None:
    with pytest.raises(RunError, match="LLM.generate"):
        load_model(llama).hf_model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("dtype", ["int8", "float8", "double"])
def test_an_unknown_dtype_is_refused(llama: Path, dtype: str) -> None:
    with pytest.raises(UsageError, match="^dtype: got .*; legal: auto, float32, float16, bfloat16"):
        load_model(llama, dtype=dtype)


def test_a_checkpoint_without_a_tensor_is_refused(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path)
    assert "initialized" not in caplog.text  # nothing was drawn at random for the user


def test_a_tensor_of_another_shape_is_named(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(8, 48)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    said = r"layers\.1\.mlp\.up_proj\.weight: got \[8, 48\]; legal: \[64, 48\]"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path)


def test_a_surplus_tensor_is_still_warned_of(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tensors = load_file(llama / "model.safetensors") | {"model.extra.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    load_model(tmp_path)
    assert "model.extra.weight" in caplog.text


def test_a_model_without_a_tokenizer(llama: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer.json.*is there") as caught:
        load_tokenizer(llama)
    assert caught.value.given == str(llama)


def test_a_tokenizer_that_cannot_be_read(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(UsageError, match="cannot be read: ."):
        load_tokenizer(tmp_path)


def test_a_truncated_checkpoint_is_an_error_not_a_traceback_of_torch(
    llama: Path, tmp_path: Path
) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises((RunError, UsageError)):
        load_model(tmp_path)


def test_an_unknown_model_type_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="model_type: got 'mamba'; legal: .*llama"):
        load_model(tmp_path)


def test_attention_that_is_not_intercepted_is_refused(llama: Path) -> None:
    weights = load_model(llama)
    attention = weights.hf_model.model.layers[1].self_attn

    def own_attention(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    attention.forward = own_attention
    with pytest.raises(UnsupportedModelError, match="layer 1 brings nothing"):
        probe_attention(weights.hf_model, weights.geometry)


def test_a_model_that_takes_no_step_is_refused(llama: Path) -> None:
    weights = load_model(llama)

    class Closed(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> None: ...

    with pytest.raises(UnsupportedModelError, match=f"Closed.*{STEP_KEYWORD}"):
        probe_attention(Closed(), weights.geometry)


def test_no_mask_is_built(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_model(llama)
    masks: list[Any] = []
    from transformers import AttentionInterface

    from ascend_kv.integrations import attention

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        return attention.attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.ATTENTION_NAME, spy)
    run_in_chunks(weights, [5] * 8, [8])
    assert masks == [None] * 3
