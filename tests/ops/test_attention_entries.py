"""paged_attention with a list of entries for each query, against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import run, truth
from compare import assert_as_good, assert_rounded, assert_within

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.ops import attention_entries

MIXED = ([1, 5, 0, 1, 9, 1], [20, 5, 9, 33, 40, 1])


def lists(query_lengths: list[int], kv_lengths: list[int], width: int) -> torch.Tensor:
    """Random entries of every query's sequence, pads among them and at the end."""
    rows = []
    for queries, cached in zip(query_lengths, kv_lengths, strict=True):
        for _ in range(queries):
            chosen = np.random.permutation(cached)[: np.random.randint(1, width)]
            row = np.full(width, -1)
            row[np.random.permutation(width)[: len(chosen)]] = chosen
            rows.append(row)
    return torch.tensor(np.array(rows).reshape(-1, width), dtype=torch.int32)


def check(cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any) -> None:
    """As good as the same in float32 by loops."""
    given = run(cache, query, query_lengths, **options)
    exact = truth(cache, query, query_lengths, np.float64, **options)
    naive = truth(cache, query, query_lengths, np.float32, **options)
    for result, wanted, baseline in zip(given, exact, naive, strict=True):
        assert result.dtype == torch.float32
        assert_as_good(result, wanted, baseline)


@pytest.mark.parametrize("dim", [40, 64, 256, 512])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_head_dims(cache_with: Any, dim: int, dtype: torch.dtype, causal: bool) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dim=dim, dtype=dtype)
    options = {"entries": lists(*MIXED, 8), "causal": causal}
    check(cache, torch.randn(sum(queries), 4, dim), queries, **options)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 7), (3, 2)])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("width", [1, 8, 50])
def test_heads_blocks_and_widths(
    cache_with: Any, kv_heads: int, group: int, block_size: int, width: int
) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=kv_heads, block_size=block_size, dim=16)
    entries = lists(*MIXED, width) if width > 1 else torch.full((17, 1), -1, dtype=torch.int32)
    if width == 1:
        entries[:, 0] = 0
    check(cache, torch.randn(17, kv_heads * group, 16), queries, entries=entries)


@pytest.mark.parametrize(
    "granularity", ["token", "token_head", "layer", "head", "channel", "group"]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_scales(cache_with: Any, granularity: str, symmetric: bool) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, granularity=granularity, symmetric=symmetric, dim=16)
    check(cache, torch.randn(17, 6, 16), queries, entries=lists(*MIXED, 8))


