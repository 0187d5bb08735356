"""paged_attention over keys that lack a rotated offset, against the float64 oracle."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import run, tolerance, truth
from compare import assert_as_good, assert_within

from ascend_kv.errors import UsageError
from ascend_kv.formats.hadamard import rotate_back
from ascend_kv.ops.attention_offset import lacking_at, score_bias_of
from ascend_kv.ops.registration import NAMESPACE, REFERENCE_NAMESPACE, operator

Tensor = torch.Tensor


@pytest.fixture(autouse=True, params=[NAMESPACE, REFERENCE_NAMESPACE], ids=["native", "reference"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is built here, and the reference."""
    module = sys.modules["ascend_kv.ops.paged_attention"]
    monkeypatch.setattr(module, "_op", operator("paged_attention", request.param))


# decodes and prefills, sequences of several tiles, one without queries
MIXED = ([1, 5, 0, 1, 33, 1, 130], [150, 65, 9, 64, 40, 1, 130])


def draw(kv_heads: int, dim: int) -> dict[str, Tensor]:
    """An offset, and frequencies from fast to slow as a model's."""
    pairs = dim // 2
    frequencies = 1e6 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    return {"key_offset": torch.randn(kv_heads, dim), "rotary_frequencies": frequencies}


def whole_bias(
    query: Tensor, offset: dict[str, Tensor], length: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The sum over pairs, term by term, angles in float64: ``[T, H, length]``; query not scaled."""
    tokens, heads, dim = query.shape
    key, frequencies = offset["key_offset"].to(dtype), offset["rotary_frequencies"]
    query = query.to(dtype) * dim**-0.5
    bias = torch.zeros(tokens, heads, length, dtype=dtype)
    places = torch.arange(length, dtype=torch.float64)
    for h in range(heads):
        b1, b2 = key[h * len(key) // heads].chunk(2)
        q1, q2 = query[:, h, :, None].chunk(2, 1)
        for j, frequency in enumerate(frequencies):
            angles = places * frequency
            cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
            bias[:, h] += q1[:, j] * (b1[j] * cosine - b2[j] * sine)
            bias[:, h] += q2[:, j] * (b2[j] * cosine + b1[j] * sine)
    return bias


def check(
    cache: Any,
    query: Tensor,
    queries: list[int],
    offset: dict[str, Tensor],
    **options: Any,
) -> None:
    """As good as the oracle in float32 with the whole bias."""
    length = max(cache.kv_lengths)
    found = run(cache, query, queries, **offset, **options)
    plain = options.pop("offset_query", query)
    exact, naive = (
        truth(cache, query, queries, dtype, score_bias=bias, **options)
        for dtype, bias in (
            (np.float64, whole_bias(plain, offset, length)),
            (np.float32, whole_bias(plain, offset, length, torch.float32)),
        )
    )
    for result, true, baseline in zip(found, exact, naive, strict=True):
        assert_as_good(result, true, baseline)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3), (1, 7), (3, 2), (1, 9)])
@pytest.mark.parametrize("dim", [2, 34, 80])
def test_shapes(cache_with: Any, kv_heads: int, group: int, dim: int) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=kv_heads, dim=dim)
    query = torch.randn(sum(queries), kv_heads * group, dim)
    check(cache, query, queries, draw(kv_heads, dim))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("window", [0, 5, 70])
def test_formats_windows_and_sinks(cache_with: Any, dtype: torch.dtype, window: int) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=dtype, dim=24, block_size=7)
    query = torch.randn(sum(queries), 6, 24)
    sinks = torch.randn(6)
    check(cache, query, queries, draw(2, 24), window=window, sinks=sinks)


SCALES = ["layer", "head", "channel", "token", "token_head", "group"]


@pytest.mark.parametrize("granularity", SCALES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales(cache_with: Any, granularity: str, symmetric: bool) -> None:
    """By key, by channel or for all: the offset is added to what they make of the codes."""
    queries, lengths = MIXED
    options = {"granularity": granularity, "symmetric": symmetric}
    cache = cache_with(lengths, dtype=torch.int8, dim=32, **options)
    check(cache, torch.randn(sum(queries), 6, 32), queries, draw(2, 32))


@pytest.mark.parametrize("options", [{"causal": False}, {"query_positions": torch.arange(7) * 9}])
def test_what_queries_see(cache_with: Any, options: dict[str, Any]) -> None:
    cache = cache_with([90, 20], dim=16)
    check(cache, torch.randn(7, 4, 16), [2, 5], draw(2, 16), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_transformed_keys(cache_with: Any, dtype: torch.dtype) -> None:
    """The offset meets queries as they were before they were made to fit the keys."""
    queries, lengths = MIXED
    cache = cache_with(lengths, dim=16)
    plain = torch.randn(sum(queries), 4, 16).to(dtype)
    check(cache, rotate_back(plain), queries, draw(2, 16), offset_query=plain)


def test_frequencies_in_any_order(cache_with: Any) -> None:
    """A fast pair after slow ones, pairs that turn back, one that stands still."""
    cache = cache_with([150, 65], dim=48)
    offset = draw(2, 48)
    frequencies = offset["rotary_frequencies"]
    frequencies[20], frequencies[21], frequencies[5] = 0.0, -1e-3, -0.5
    for order in (torch.arange(24), torch.arange(24).flip(0), torch.randperm(24)):
        offset["rotary_frequencies"] = frequencies[order]
        for queries in ([1, 1], [20, 3]):
            check(cache, torch.randn(sum(queries), 4, 48), queries, offset)


@pytest.mark.parametrize("queries", [[1, 1], [60, 20]])
def test_a_large_offset(cache_with: Any, queries: list[int]) -> None:
    """One key takes all; scores of thousands keep float32's relative exactness."""
    cache = cache_with([200, 77], dim=16)
    query, offset = torch.randn(sum(queries), 2, 16), draw(2, 16)
    offset["key_offset"] *= 1e4
    bias = whole_bias(query, offset, 200)
    _, found = run(cache, query, queries, **offset)
    _, exact = truth(cache, query, queries, np.float64, score_bias=bias)
    assert_within(found, exact, 4e-7 * float(bias.abs().max()))


@pytest.mark.parametrize("queries", [[1, 1], [20, 30]])
def test_nothing(cache_with: Any, queries: list[int]) -> None:
    cache = cache_with([20, 70], dim=16)
    query, offset = torch.randn(sum(queries), 4, 16), draw(2, 16)
    offset["key_offset"].zero_()
    given = run(cache, query, queries, **offset)
    for found, wanted in zip(given, run(cache, query, queries), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance(), atol=tolerance())
    empty = run(cache, query[:0], [0, 0], **offset)
    assert empty[0].shape == (0, 4, 16)


def test_positions_and_entries(cache_with: Any) -> None:
    """What only the reference serves."""
    cache = cache_with([20, 9], dim=16)
    blocks, heads = cache.tensors[0].shape[:2]
    options = {
        "key_positions": torch.randint(0, 64, (blocks, heads, 16), dtype=torch.int32),
        "query_positions": torch.tensor([59, 20, 61]),
    }
    query, offset = torch.randn(3, 4, 16), draw(2, 16)
    bias = whole_bias(query, offset, 64).float()
    for more in ({}, {"entries": torch.tensor([[3, 0, -1], [19, 5, 2], [8, 8, -1]]).int()}):
        found = run(cache, query, [2, 1], **offset, **options, **more)
        expected = run(cache, query, [2, 1], score_bias=bias, **options, **more)
        for result, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=tolerance(), atol=tolerance())


