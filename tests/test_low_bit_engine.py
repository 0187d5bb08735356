"""Small random models on FP8, INT4 and mixed caches, against attention over the oracle's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle_formats
import pytest
import torch
from attention_calls import in_words
from conditioned_models import (
    BLOCK_SIZE,
    greedy,
    load_uneven,
    random_tokens,
    run_on_cache,
    scattered_blocks,
)

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache_formats import FormatSpec, rotated_channels
from ascend_kv.geometry import LayerFormat, layer_format
from ascend_kv.integrations.attention import STEP_KEYWORD
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.key_weights import KeyWeights, layers_of
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM

TOKENS = random_tokens(29)
FORMATS = [
    "fp8",
    "fp8_e5m2/token",
    "int4",
    "int4/group8/asymmetric",
    "int4/asymmetric/hadamard",
    "k:int8+v:int4",
    "k:int4/hadamard+v:fp8",
    "k:int8+v:int4/asymmetric/hadamard",
    "k:int4/hadamard+v:int4/hadamard",
    "k:float32+v:int4/asymmetric",
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A Llama whose key channels differ in size: heads 6, KV heads 2, head_dim 16."""
    return load_uneven(tmp_path_factory.mktemp("llama"), model_type="llama", head_dim=16)


class OracleStep:
    """Attention in float64 over keys and values that went through the oracle's bytes."""

    def __init__(self, formats: list[LayerFormat]) -> None:
        self._formats = formats

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        spec = self._formats[layer]
        q, k, v = (x.double().numpy().transpose(1, 0, 2) for x in (query, key, value))
        if spec.key.hadamard:
            q, k = _rotated(q), _rotated(k)
        if spec.value.hadamard:
            v = _rotated(v)
        group = len(q) // len(k)
        k, v = (np.repeat(_through(x, s), group, 0) for x, s in ((k, spec.key), (v, spec.value)))
        scores = np.einsum("hqd,hkd->hqk", q, k) * scaling
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        output = np.einsum("hqk,hkd->qhd", p / p.sum(-1, keepdims=True), v)
        if spec.value.hadamard:
            output = _rotated(output)  # its own inverse
        return torch.tensor(output, dtype=query.dtype)


def _rotated(x: np.ndarray) -> np.ndarray:
    """Both sides alike here, by the square root."""
    n = rotated_channels(x.shape[2])
    runs = x.reshape(*x.shape[:2], -1, n)
    return (runs @ oracle_formats.hadamard(n) / np.sqrt(n)).reshape(x.shape)


def _through(x: np.ndarray, spec: FormatSpec) -> np.ndarray:
    """Stored and read back, ``[N, T, D]``."""
    if not spec.quantized:
        return x
    rows = x.reshape(1, x.shape[0], -1, spec.group_size or x.shape[2])
    name = "token" if spec.granularity == "token" else "token_head"
    stored, scale, zero = oracle_formats.quantize(rows, name, spec.name, spec.symmetric)
    numbers = oracle_formats.as_numbers(stored, spec.name) * scale.astype(float)
    return (numbers + zero.astype(float)).reshape(x.shape)


def run(weights: LoadedModel, formats: list[LayerFormat], chunks: list[int] | None = None) -> Any:
    cache = PagedKVCache(weights.geometry, formats, len(scattered_blocks(len(TOKENS))), BLOCK_SIZE)
    logits = run_on_cache(weights, None, TOKENS, cache, chunks)
    return logits, cache


def rounds_to_words(name: str) -> bool:
    """Whether what its codes are multiplied with is rounded: then more of them lie on an edge."""
    return in_words() and "int" in name and "group" not in name


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_attention_over_the_bytes(weights: LoadedModel, name: str) -> None:
    formats = [layer_format(name)] * weights.geometry.num_layers
    logits, cache = run(weights, formats)
    assert cache.allocated_bytes == cache.num_blocks * weights.geometry.block_bytes(
        formats, BLOCK_SIZE
    )
    ids = torch.tensor([TOKENS])
    positions = torch.arange(len(TOKENS))[None]
    options = {"position_ids": positions, "use_cache": False}
    step = {STEP_KEYWORD: OracleStep(formats)}
    exact = weights.hf_model(input_ids=ids, **options, **step).logits[0]
    plain, _ = run(weights, [layer_format("float32")] * weights.geometry.num_layers)
    # a code on an edge may fall to the other side, so the largest error says little
    error, effect = ((x - exact).double().square().mean().sqrt() for x in (logits, plain))
    assert error < (5e-2 if rounds_to_words(name) else 2e-2) * effect
    assert effect > 1e-3  # the format is seen in the logits


@pytest.mark.parametrize("name", FORMATS)
def test_results_do_not_depend_on_chunks(weights: LoadedModel, name: str) -> None:
    formats = [layer_format(name)] * weights.geometry.num_layers
    whole, _ = run(weights, formats)
    for chunks in ([1] * len(TOKENS), [7, 1, 16, 5]):
        cut, _ = run(weights, formats, chunks)
        # sums round otherwise, and now and then a code on an edge falls to the other side
        error = (cut - whole).double().square().mean().sqrt()
        assert error < (5e-3 if rounds_to_words(name) else 1e-3)


