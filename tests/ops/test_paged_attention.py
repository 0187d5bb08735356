"""paged_attention against the float64 oracle, on caches that are NaN wherever no token lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import check_as_good as check
from attention_calls import run, truth
from compare import assert_rounded, assert_within, largest

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.ops import attention_tiles

INT8 = {"dtype": torch.int8}
DECODES = ([1, 1, 1, 1], [33, 7, 16, 1])
MIXED = ([1, 5, 0, 1, 33, 1, 17], [20, 5, 9, 33, 40, 1, 17])


@pytest.mark.parametrize("dim", [40, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_head_dims(cache_with: Any, dim: int, dtype: torch.dtype) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dim=dim, dtype=dtype)
    check(cache, torch.randn(sum(queries), 4, dim), queries)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 7), (3, 1), (3, 3), (2, 2)])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_heads_and_blocks(cache_with: Any, kv_heads: int, group: int, block_size: int) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=kv_heads, block_size=block_size, dim=24)
    check(cache, torch.randn(sum(queries), kv_heads * group, 24), queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [DECODES, MIXED])
def test_unquantized(cache_with: Any, lengths: Any, dtype: torch.dtype) -> None:
    cache = cache_with(lengths[1], dtype=dtype)
    check(cache, torch.randn(sum(lengths[0]), 6, 64), lengths[0])


@pytest.mark.parametrize(
    "granularity", ["token", "token_head", "layer", "head", "channel", "group"]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_scales(cache_with: Any, granularity: str, symmetric: bool) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, granularity=granularity, symmetric=symmetric, dim=40)
    check(cache, torch.randn(sum(queries), 6, 40), queries)


LOW_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


@pytest.mark.parametrize("granularity", ["token", "token_head", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", LOW_BITS)
def test_fp8_and_int4(
    cache_with: Any, dtype: torch.dtype, granularity: str, symmetric: bool
) -> None:
    queries, lengths = MIXED
    for dim in (24, 40):
        cache = cache_with(
            lengths, granularity=granularity, symmetric=symmetric, dtype=dtype, dim=dim
        )
        check(cache, torch.randn(sum(queries), 6, dim), queries)


@pytest.mark.parametrize("granularity", ["layer", "head", "channel"])
@pytest.mark.parametrize("dtype", LOW_BITS[:2])
def test_static_scales_of_fp8(cache_with: Any, dtype: torch.dtype, granularity: str) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, granularity=granularity, dtype=dtype, dim=40)
    check(cache, torch.randn(sum(queries), 6, 40), queries)


@pytest.mark.parametrize("value", [torch.int8, torch.float16, *LOW_BITS])
@pytest.mark.parametrize("key", [torch.int8, torch.float16, *LOW_BITS])
def test_keys_and_values_of_different_types(
    cache_with: Any, key: torch.dtype, value: torch.dtype
) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=key, value_dtype=value, symmetric=False, dim=80)
    check(cache, torch.randn(sum(queries), 4, 80), queries, window=19)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_queries_round_once(cache_with: Any, dtype: torch.dtype) -> None:
    queries, lengths = MIXED
    query = torch.randn(sum(queries), 4, 64).to(dtype)
    cache = cache_with(lengths, dtype=torch.float8_e4m3fn)
    output, log_sum_exp = run(cache, query, queries)
    exact, sums = truth(cache, query, queries, np.float64)
    assert output.dtype == dtype
    assert_rounded(output, exact, slack=2e-6)
    assert log_sum_exp.dtype == torch.float32
    assert_within(log_sum_exp, sums, 2e-6)
    cache = cache_with(lengths)
    output, log_sum_exp = run(cache, query, queries)
    in_float32, sums = run(cache, query.float(), queries)
    assert torch.equal(output, in_float32.to(dtype)) and torch.equal(log_sum_exp, sums)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(cache_with: Any, window: int, causal: bool) -> None:
    queries, lengths = [1, 5, 1, 33, 1], [50, 37, 33, 40, 1]
    for dtype in (torch.int8, torch.float32):
        cache = cache_with(lengths, dtype=dtype, dim=16)
        query = torch.randn(sum(queries), 4, 16)
        check(cache, query, queries, window=window, causal=causal)


def test_without_causality_every_query_sees_all(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    query = torch.randn(1, 4, 64).expand(sum(queries), -1, -1)
    output, _ = run(cache, query, queries, causal=False)
    check(cache, query, queries, causal=False)
    assert torch.equal(output[1], output[5])  # first and last query of the second sequence


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_sinks(cache_with: Any, dtype: torch.dtype) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=dtype)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 40.0])
    check(cache, torch.randn(sum(queries), 4, 64), queries, sinks=sinks)


@pytest.mark.parametrize("granularity", ["token_head", "channel"])
def test_sinks_take_their_share_of_the_zero_points(cache_with: Any, granularity: str) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, granularity=granularity, symmetric=False)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 6.0])
    check(cache, torch.randn(sum(queries), 4, 64), queries, sinks=sinks)


def test_a_sink_of_minus_infinity_is_none(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    query = torch.randn(sum(queries), 4, 64)
    with_sink = run(cache, query, queries, sinks=torch.full((4,), -math.inf))
    for given, wanted in zip(with_sink, run(cache, query, queries), strict=True):
        assert torch.equal(given, wanted)


@pytest.mark.parametrize("window", [0, 5, 20])  # 5 leaves whole blocks out
@pytest.mark.parametrize("spare", [0, 11])
def test_score_bias(cache_with: Any, window: int, spare: int) -> None:
    queries, lengths = [1, 5, 0, 1, 33, 1], [20, 37, 9, 33, 40, 1]
    cache = cache_with(lengths, dim=16)
    bias = torch.randn(sum(queries), 6, max(lengths) + spare) * 2
    query = torch.randn(sum(queries), 6, 16)
    check(cache, query, queries, score_bias=bias, window=window)


def positions_for(cache: Any, block_size: int, kept: list[list[int]]) -> torch.Tensor:
    """Key positions of a cache whose sequences kept the tokens at these positions."""
    blocks, heads = cache.tensors[0].shape[:2]
    positions = torch.full((blocks, heads, block_size), 2**30, dtype=torch.int32)
    for row, places in enumerate(kept):
        for token, place in enumerate(places):
            block = int(cache.tables[row, token // block_size])
            for head in range(heads):  # each head may have kept others
                positions[block, head, token % block_size] = place + head
    return positions


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("with_bias", [False, True])
def test_key_positions(cache_with: Any, window: int, with_bias: bool) -> None:
    queries, lengths = [1, 4, 1, 1], [20, 9, 35, 3]
    cache = cache_with(lengths, dim=16)
    kept = [sorted(np.random.choice(60, length, replace=False).tolist()) for length in lengths]
    options: dict[str, Any] = {
        "key_positions": positions_for(cache, 16, kept),
        "query_positions": torch.tensor([59, 20, 30, 40, 61, 62, 30], dtype=torch.int32)[:7],
        "window": window,
    }
    if with_bias:
        options["score_bias"] = torch.randn(7, 4, 64)
    check(cache, torch.randn(7, 4, 16), queries, **options)


def test_key_positions_with_queries_at_the_end(cache_with: Any) -> None:
    queries, lengths = [1, 3], [20, 9]
    cache = cache_with(lengths, dim=16)
    kept = [list(range(20)), [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    query = torch.randn(4, 4, 16)
    check(cache, query, queries, key_positions=positions_for(cache, 16, kept))


def test_query_positions_alone(cache_with: Any) -> None:
    queries, lengths = [1, 3, 1, 2], [20, 9, 5, 1]
    cache = cache_with(lengths, dim=16)
    positions = torch.tensor([10, 8, 2, 0, 4, 0, 3])
    check(cache, torch.randn(7, 4, 16), queries, query_positions=positions)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_a_query_that_sees_nothing(cache_with: Any, sinks: torch.Tensor | None) -> None:
    queries, lengths = [1, 2, 1], [20, 9, 0]
    cache = cache_with(lengths, dim=16)
    kept = [list(range(30, 50)), list(range(4, 13)), []]
    options: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
    output, log_sum_exp = run(
        cache,
        torch.randn(4, 2, 16),
        queries,
        key_positions=positions_for(cache, 16, kept),
        query_positions=torch.tensor([29, 3, 12, 5]),
        **options,
    )
    nothing = torch.full((2,), -math.inf) if sinks is None else sinks
    for row in (0, 1, 3):
        assert torch.equal(output[row], torch.zeros(2, 16))
        assert torch.equal(log_sum_exp[row], nothing)
    assert output[2].abs().min() > 0 and log_sum_exp[2].isfinite().all()


def test_a_bias_may_hide_everything(cache_with: Any) -> None:
    cache = cache_with([9], dtype=torch.float32)
    bias = torch.full((1, 2, 9), -math.inf)
    output, log_sum_exp = run(cache, torch.randn(1, 2, 64), [1], score_bias=bias)
    assert torch.equal(output, torch.zeros(1, 2, 64))
    assert torch.equal(log_sum_exp, torch.full((1, 2), -math.inf))


def test_no_tokens(cache_with: Any) -> None:
    for queries, lengths in (([], []), ([0, 0], [5, 0])):
        cache = cache_with(lengths)
        output, log_sum_exp = run(cache, torch.randn(0, 4, 64), queries)
        assert output.shape == (0, 4, 64) and log_sum_exp.shape == (0, 4)


def test_strided_input(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    heads_first = torch.randn(6, sum(queries), 64).transpose(0, 1)
    check(cache, heads_first, queries)
    every_other = torch.randn(sum(queries), 12, 64)[:, ::2]
    check(cache, every_other, queries)
    tensors = tuple(torch.stack((x, x), 1)[:, 0] for x in cache.tensors)
    scales = {name: torch.stack((x, x), 2)[:, :, 0] for name, x in cache.scales.items()}
    strided = cache._replace(
        tensors=tensors, scales=scales, tables=torch.stack((cache.tables,) * 2, 2)[..., 0]
    )
    assert not strided.tensors[0].is_contiguous() and not strided.tables.is_contiguous()
    for given, wanted in zip(
        run(strided, every_other, queries), run(cache, every_other, queries), strict=True
    ):
        assert torch.equal(given, wanted)


def test_large_scores(cache_with: Any) -> None:
    """Nearly all weights are 0; near ties decide the error, by the rounding of the scores."""
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=torch.float32)
    query = torch.randn(sum(queries), 4, 64) * 300
    output, log_sum_exp = run(cache, query, queries)
    exact, sums = truth(cache, query, queries, np.float64)
    assert largest(sums) > 500
    rounding = np.finfo(np.float32).eps * largest(sums)
    assert_within(output, exact, rounding * largest(exact))
    assert_within(log_sum_exp, sums, 4 * rounding)  # the terms of a score cancel


def test_values_that_overflowed_stay_visible(cache_with: Any) -> None:
    cache = cache_with([5, 5], dtype=torch.float16)
    cache.tensors[1][int(cache.tables[0, 0]), :, 2, 3] = math.inf
    output, _ = run(cache, torch.randn(2, 2, 64), [1, 1])
    assert torch.isposinf(output[0, :, 3]).all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("part", ["key_scale", "value_scale"])
def test_a_poisoned_token_is_nan_for_those_who_see_it(cache_with: Any, part: str) -> None:
    cache = cache_with([20, 20, 40])
    cache.scales[part][int(cache.tables[0, 1]), 1, 3] = math.nan  # token 19, head 1
    output, _ = run(cache, torch.randn(42, 4, 64), [1, 1, 40])
    assert output[0, 2:].isnan().all()
    assert output[0, :2].isfinite().all() and output[1:].isfinite().all()


def groupings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tile sizes that force every way of cutting the work up."""
    for name, value in (
        ("GROUP_ELEMENTS", 1),
        ("GROUP_ELEMENTS", 1 << 60),
        ("PADDING_ELEMENTS", 0),
        ("SCORE_ELEMENTS", 1),
        ("SEQUENCE_ELEMENTS", 40 * 16),
        ("SEQUENCE_ELEMENTS", 2 * 40 * 16),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(attention_tiles, name, value)
            patch.setattr(attention_tiles, "MIN_TILE_QUERIES", 3)
            yield name, value


def test_how_the_work_is_cut_does_not_matter(
    cache_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=3, dim=16, granularity="token_head", symmetric=False)
    query = torch.randn(sum(queries), 6, 16)
    options = {
        "sinks": torch.randn(6),
        "score_bias": torch.randn(sum(queries), 6, 40),
        "window": 30,
    }
    kept = [np.random.permutation(60)[:length].tolist() for length in lengths]  # in no order
    moved = {
        "key_positions": positions_for(cache, 16, kept),
        "query_positions": torch.randint(0, 62, (sum(queries),)),
    }
    for _ in groupings(monkeypatch):
        check(cache, query, queries, **options)
        check(cache, query, queries, **moved)
        check(cache, query, queries)


def test_decodes_of_like_length_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "GROUP_ELEMENTS", 100)
    monkeypatch.setattr(attention_tiles, "PADDING_ELEMENTS", 20)
    blocks = [3, 10, 9, 10, 2, 9, 9]
    decodes = [
        attention_tiles.Decode(count, row, row, count * 4, 0) for row, count in enumerate(blocks)
    ]
    groups = list(attention_tiles.decode_groups(decodes, block_elements=2))
    assert [[d.num_blocks for d in group] for group in groups] == [[10, 10, 9, 9, 9], [3, 2]]
    assert sorted(d.row for group in groups for d in group) == list(range(7))
    monkeypatch.setattr(attention_tiles, "GROUP_ELEMENTS", 1000)
    monkeypatch.setattr(attention_tiles, "PADDING_ELEMENTS", 6)  # 3 blocks of padding, not 4
    decodes = [attention_tiles.Decode(count, 0, 0, count * 4, 0) for count in (10, 9, 9, 8, 8)]
    groups = list(attention_tiles.decode_groups(decodes, block_elements=2))
    assert [[d.num_blocks for d in group] for group in groups] == [[10, 9, 9], [8, 8]]