@pytest.mark.parametrize("queries", [1, 10])
def test_the_millionth_position_is_as_exact_as_the_first(cache_with: Any, queries: int) -> None:
    length = 1_000_000
    cache = cache_with([length], kv_heads=1, dim=8, block_size=64)
    for tensor in cache.tensors:
        tensor.zero_()
    query, offset = torch.randn(queries, 1, 8), draw(1, 8)
    bias = whole_bias(query, offset, length)[-1, 0]
    for window, allowed in ((150, 4e-6), (length, 1e-4)):  # a million terms add up
        _, sums = run(cache, query, [queries], **offset, window=window)
        assert_within(sums[-1, 0], bias[-window:].logsumexp(-1).numpy(), allowed)


def test_the_slowest_pairs_of_a_long_sequence(cache_with: Any) -> None:
    """So long that an item has more tiles than those pairs are added up for at once."""
    length = 140_000
    cache = cache_with([length], kv_heads=1, dim=96, block_size=64)
    for tensor in cache.tensors:
        tensor.zero_()
    query, offset = torch.randn(1, 2, 96), draw(1, 96)
    offset["key_offset"] *= 3
    bias = whole_bias(query, offset, length)[0]
    _, sums = run(cache, query, [1], **offset)
    assert_within(sums[0], bias.logsumexp(-1).numpy(), 1e-4)


