"""``attention_scores``: how much attention the cached tokens get from the last queries.

What SnapKV (Li et al., 2024) and PyramidKV (Cai et al., 2024) rank tokens by: the softmax over
all keys that a query sees, summed over some queries, the last ones of a prompt, and over the
query heads of a group::

    p[t, h, j]   = exp(score_j) / (sum_j exp(score_j) + exp(sink))     as in paged_attention
    scores[n, j] = sum_t sum_(h in group n) p[t, h, j]

Divided by the number of queries and heads it is their mean; the policies' pooling over
neighbouring tokens is theirs. The engine evicts nothing yet: this is for whoever does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.ops import attention_tiles
from ascend_kv.ops.attention_operands import Operands
from ascend_kv.ops.paged import check_cache, check_tables
from ascend_kv.ops.paged_attention import check_queries
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "attention_scores(Tensor query, Tensor key_cache, Tensor block_tables, "
    "SymInt[] query_lengths, SymInt[] kv_lengths, float softmax_scale, *, "
    "Tensor? key_scale=None, Tensor? key_zero_point=None, bool causal=True, SymInt window=0, "
    "Tensor? sinks=None, Tensor? score_bias=None, Tensor? key_positions=None, "
    "Tensor? query_positions=None) -> Tensor"
)


def attention_scores(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    key_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    score_bias: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
) -> Tensor:
    """Attention weights of T packed queries, summed for every cached token and KV head.

    Args:
        query: ``[T, H, D]``, the queries to be counted, usually the last of each sequence, as
            they go into ``paged_attention``.
        key_cache: as in ``paged_attention``.
        block_tables: ``[B, M]`` int32 or int64.
        query_lengths: B host ints, queries of each sequence in ``query``; may be 0.
        kv_lengths: B host ints, tokens cached for each sequence.
        softmax_scale, key_scale, key_zero_point, causal, window, sinks, score_bias,
            key_positions, query_positions: as in ``paged_attention``; without
            ``query_positions`` the queries are the last tokens cached.

    Returns:
        ``[B, N, max(kv_lengths)]`` float32. ``[b, n, j]`` is for the j-th token cached for the
        sequence, wherever its position is. 0 where no query sees the token, and past the
        sequence's length. Without sinks a row adds up to the number of its queries that see
        anything, times H / N.

    Raises:
        UsageError: as ``paged_attention``.

    Cache memory that belongs to no token has no influence. A NaN that is stored for a key makes
    NaN of what the queries that see it add: at least the rows of its head.
    """
    cache_shape = check_cache("key", key_cache, key_scale, key_zero_point)
    check_tables(block_tables, kv_lengths, cache_shape[2])
    check_queries(
        query,
        cache_shape,
        query_lengths,
        kv_lengths,
        window,
        sinks=sinks,
        score_bias=score_bias,
        key_positions=key_positions,
        query_positions=query_positions,
    )
    scores: Tensor = _op(
        query,
        key_cache,
        block_tables,
        query_lengths,
        kv_lengths,
        softmax_scale,
        key_scale=key_scale,
        key_zero_point=key_zero_point,
        causal=causal,
        window=window,
        sinks=sinks,
        score_bias=score_bias,
        key_positions=key_positions,
        query_positions=query_positions,
    )
    return scores


def _reference(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    key_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    score_bias: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
) -> Tensor:
    operands = Operands(
        query=query.to(torch.float32) * softmax_scale,
        key_cache=key_cache,
        value_cache=key_cache,  # not read
        key_scale=key_scale,
        value_scale=None,
        key_zero_point=key_zero_point,
        value_zero_point=None,
        sinks=sinks,
        score_bias=score_bias,
        key_positions=key_positions,
        query_positions=query_positions,
        causal=causal,
        window=window,
    )
    kv_heads, head_dim = key_cache.shape[1], query.shape[2]
    scores = query.new_zeros(
        (len(kv_lengths), kv_heads, max(kv_lengths, default=0)), dtype=torch.float32
    )
    start = 0
    for row, (queries, cached) in enumerate(zip(query_lengths, kv_lengths)):
        rows = slice(start, start + queries)
        start += queries
        if not (queries and cached):
            continue
        table = block_tables[row : row + 1]
        step = max(1, attention_tiles.SEQUENCE_ELEMENTS // (cached * head_dim))
        for low in range(0, kv_heads, step):
            heads = operands if step >= kv_heads else operands.heads(low, low + step)
            for tile in attention_tiles.sequence_tiles(heads, table, rows, cached):
                weights, _, nothing = tile.weighing
                if nothing is not None:
                    weights.masked_fill_(nothing, 0.0)
                scores[row, low : low + step, tile.first : tile.last] += weights[0].sum(1)
    return scores


def _fake(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    *args: object,
    **kwargs: object,
) -> Tensor:
    shape = (len(kv_lengths), key_cache.shape[1], max(kv_lengths, default=0))
    return query.new_empty(shape, dtype=torch.float32)


_op = register(SCHEMA, _reference, _fake)
