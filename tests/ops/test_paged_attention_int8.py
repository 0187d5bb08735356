"""paged_attention over INT8 (and INT4, where that goes the same ways), against the float64 oracle.

Where the CPU multiplies codes in whole numbers, by a matrix unit from five query heads a KV head on
or in words for any, queries and weights become whole numbers too, and a row that these cannot hold
takes another way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import WORD_BITS, check_as_good, in_words, run, tolerance, truth
from compare import assert_within, largest
from oracle import read_sequence

INT8 = torch.int8
# one tile and less, several, and an end in the middle of a vector, of a block and of a tile
LENGTHS = [1, 3, 40, 64, 131]
DECODES = [1] * len(LENGTHS)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 17])
@pytest.mark.parametrize("dim", [8, 34, 40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_groups(cache_with: Any, group: int, dim: int, dtype: torch.dtype) -> None:
    cache = cache_with(LENGTHS, dim=dim, dtype=dtype)
    check_as_good(cache, torch.randn(5, 2 * group, dim), DECODES)


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("dim", [96, 136, 192, 256, 264, 520])
@pytest.mark.parametrize("block_size", [3, 64])
def test_wide_heads(cache_with: Any, dim: int, block_size: int, group: int) -> None:
    cache = cache_with(LENGTHS, dim=dim, block_size=block_size, kv_heads=1)
    check_as_good(cache, torch.randn(5, group, dim), DECODES)


@pytest.mark.parametrize("queries", [[1, 3, 40, 64, 131], [0, 2, 3, 30, 99]])
def test_prefills(cache_with: Any, queries: list[int]) -> None:
    cache = cache_with(LENGTHS, symmetric=False)
    check_as_good(cache, torch.randn(sum(queries), 6, 64), queries, window=50)


@pytest.mark.parametrize("granularity", ["token", "layer", "head", "channel", "group"])
def test_scales(cache_with: Any, granularity: str) -> None:
    cache = cache_with(LENGTHS, granularity=granularity, symmetric=False, dim=64)
    check_as_good(cache, torch.randn(5, 14, 64), DECODES, sinks=torch.randn(14))


@pytest.mark.parametrize("other", [torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_one_side_alone(cache_with: Any, other: torch.dtype) -> None:
    query = torch.randn(5, 14, 64)
    check_as_good(cache_with(LENGTHS, value_dtype=other), query, DECODES)
    check_as_good(cache_with(LENGTHS, dtype=other, value_dtype=INT8), query, DECODES)


@pytest.mark.parametrize("code", [-128, 127])
@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("group", [1, 8])
def test_the_largest_sums(cache_with: Any, code: int, dim: int, group: int) -> None:
    """Every code, query and weight as large as they can be, all of one sign."""
    cache = cache_with([64], dim=dim, kv_heads=1)
    for codes in cache.tensors:
        codes.fill_(code)
    for scale in ("key_scale", "value_scale"):
        cache.scales[scale].fill_(0.01)
    for size in (1.0, -1.0):  # equal terms add up in float32 with errors that add up too
        query = torch.full((1, group, dim), size)
        for found, exact in zip(
            run(cache, query, [1]), truth(cache, query, [1], np.float64), strict=True
        ):
            assert_within(found, exact, 2e-6 * largest(exact))


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_rounding_is_as_documented(cache_with: Any, group: int, outlier: float) -> None:
    """By ``native.whole_number_bits``: of one key the log-sum-exp is the score."""
    cache = cache_with([1] * 40, dim=128)
    query = torch.randn(40, 2 * group, 128)
    query[:, :, 5] *= outlier
    _, scores = run(cache, query, [1] * 40)
    _, exact = truth(cache, query, [1] * 40, np.float64)
    keys = np.concatenate([read_sequence(cache.sides[0], t, 1) for t in cache.tables.numpy()], 1)
    keys = np.abs(keys.swapaxes(0, 1)).repeat(group, 1)
    asked = query.abs().double().numpy() * 128**-0.5
    error = np.abs(scores.double().numpy() - exact)
    step = asked.max(-1) / (2 ** ((WORD_BITS if in_words() else 64) - 1) - 1)
    float32 = 128 * np.finfo(np.float32).eps * (asked * keys).sum(-1)
    assert (error <= step / 2 * keys.sum(-1) + float32).all()
    if in_words():  # and no coarser than that: errors spread evenly over a step
        expected = step / math.sqrt(12) * np.sqrt((keys**2).sum(-1))
        assert 0.8 < np.sqrt(np.mean((error / expected) ** 2)) < 1.2


@pytest.mark.parametrize("group", [1, 7])
def test_negative_scales(cache_with: Any, group: int) -> None:
    cache = cache_with(LENGTHS)
    for scale in cache.scales.values():
        scale[:, :, ::3] *= -1
    check_as_good(cache, torch.randn(5, 2 * group, 64), DECODES)


def test_queries_of_all_sizes(cache_with: Any) -> None:
    """The rows of a group differ by 40 powers of ten; one is 0."""
    cache = cache_with(LENGTHS)
    query = torch.randn(5, 16, 64) * torch.logspace(-38, 2, 16)[:, None]
    query[:, 3] = 0
    check_as_good(cache, query, DECODES)


def test_small_queries_and_large_key_scales(cache_with: Any) -> None:
    cache = cache_with(LENGTHS)
    cache.scales["key_scale"] *= 1e33
    check_as_good(cache, torch.randn(5, 16, 64) * 1e-33, DECODES)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-20, 1e30])
def test_value_scales_of_all_sizes(cache_with: Any, size: float) -> None:
    cache = cache_with([300], kv_heads=1)
    cache.scales["value_scale"] *= size
    check_as_good(cache, torch.randn(1, 7, 64), [1])


def test_small_and_large_tiles(cache_with: Any) -> None:
    """What whole numbers cannot hold is computed another way, tile by tile."""
    cache = cache_with([300], kv_heads=1)
    for place, size in ((2, 1e-43), (5, 1e-36), (11, 1e10), (16, 0.0)):
        cache.scales["value_scale"][int(cache.tables[0, place])] *= size
    check_as_good(cache, torch.randn(1, 7, 64), [1])


@pytest.mark.parametrize(
    ("part", "value"),
    [("key_scale", math.nan), ("value_scale", math.nan), ("value_scale", math.inf)],
)
def test_a_poisoned_token(cache_with: Any, part: str, value: float) -> None:
    """Seen by those queries alone that see its KV head."""
    cache = cache_with([150, 150])
    cache.scales[part][int(cache.tables[0, 6]), 1, 3] = value
    output, _ = run(cache, torch.randn(2, 14, 64), [1, 1])
    assert not output[0, 7:].isfinite().any(1).any()
    assert output[0, :7].isfinite().all() and output[1].isfinite().all()


@pytest.mark.parametrize("value_dtype", [INT8, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_query(cache_with: Any, value: float, value_dtype: torch.dtype) -> None:
    cache = cache_with([150], kv_heads=1, value_dtype=value_dtype)
    query = torch.randn(1, 7, 64)
    clean, _ = run(cache, query, [1])
    query[0, 2, 5] = value
    output, _ = run(cache, query, [1])
    rest = [0, 1, 3, 4, 5, 6]
    assert output[0, 2].isnan().all()
    torch.testing.assert_close(output[0, rest], clean[0, rest], rtol=tolerance(), atol=tolerance())


def test_the_same_bits_from_any_number_of_threads(cache_with: Any) -> None:
    queries = [1, 1, 3, 9, 20]
    cache = cache_with([1, 2100, 300, 64, 131])
    query, before = torch.randn(sum(queries), 14, 64), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(run(cache, query, queries))
    finally:
        torch.set_num_threads(before)
    for output in outputs[1:]:
        assert all(map(torch.equal, output, outputs[0]))


def test_products_of_torch_are_left_as_they_were(cache_with: Any) -> None:
    """They may use the same unit, set up for shapes of their own."""
    cache, query = cache_with([150]), torch.randn(1, 14, 64)
    a, b = torch.randn(33, 96).bfloat16(), torch.randn(96, 40).bfloat16()
    before = a @ b
    for _ in range(3):
        run(cache, query, [1])
        assert torch.equal(a @ b, before)