def test_the_bias_that_an_offset_stands_for() -> None:
    query, offset = torch.randn(3, 4, 10), draw(2, 10)
    bias = score_bias_of(query * 10**-0.5, **offset, length=70)
    assert bias.shape == (3, 4, 70)
    assert_within(bias, whole_bias(query, offset, 70).numpy(), 1e-5)
    positions = torch.tensor([[[5, 69]], [[0, 3]], [[12, 9]]])
    some = lacking_at(query[:, None] * 10**-0.5, **offset, positions=positions)
    for t in range(3):
        assert_within(some[t, :, 0], bias[t][:, positions[t, 0]].numpy(), 1e-5)


OFFSET, FREQUENCIES = torch.zeros(2, 16), torch.zeros(8, dtype=torch.float64)
BOTH = {"key_offset": OFFSET, "rotary_frequencies": FREQUENCIES}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("key_offset", {"rotary_frequencies": FREQUENCIES}),
        ("rotary_frequencies", {"key_offset": OFFSET}),
        ("key_offset", {**BOTH, "key_offset": OFFSET[:1]}),
        ("key_offset", {**BOTH, "key_offset": OFFSET.double()}),
        ("rotary_frequencies", {**BOTH, "rotary_frequencies": FREQUENCIES[:4]}),
        ("rotary_frequencies", {**BOTH, "rotary_frequencies": FREQUENCIES.float()}),
        ("offset_query", {"offset_query": torch.zeros(3, 4, 16)}),
        ("offset_query", {**BOTH, "offset_query": torch.zeros(3, 2, 16)}),
        ("offset_query", {**BOTH, "offset_query": torch.zeros(3, 4, 16).int()}),
        ("score_bias", {**BOTH, "score_bias": torch.zeros(3, 4, 20)}),
    ],
)
def test_what_is_refused(cache_with: Any, field: str, given: dict[str, Tensor]) -> None:
    cache = cache_with([20, 9], dim=16)
    with pytest.raises(UsageError, match=field):
        run(cache, torch.randn(3, 4, 16), [1, 2], **given)


def test_channels_without_a_partner_are_refused(cache_with: Any) -> None:
    cache = cache_with([20], dim=15)
    given = {"key_offset": torch.zeros(2, 15), "rotary_frequencies": FREQUENCIES[:7]}
    with pytest.raises(UsageError, match="even number of channels"):
        run(cache, torch.randn(1, 2, 15), [1], **given)


@pytest.mark.parametrize("queries", [1, 12])
def test_an_infinite_offset_is_no_number(cache_with: Any, queries: int) -> None:
    cache = cache_with([20], dim=16)
    given = BOTH | {"key_offset": torch.full((2, 16), math.inf)}
    _, sums = run(cache, torch.randn(queries, 4, 16), [queries], **given)
    assert sums.isnan().all()