def test_opcheck(cache_with: Any, opcheck: Any) -> None:
    queries, lengths = [1, 3, 1], [20, 5, 9]
    kept = [list(range(length)) for length in lengths]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"causal": False, "window": 4, "sinks": torch.randn(4)}),
        ({"symmetric": False, "granularity": "token"}, {"query_positions": torch.arange(5) + 15}),
        ({"granularity": "channel"}, {"score_bias": torch.randn(5, 4, 20)}),
        ({"dtype": torch.float16}, {}),
    ]
    for kind, extra in cases:
        cache = cache_with(lengths, dim=8, **kind)
        if "query_positions" in extra:
            extra["key_positions"] = positions_for(cache, 16, kept)
        query = torch.randn(5, 4, 8).to(torch.bfloat16)
        arguments = (query, *cache.tensors, cache.tables, queries, lengths, 0.3)
        opcheck("paged_attention", *arguments, **cache.scales, **extra)


def legal(cache_with: Any) -> dict[str, Any]:
    cache = cache_with([20, 5])
    return {
        "query": torch.randn(3, 4, 64),
        "key_cache": cache.tensors[0],
        "value_cache": cache.tensors[1],
        "block_tables": cache.tables,
        "query_lengths": [1, 2],
        "kv_lengths": [20, 5],
        "softmax_scale": 0.125,
        **cache.scales,
    }


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("query", {"query": torch.randn(3, 3, 64)}),
        ("query", {"query": torch.randn(3, 4, 32)}),
        ("query", {"query": torch.randn(3, 256)}),
        ("query", {"query": torch.randn(3, 4, 64, dtype=torch.float64)}),
        ("key_cache", {"key_cache": torch.zeros(5, 2, 1024, dtype=torch.int8)}),
        ("key_cache", {"key_cache": torch.zeros(5, 2, 16, 64, dtype=torch.int16)}),
        ("value_cache", {"value_cache": torch.zeros(5, 2, 16, 32, dtype=torch.int8)}),
        ("key_scale", {"key_scale": None}),
        ("value_scale", {"value_scale": None}),
        ("key_scale", {"key_scale": torch.rand(5, 2, 8)}),
        ("key_scale", {"key_scale": torch.rand(2, 2, 1, 1)}),
        ("key_scale", {"key_scale": torch.rand(5, 2, 16, 3)}),
        ("key_scale", {"key_scale": torch.rand(5, 1, 16, 8)}),
        ("value_scale", {"value_scale": torch.rand(5, 2, 16, 1)}),
        ("key_scale", {"key_scale": torch.rand(5, 2, 16, dtype=torch.float64)}),
        ("key_zero_point", {"key_zero_point": torch.rand(5, 1, 16)}),
        ("key_scale", {"key_cache": torch.zeros(5, 2, 16, 64)}),
        ("value_scale", {"value_cache": torch.zeros(5, 2, 16, 64)}),
        ("block_tables", {"block_tables": torch.zeros(3, 2, dtype=torch.int32)}),
        ("block_tables", {"block_tables": torch.zeros(2, 2)}),
        ("block_tables", {"block_tables": torch.full((2, 2), -1, dtype=torch.int32)}),
        ("block_tables", {"block_tables": torch.full((2, 2), 5, dtype=torch.int32)}),
        ("kv_lengths", {"kv_lengths": [49, 5]}),
        ("kv_lengths", {"kv_lengths": [20, -1]}),
        ("query_lengths", {"query_lengths": [1, 1]}),
        ("query_lengths", {"query_lengths": [1, 1, 1]}),
        ("query_lengths[1]", {"query_lengths": [1, 2], "kv_lengths": [20, 1]}),
        ("query_lengths[0]", {"query_lengths": [-1, 4]}),
        ("window", {"window": -1}),
        ("sinks", {"sinks": torch.zeros(2)}),
        ("score_bias", {"score_bias": torch.zeros(3, 4, 19)}),
        ("score_bias", {"score_bias": torch.zeros(3, 2, 20)}),
        ("key_positions", {"key_positions": torch.zeros(5, 1, 16, dtype=torch.int32)}),
        ("key_positions", {"key_positions": torch.zeros(5, 2, 16, dtype=torch.int64)}),
        ("query_positions", {"query_positions": torch.zeros(2, dtype=torch.int32)}),
        ("query_positions", {"query_positions": torch.zeros(3)}),
        ("query_positions", {"query_positions": torch.zeros(3, dtype=torch.bool)}),
    ],
)
def test_mistakes_name_the_argument(cache_with: Any, field: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        ops.paged_attention(**{**legal(cache_with), **change})
    assert error.value.field == field


def test_a_bias_too_short_for_the_positions_is_seen_on_a_cpu(cache_with: Any) -> None:
    cache = cache_with([3])
    positions = positions_for(cache, 16, [[0, 5, 20]])
    with pytest.raises(UsageError, match="score_bias"):
        run(
            cache,
            torch.randn(1, 2, 64),
            [1],
            key_positions=positions,
            query_positions=torch.tensor([30]),
            score_bias=torch.zeros(1, 2, 20),
        )
