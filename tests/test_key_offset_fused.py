"""Keys stored without their offset, attended to through the plan for the NPU's fused attention.

On every route the score bias gives the offset back, and nothing else does, or it would count
twice. What is expected is dense float64 attention over keys that have it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from npu_stand_in import StandIn

from ascend_kv import ops
from ascend_kv.cache.paged import LayerCache
from ascend_kv.integrations import key_offset
from ascend_kv.integrations.key_offset import KeyOffset
from ascend_kv.ops import fused_execute

Tensor = torch.Tensor
HEADS, KV_HEADS, DIM = 6, 2, 32
# Decodes and prefills, one of them behind what is cached, a sequence without queries.
QUERIES, LENGTHS = [1, 9, 0, 1, 40, 1], [150, 9, 5, 1, 170, 64]


def make_cache(kind: str, block_size: int) -> LayerCache:
    blocks = sum(-(-length // block_size) for length in LENGTHS) + 1
    shape = (blocks, KV_HEADS, block_size, DIM)
    if not kind.startswith("int8"):
        dtype = getattr(torch, kind)
        return LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    codes = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2)]
    scale_shape = (*shape[:3], 4) if kind == "int8 groups" else shape[:3]
    scales = [torch.rand(scale_shape) / 50 for _ in range(2)]
    points = [torch.randn(scale_shape) for _ in range(2)] if kind == "int8 asymmetric" else []
    return LayerCache(*codes, *scales, *points)


def make_offset() -> KeyOffset:
    """Large in the slowest pair, as models have it."""
    half = DIM // 2
    angles = torch.arange(200)[:, None] * 1e6 ** -(torch.arange(half) / half)
    offset = torch.randn(KV_HEADS, DIM)
    offset[:, [half - 1, DIM - 1]] *= 300.0
    return KeyOffset({1: offset}, torch.stack((angles.cos(), angles.sin()), -1).float())


def make_tables(block_size: int) -> Tensor:
    widths = [-(-length // block_size) for length in LENGTHS]
    order = torch.randperm(sum(widths)).tolist()
    rows = [[order.pop() for _ in range(width)] for width in widths]
    return torch.tensor([row + [-1] * (max(widths) - len(row)) for row in rows])


def dense(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Causal attention of packed queries over ``[B, N, longest, D]``, in float64."""
    outputs = []
    start = 0
    for row, (count, cached) in enumerate(zip(QUERIES, LENGTHS, strict=True)):
        asked = query[start : start + count].double().transpose(0, 1)
        keys, values = (
            x[row, :, :cached].double().repeat_interleave(HEADS // KV_HEADS, 0)
            for x in (key, value)
        )
        distance = torch.arange(cached - count, cached)[:, None] - torch.arange(cached)
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = (asked @ keys.mT * DIM**-0.5).masked_fill(hidden, -math.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "block_size", "decode", "prefill"),
    [
        ("int8", 32, "paged", "loaded"),
        ("int8 asymmetric", 32, "paged", "loaded"),
        ("int8 groups", 32, "loaded", "loaded"),
        ("query's", 128, "paged", "paged"),
        ("query's", 32, "paged", "loaded"),
        ("float32", 32, "loaded", "loaded"),
    ],
)
@pytest.mark.parametrize("most_elements", [1 << 24, HEADS * 200], ids=["one call", "cut"])
def test_the_offset_counts_once(
    kind: str,
    block_size: int,
    decode: str,
    prefill: str,
    dtype: torch.dtype,
    window: int,
    most_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3)
    name = str(dtype).removeprefix("torch.") if kind == "query's" else kind
    cache, offset, tables = make_cache(name, block_size), make_offset(), make_tables(block_size)
    query = torch.randn(sum(QUERIES), HEADS, DIM).to(dtype)
    taken: dict[str, Any] = {}
    monkeypatch.setattr(fused_execute, "routes_taken", taken)
    monkeypatch.setattr(key_offset, "SCORE_BIAS_ELEMENTS", most_elements)
    monkeypatch.setattr(ops, "paged_attention", partial(fused_execute.attend, StandIn()))
    actual = offset.attend(1, query, cache, tables, QUERIES, LENGTHS, DIM**-0.5, window)

    caches = (cache.key, cache.value, tables, LENGTHS)
    options = {"dtype": torch.float32, **cache.scales}
    exact = dense(query, *ops.kv_cache_load(*caches, **options, **offset.load_arguments(1)), window)
    without = dense(query, *ops.kv_cache_load(*caches, **options), window)
    assert {words.split(" (")[0] for words in taken} == {f"decode: {decode}", f"prefill: {prefill}"}
    # the device takes the bias in the query's type; the largest of each query is exact
    allowed = 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (actual - exact).abs().max() < allowed < (without - exact).abs().max() / 4


def test_an_offset_becomes_the_bias_that_the_device_wants() -> None:
    """Given to the operator itself: as many positions as the longest sequence, on every route."""
    cache, tables = make_cache("int8", 32), make_tables(32)
    query = torch.randn(sum(QUERIES), HEADS, DIM).to(torch.float16)
    frequencies = torch.rand(DIM // 2, dtype=torch.float64)
    call = (query, cache.key, cache.value, tables, QUERIES, LENGTHS, DIM**-0.5)
    given = {
        "key_offset": 10 * torch.randn(KV_HEADS, DIM),
        "rotary_frequencies": frequencies,
        "offset_query": torch.randn_like(query),
    }
    output, _ = fused_execute.attend(StandIn(), *call, **cache.scales, **given)
    expected, _ = ops.paged_attention(*call, **cache.scales, **given)
    without, _ = ops.paged_attention(*call, **cache.scales)
    error = (output - expected).abs().max()
    assert error < 0.01 < (without - expected).abs().max() / 4
