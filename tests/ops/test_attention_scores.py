"""attention_scores against the float64 oracle, on caches that are NaN wherever no token lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import oracle_more
import pytest
import torch
from compare import assert_as_good, assert_within

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.ops import attention_tiles

MIXED = ([1, 5, 0, 1, 33, 1, 17], [20, 5, 9, 33, 40, 1, 17])


def run(cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any) -> torch.Tensor:
    scales = {name: x for name, x in cache.scales.items() if name.startswith("key")}
    return ops.attention_scores(
        query,
        cache.tensors[0],
        cache.tables,
        query_lengths,
        cache.kv_lengths,
        query.shape[2] ** -0.5,
        **scales,
        **options,
    )


def check(cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any) -> None:
    """As good as the same in float32 by loops."""
    scores = run(cache, query, query_lengths, **options)
    visible = oracle.Visible(options.pop("causal", True), options.pop("window", 0))
    arrays = {name: option.double().numpy() for name, option in options.items()}
    exact, naive = (
        oracle_more.attention_scores(
            query.double().numpy(),
            cache.sides[0],
            cache.tables.numpy(),
            query_lengths,
            cache.kv_lengths,
            query.shape[2] ** -0.5,
            visible=visible,
            dtype=dtype,
            **arrays,
        )
        for dtype in (np.float64, np.float32)
    )
    assert scores.dtype == torch.float32
    assert_as_good(scores, exact, naive)


@pytest.mark.parametrize("dim", [40, 64, 512])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_head_dims(cache_with: Any, dim: int, dtype: torch.dtype) -> None:
    queries, lengths = [4, 1, 0, 9], [20, 33, 7, 9]
    cache = cache_with(lengths, dim=dim, dtype=dtype)
    check(cache, torch.randn(sum(queries), 4, dim), queries)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 7), (3, 1), (3, 2)])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_heads_and_blocks(cache_with: Any, kv_heads: int, group: int, block_size: int) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=kv_heads, block_size=block_size, dim=24)
    check(cache, torch.randn(sum(queries), kv_heads * group, 24), queries)


@pytest.mark.parametrize("granularity", ["token", "token_head", "head", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_scales(cache_with: Any, granularity: str, symmetric: bool) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, granularity=granularity, symmetric=symmetric, dim=16)
    check(cache, torch.randn(sum(queries), 6, 16), queries)


@pytest.mark.parametrize("window", [0, 1, 17])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_and_sinks(cache_with: Any, window: int, causal: bool) -> None:
    queries, lengths = [1, 5, 1, 33, 1], [50, 37, 33, 40, 1]
    cache = cache_with(lengths, dim=16)
    query = torch.randn(sum(queries), 4, 16)
    options: dict[str, Any] = {"window": window, "causal": causal}
    check(cache, query, queries, **options)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 40.0])
    check(cache, query, queries, sinks=sinks, **options)


@pytest.mark.parametrize("with_bias", [False, True])
def test_positions_and_bias(cache_with: Any, with_bias: bool) -> None:
    queries, lengths = [1, 4, 1, 1], [20, 9, 35, 3]
    cache = cache_with(lengths, dim=16)
    positions = torch.full(cache.tensors[0].shape[:3], 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for j, place in enumerate(sorted(np.random.choice(60, length, replace=False).tolist())):
            block = int(cache.tables[row, j // 16])
            positions[block, :, j % 16] = place + torch.arange(2, dtype=torch.int32)
    options = {
        "key_positions": positions,
        "query_positions": torch.tensor([59, 20, 30, 40, 61, 62, 30]),
    }
    if with_bias:
        options["score_bias"] = torch.randn(7, 4, 64)
    check(cache, torch.randn(7, 4, 16), queries, **options)


def test_it_adds_up_and_nothing_is_nothing(cache_with: Any) -> None:
    queries, lengths = [3, 2, 0], [20, 9, 5]
    cache = cache_with(lengths, dim=16)
    scores = run(cache, torch.randn(5, 6, 16), queries)
    total = torch.tensor([9.0, 6.0, 0.0])[:, None].expand(3, 2)
    assert_within(scores.sum(-1), total, 1e-5)
    assert scores.shape == (3, 2, 20)
    assert not scores[1, :, 9:].any() and not scores[2].any()
    # the first query of the second sequence sees nothing: only the other one counts
    where = torch.tensor([17, 18, 19, -1, 8])
    scores = run(cache, torch.randn(5, 6, 16), queries, query_positions=where)
    assert_within(scores[1].sum(-1), torch.full((2,), 3.0), 1e-5)


def test_is_what_snapkv_of_plain_softmax_gives() -> None:
    """The last 4 of 12 tokens over all keys, summed over queries and a group's heads."""
    keys, query = torch.randn(1, 2, 12, 8), torch.randn(1, 6, 4, 8)
    logits = query @ keys.repeat_interleave(3, 1).transpose(2, 3) * 0.3
    logits += torch.full((4, 12), -math.inf).triu(9)
    wanted = logits.softmax(-1).sum(2).view(1, 2, 3, 12).sum(2)
    given = ops.attention_scores(
        query[0].transpose(0, 1), keys, torch.tensor([[0]]), [4], [12], 0.3
    )
    assert_within(given, wanted, 2e-6)