def make_llm(weights: LoadedModel, **options: Any) -> LLM:
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20} | options
    return LLM(weights.path, weights=weights, skip_tokenizer_init=True, device="cpu", **options)


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_serves_batches_as_it_serves_one(weights: LoadedModel, name: str) -> None:
    llm = make_llm(weights, kv_cache_dtype=name)
    prompts = [TOKENS[:11], TOKENS[5:9], TOKENS]
    together = greedy(llm, prompts, 12)
    alone = [greedy(make_llm(weights, kv_cache_dtype=name), [prompt], 12)[0] for prompt in prompts]
    assert together == alone
    assert str(llm.formats[0]) == str(layer_format(name))


def test_layers_of_different_formats(weights: LoadedModel) -> None:
    layers = {"0": {"k": "int4/hadamard", "v": "fp8"}, "-1": "auto"}
    llm = make_llm(
        weights, kv_cache_config={"kv_cache_dtype": "int8", "kv_cache_dtype_layers": layers}
    )
    last = weights.geometry.num_layers - 1
    assert llm.formats[0] == layer_format("k:int4/hadamard+v:fp8")
    assert str(llm.formats[last]) == "float32"
    geometry = weights.geometry
    blocks = llm.cache.num_blocks
    assert llm.cache.allocated_bytes == blocks * geometry.block_bytes(llm.formats, llm.block_size)
    assert len(greedy(llm, [TOKENS], 5)[0]) == 5


@pytest.mark.parametrize("name", ["fp8/layer/static", "k:fp8_e5m2/head/static+v:float32"])
def test_static_scales_of_fp8(weights: LoadedModel, name: str, caplog: Any) -> None:
    spec = layer_format(name)
    geometry = weights.geometry

    def scales(factor: float) -> dict[str, torch.Tensor]:
        return {
            f"layers.{layer}.{side}_scale": torch.full(one.scale_shape(2, 16, 1), factor)
            for layer in range(geometry.num_layers)
            for side, one in (("key", spec.key), ("value", spec.value))
            if one.static
        }

    options = {"kv_cache_dtype": name, "scale_type": "static", "pair_scaling": False}
    wide = make_llm(weights, kv_cache_scales=scales(0.1), **options)
    assert len(greedy(wide, [TOKENS], 5)[0]) == 5
    assert not any(share for shares in wide.cache.clipped_shares().values() for share in shares)
    narrow = make_llm(weights, kv_cache_scales=scales(1e-8), **options)
    greedy(narrow, [TOKENS], 5)
    shares = narrow.cache.clipped_shares()
    assert all(layer.key > 0.5 for layer in shares.values())
    assert all((layer.value > 0.5) == spec.value.static for layer in shares.values())
    assert "static scales clip" in caplog.text


@pytest.mark.parametrize("name", ["int4/hadamard", "fp8", "k:int8+v:fp8"])
def test_conditioned_keys_are_stored_in_any_format(tmp_path: Path, name: str) -> None:
    """With pair scaling and the offset: nearer to the unquantized logits than without."""
    weights = load_uneven(tmp_path, model_type="qwen2", head_dim=16)
    for layer in weights.hf_model.model.layers:
        layer.self_attn.k_proj.bias.mul_(30)
    layers = weights.geometry.num_layers
    formats = [layer_format(name)] * layers
    blocks = len(scattered_blocks(len(TOKENS)))

    def logits(formats: list[LayerFormat], **options: Any) -> torch.Tensor:
        keys = condition_keys(weights, formats, **options)
        cache = PagedKVCache(weights.geometry, formats, blocks, BLOCK_SIZE)
        return run_on_cache(weights, keys, TOKENS, cache)

    off = {"pair_scaling": False, "key_offset_layers": "none"}
    plain = logits([layer_format("float32")] * layers, **off)
    bare, both = logits(formats, **off), logits(formats, key_offset_layers="all")
    scaled = condition_keys(weights, formats, key_offset_layers="none").conditioning.scaled_layers
    assert scaled == tuple(range(layers))
    assert (both - plain).norm() < 0.5 * (bare - plain).norm()


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("fp8", [False, True, True]),
        ("fp8_e5m2", [False, True, True]),
        ("int4/hadamard", [False, True, True]),
        ("k:fp8+v:int4", [False, True, True]),
        ("k:float32+v:int4", [False, False, False]),
        ("int8", [False, False, False]),
    ],
)
def test_the_offset_is_taken_by_format_and_size_of_the_bias(
    tmp_path: Path, name: str, offset: list[bool]
) -> None:
    """Layers whose key bias is 0.3, 2 and 5 times what varies."""
    weights = load_uneven(tmp_path, model_type="qwen2", head_dim=16, num_hidden_layers=3)
    for layer, wanted in ((0, 0.3), (1, 2.0), (2, 5.0)):
        attention = weights.hf_model.model.layers[layer].self_attn
        read = dict(layers_of(weights.hf_model, weights.geometry))[layer]
        assert isinstance(read, KeyWeights)
        attention.k_proj.bias.mul_(wanted / read.bias_share)
    keys = condition_keys(weights, [layer_format(name)] * 3)
    assert [layer.offset for layer in keys.conditioning.layers] == offset
    rotated = "hadamard" in name  # these are scaled where a bias that is large stays
    assert keys.conditioning.scaled_layers == (() if "float32" in name or rotated else (0, 1, 2))
    kept = condition_keys(weights, [layer_format(name)] * 3, key_offset_layers="none")
    assert kept.conditioning.scaled_layers == (
        () if "float32" in name else (1, 2) if rotated else (0, 1, 2)
    )