def test_everything_else_holds_beside_the_list(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dim=16)
    query, entries = torch.randn(17, 4, 16), lists(*MIXED, 12)
    sinks, bias = torch.tensor([-3.0, 0.0, 2.5, 40.0]), torch.randn(17, 4, 40)
    check(cache, query, queries, entries=entries, window=9)
    check(cache, query, queries, entries=entries, sinks=sinks, score_bias=bias, causal=False)
    positions = torch.full(cache.tensors[0].shape[:3], 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for j in range(length):
            positions[int(cache.tables[row, j // 16]), :, j % 16] = torch.tensor([j, 39 - j])
    where = torch.randint(0, 40, (17,))
    options = {"key_positions": positions, "query_positions": where, "score_bias": bias}
    check(cache, query, queries, entries=entries, window=25, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_shared_keys_and_values(cache_with: Any, dtype: torch.dtype) -> None:
    """One tensor for both, as DeepSeek-V4 has it."""
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=1, dim=512, dtype=dtype)
    scales = {}
    if dtype == torch.int8:
        scales = dict.fromkeys(("key_scale", "value_scale"), cache.scales["key_scale"])
    cache = cache._replace(tensors=(cache.tensors[0],) * 2, scales=scales)
    query, sinks = torch.randn(17, 8, 512), torch.randn(8)
    check(cache, query, queries, entries=lists(*MIXED, 8), causal=False, sinks=sinks)
    check(cache, query, queries, sinks=sinks)


def test_listing_all_is_listing_nothing(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=torch.float8_e4m3fn)
    query = torch.randn(17, 4, 64)
    entries = torch.full((17, 40), -1, dtype=torch.int32)
    sequences = torch.tensor(lengths).repeat_interleave(torch.tensor(queries))
    for row, length in enumerate(sequences.tolist()):
        entries[row, 40 - length :] = torch.randperm(length)
    given, wanted = run(cache, query, queries, entries=entries), run(cache, query, queries)
    for a, b in zip(given, wanted, strict=True):
        assert_within(a, b, 5e-6)


def test_what_select_topk_gives_fits(cache_with: Any) -> None:
    cache = cache_with([12], dim=16)
    seen = (torch.arange(5) + 36) // 4
    entries = ops.select_topk(torch.randn(5, 12), 10, lengths=seen)
    options = {"entries": entries, "causal": False, "query_positions": torch.arange(5) + 35}
    check(cache, torch.randn(5, 4, 16), [5], **options)


def test_twice_listed_counts_twice(cache_with: Any) -> None:
    cache = cache_with([9], dim=16)
    entries = torch.tensor([[3, 5, 3, -1]], dtype=torch.int32)
    check(cache, torch.randn(1, 2, 16), [1], entries=entries)


def test_half_queries_round_once(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    query, entries = torch.randn(17, 4, 64).bfloat16(), lists(*MIXED, 8)
    output, log_sum_exp = run(cache, query, queries, entries=entries)
    exact, sums = truth(cache, query, queries, np.float64, entries=entries)
    assert output.dtype == torch.bfloat16
    assert_rounded(output, exact, slack=2e-6)
    assert_within(log_sum_exp, sums, 2e-6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_a_query_that_sees_nothing(
    cache_with: Any, sinks: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """All pads; an empty sequence; a list that causality hides; and the first token NaN."""
    queries, lengths = [2, 1, 1], [20, 0, 9]
    cache = cache_with(lengths, dim=16, dtype=dtype)
    first = int(cache.tables[0, 0])
    if dtype == torch.int8:
        cache.scales["value_scale"][first, :, 0] = math.nan
    else:
        cache.tensors[1][first, :, 0] = math.nan
    entries = torch.tensor([[-1, -1], [4, -1], [-1, -1], [8, 7]], dtype=torch.int32)
    options: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
    where = torch.tensor([18, 19, 3, 6])
    output, log_sum_exp = run(
        cache, torch.randn(4, 2, 16), queries, entries=entries, query_positions=where, **options
    )
    nothing = torch.full((2,), -math.inf) if sinks is None else sinks
    for row in (0, 2, 3):
        assert torch.equal(output[row], torch.zeros(2, 16))
        assert torch.equal(log_sum_exp[row], nothing)
    assert output[1].isfinite().all() and output[1].abs().min() > 0


def test_a_poisoned_token_is_nan_for_those_who_list_it(cache_with: Any) -> None:
    cache = cache_with([20])
    cache.scales["key_scale"][int(cache.tables[0, 1]), 1, 3] = math.nan  # token 19, head 1
    entries = torch.tensor([[1, 19], [1, 18]], dtype=torch.int32)
    output, _ = run(cache, torch.randn(2, 4, 64), [2], entries=entries, causal=False)
    assert output[0, 2:].isnan().all()
    assert output[0, :2].isfinite().all() and output[1].isfinite().all()


@pytest.mark.parametrize("elements", [1, 8 * 2 * 16 * 3, 1 << 40])
def test_tiles_do_not_matter(
    cache_with: Any, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(attention_entries, "TILE_ELEMENTS", elements)
    queries, lengths = MIXED
    cache = cache_with(lengths, dim=16)
    entries, bias = lists(*MIXED, 8), torch.randn(17, 4, 40)
    check(cache, torch.randn(17, 4, 16), queries, entries=entries, score_bias=bias)


def test_no_tokens_and_no_entries(cache_with: Any) -> None:
    for queries, lengths in (([], []), ([0, 0], [5, 0])):
        cache = cache_with(lengths)
        entries = torch.empty(0, 3, dtype=torch.int32)
        output, log_sum_exp = run(cache, torch.randn(0, 4, 64), queries, entries=entries)
        assert output.shape == (0, 4, 64) and log_sum_exp.shape == (0, 4)
    cache = cache_with([5])
    empty = torch.empty(1, 0, dtype=torch.int32)
    output, log_sum_exp = run(cache, torch.randn(1, 4, 64), [1], entries=empty)
    assert not output.any() and torch.isneginf(log_sum_exp).all()


def test_strided_input(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths)
    query, entries = torch.randn(17, 12, 64)[:, ::3], lists(*MIXED, 16)[:, ::2]
    check(cache, query, queries, entries=entries)
    strided = cache._replace(
        tensors=tuple(torch.stack((x, x), 1)[:, 0] for x in cache.tensors),
        scales={name: torch.stack((x, x), 2)[:, :, 0] for name, x in cache.scales.items()},
    )
    assert not strided.tensors[0].is_contiguous()
    check(strided, query, queries, entries=entries)


def test_opcheck(cache_with: Any, opcheck: Any) -> None:
    queries, lengths = [1, 3, 1], [20, 5, 9]
    for dtype in (torch.int8, torch.float16):
        cache = cache_with(lengths, dtype=dtype, dim=8)
        arguments = (torch.randn(5, 4, 8).bfloat16(), *cache.tensors, cache.tables)
        options = {**cache.scales, "entries": lists(queries, lengths, 4)}
        opcheck("paged_attention", *arguments, queries, lengths, 0.3, **options)


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("entries", torch.zeros(3, 4, dtype=torch.int64)),
        ("entries", torch.zeros(2, 4, dtype=torch.int32)),
        ("entries", torch.zeros(3, dtype=torch.int32)),
        ("entries", torch.tensor([[19], [4], [5]], dtype=torch.int32)),
        ("entries", torch.tensor([[20], [4], [4]], dtype=torch.int32)),
        ("entries", torch.tensor([[-2], [4], [4]], dtype=torch.int32)),
    ],
)
def test_mistakes_name_the_argument(cache_with: Any, field: str, entries: torch.Tensor) -> None:
    cache = cache_with([20, 5])
    with pytest.raises(UsageError) as error:
        run(cache, torch.randn(3, 4, 64), [1, 2], entries=entries)
    assert error.value.field == field


@pytest.mark.parametrize("block", [-1, 5])
def test_a_table_entry_that_names_no_block(cache_with: Any, block: int) -> None:
    cache = cache_with([20, 5])
    cache.tables[0, 1] = block
    entries = torch.tensor([[15], [4], [4]], dtype=torch.int32)
    query = torch.randn(3, 4, 64)
    run(cache, query, [1, 2], entries=entries)  # it is not read
    entries[0, 0] = 16
    with pytest.raises(UsageError) as error:
        run(cache, query, [1, 2], entries=entries)
    assert error.value.field == "block_tables"