def test_how_the_work_is_cut_does_not_matter(
    cache_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=3, dim=16)
    query = torch.randn(sum(queries), 6, 16)
    monkeypatch.setattr(attention_tiles, "MIN_TILE_QUERIES", 3)
    for name, value in (("SCORE_ELEMENTS", 1), ("SEQUENCE_ELEMENTS", 40 * 16)):
        monkeypatch.setattr(attention_tiles, name, value)
        check(cache, query, queries, window=30)
        check(cache, query, queries)


def test_a_poisoned_key_is_nan_in_its_head(cache_with: Any) -> None:
    cache = cache_with([20, 20])
    cache.scales["key_scale"][int(cache.tables[0, 1]), 1, 3] = math.nan  # token 19, head 1
    scores = run(cache, torch.randn(4, 4, 64), [2, 2])
    assert scores[0, 1].isnan().any()
    assert scores[0, 0].isfinite().all() and scores[1].isfinite().all()


def test_strided_and_empty(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    query = torch.randn(6, sum(queries), 64).transpose(0, 1)
    check(cache, query, queries)
    for numbers in ([], [5, 0]):
        empty = run(cache_with(numbers), torch.randn(0, 4, 64), [0] * len(numbers))
        assert empty.shape == (len(numbers), 2, max(numbers, default=0)) and not empty.any()


def test_opcheck(cache_with: Any, opcheck: Any) -> None:
    queries, lengths = [1, 3, 0], [20, 5, 9]
    extras: list[dict[str, Any]] = [
        {},
        {"causal": False, "window": 4, "sinks": torch.randn(4)},
        {"score_bias": torch.randn(4, 4, 20), "query_positions": torch.arange(4)},
    ]
    for dtype in (torch.int8, torch.float16):
        cache = cache_with(lengths, dtype=dtype, dim=8)
        scale = {"key_scale": cache.scales["key_scale"]} if cache.scales else {}
        for extra in extras:
            arguments = (torch.randn(4, 4, 8).bfloat16(), cache.tensors[0], cache.tables)
            opcheck("attention_scores", *arguments, queries, lengths, 0.3, **scale, **extra)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("query", {"query": torch.randn(3, 3, 64)}),
        ("key_cache", {"key_cache": torch.zeros(5, 2, 1024, dtype=torch.int8)}),
        ("key_scale", {"key_scale": None}),
        ("key_zero_point", {"key_zero_point": torch.rand(5, 1, 16)}),
        ("block_tables", {"block_tables": torch.full((2, 2), 5, dtype=torch.int32)}),
        ("kv_lengths", {"kv_lengths": [49, 5]}),
        ("query_lengths", {"query_lengths": [1, 1]}),
        ("query_lengths[1]", {"kv_lengths": [20, 1]}),
        ("window", {"window": -1}),
        ("sinks", {"sinks": torch.zeros(2)}),
        ("score_bias", {"score_bias": torch.zeros(3, 4, 19)}),
        ("key_positions", {"key_positions": torch.zeros(5, 2, 16)}),
        ("query_positions", {"query_positions": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_mistakes_name_the_argument(cache_with: Any, field: str, change: dict[str, Any]) -> None:
    cache = cache_with([20, 5])
    legal = {
        "query": torch.randn(3, 4, 64),
        "key_cache": cache.tensors[0],
        "block_tables": cache.tables,
        "query_lengths": [1, 2],
        "kv_lengths": [20, 5],
        "softmax_scale": 0.125,
        "key_scale": cache.scales["key_scale"],
    }
    with pytest.raises(UsageError) as error:
        ops.attention_scores(**{**legal, **change})
    assert error.value.field == field
