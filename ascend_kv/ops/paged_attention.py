"""``paged_attention``: queries of many sequences × their paged, perhaps quantized, caches.

For query i of a sequence, over the cached tokens j it may see::

    score_j = softmax_scale * q_i . k_j + score_bias[i, position_j]
    p_j     = exp(score_j) / (sum_j exp(score_j) + exp(sink))
    output  = sum_j p_j v_j            log_sum_exp = log(sum_j exp(score_j) + exp(sink))

The reference multiplies the scores by the keys' scales and the probabilities by the values'
scales, which is the same as dequantizing and costs head_dim times less. How the work is cut
into tiles is in ``attention_tiles``, lists of entries are in ``attention_entries``.

Compiled for some CPUs, the operator multiplies codes in whole numbers and rounds queries and
probabilities for it; ``native.whole_number_bits`` says to what.

Caches, scales and positions lie as ``kv_cache_store`` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.ops.attention_entries import attend_entries
from ascend_kv.ops.attention_offset import check_offset
from ascend_kv.ops.attention_operands import Operands
from ascend_kv.ops.attention_tiles import attend_all
from ascend_kv.ops.paged import check_caches, check_index, check_positions, check_tables
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "SymInt[] query_lengths, SymInt[] kv_lengths, float softmax_scale, *, "
    "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? key_zero_point=None, "
    "Tensor? value_zero_point=None, bool causal=True, SymInt window=0, Tensor? sinks=None, "
    "Tensor? score_bias=None, Tensor? key_positions=None, Tensor? query_positions=None, "
    "Tensor? entries=None, Tensor? key_offset=None, Tensor? rotary_frequencies=None, "
    "Tensor? offset_query=None) -> (Tensor output, Tensor log_sum_exp)"
)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    score_bias: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    entries: Tensor | None = None,
    key_offset: Tensor | None = None,
    rotary_frequencies: Tensor | None = None,
    offset_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T packed queries over the cached tokens of their sequences.

    Args:
        query: ``[T, H, D]``, float32, float16 or bfloat16, the sequences one after another.
        key_cache: ``[K, N, S, D]``, int8, float8_e4m3fn, float8_e5m2 or a float type, or uint8
            ``[K, N, S, D / 2]`` for INT4; H is a multiple of N, and query head h reads KV head
            h // (H / N).
        value_cache: as ``key_cache``, perhaps of another type; the same tensor where keys are the
            values.
        block_tables: ``[B, M]`` int32 or int64. Entries past a sequence's tokens may be
            anything.
        query_lengths: B host ints, queries of each sequence in this step; their sum is T.
        kv_lengths: B host ints, tokens cached for each sequence, this step's included.
        softmax_scale: what q . k is multiplied by, usually D ** -0.5.
        key_scale: for a quantized cache, float32 (INT4: float16): ``[K, N, S]`` (token_head),
            ``[K, 1, S]`` (token), ``[K, N, S, D / g]`` (groups of g channels, 1 < g < D),
            ``[K, N, 1, D]`` (each channel of a block), or static ``[1, N, 1, D]`` with any of N and
            D as 1.
        value_scale: as ``key_scale``.
        key_zero_point: as ``key_scale``; given means asymmetric.
        value_zero_point: as ``key_zero_point``.
        causal: a query sees no key at a later position than its own.
        window: 0 for none; else a key is seen iff query position - key position < window.
        sinks: ``[H]``, a logit for each head that counts in the denominator only.
        score_bias: ``[T, H, P]``, added to the scaled scores, indexed by the key's position;
            P exceeds every key position.
        key_positions: ``[K, N, S]`` int32, where slot and position differ; without it the
            n-th cached token is at position n.
        query_positions: ``[T]`` int32 or int64; without it query i of a sequence is at
            position kv_length - query_length + i.
        entries: ``[T, E]`` int32, for each query the cached tokens of its sequence it may
            attend to, counted from 0; -1 for none. ``causal`` and ``window`` hold beside it (a
            list of compressed entries wants ``causal=False``). One that is listed twice counts
            twice.
        key_offset: ``[N, D]`` float32, in place of ``score_bias``: what the cached keys lack before
            a rotary embedding turns it; q . R(position) key_offset is added to every q . k.
            Channels i and i + D / 2 are a pair.
        rotary_frequencies: ``[D / 2]`` float64, radians by which R turns each pair from a position
            to the next.
        offset_query: as ``query``, in a float type: what the offset meets in its place where
            ``query`` was made to fit a cache whose keys are transformed.

    Returns:
        output: ``[T, H, D]`` in the query's type; 0 for a query that sees nothing.
        log_sum_exp: ``[T, H]`` float32, natural logarithm, the sink counted; -inf for a query
            that sees nothing (the sink itself where there is one).

    Raises:
        UsageError: shapes, types or lengths that disagree, a scale missing or not wanted; on a
            CPU also a table entry that is used and names no block, and an entry that is no
            token of its sequence.

    Cache memory that belongs to no token of a sequence (past its length, never written, NaN)
    has no influence. A NaN that is stored for a token makes every query that sees it NaN, and
    may reach other queries of the same sequence in the same call.
    """
    scales = key_scale, value_scale, key_zero_point, value_zero_point
    cache_shape = check_caches(key_cache, value_cache, *scales)
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
    if entries is not None:
        if entries.dim() != 2 or entries.shape[0] != query.shape[0]:
            raise UsageError("entries", tuple(entries.shape), f"[{query.shape[0]}, entries]")
        if entries.dtype is not torch.int32:
            raise UsageError("entries", entries.dtype, "torch.int32")
    offset = key_offset, rotary_frequencies, offset_query
    check_offset(*offset, score_bias, query, cache_shape[1])
    return _op(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_lengths,
        kv_lengths,
        softmax_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        key_zero_point=key_zero_point,
        value_zero_point=value_zero_point,
        causal=causal,
        window=window,
        sinks=sinks,
        score_bias=score_bias,
        key_positions=key_positions,
        query_positions=query_positions,
        entries=entries,
        key_offset=key_offset,
        rotary_frequencies=rotary_frequencies,
        offset_query=offset_query,
    )


def check_queries(
    query: Tensor,
    cache_shape: torch.Size,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    window: int,
    *,
    sinks: Tensor | None,
    score_bias: Tensor | None,
    key_positions: Tensor | None,
    query_positions: Tensor | None,
) -> None:
    """Refuse queries that do not fit the cache, and what does not fit the queries."""
    _check_query(query, cache_shape)
    _check_lengths(query.shape[0], query_lengths, kv_lengths, query_positions is not None)
    if window < 0:
        raise UsageError("window", window, "0 for none, or a number of tokens")
    if key_positions is not None:
        check_positions("key_positions", key_positions, cache_shape)
    _check_extras(query, kv_lengths, sinks, score_bias, key_positions, query_positions)


def _check_query(query: Tensor, cache_shape: torch.Size) -> None:
    _, kv_heads, _, head_dim = cache_shape
    shape = query.shape
    if len(shape) != 3 or shape[2] != head_dim or not kv_heads or shape[1] % kv_heads:
        legal = f"[tokens, a multiple of {kv_heads}, {head_dim}], as key_cache"
        raise UsageError("query", tuple(shape), legal)
    if query.dtype not in FLOAT_DTYPES:
        raise UsageError("query", query.dtype, FLOAT_DTYPES)


def _check_lengths(
    tokens: int, query_lengths: Sequence[int], kv_lengths: Sequence[int], positions_given: bool
) -> None:
    if len(query_lengths) != len(kv_lengths):
        legal = f"{len(kv_lengths)} lengths, as kv_lengths"
        raise UsageError("query_lengths", f"{len(query_lengths)} lengths", legal)
    if sum(query_lengths) != tokens:
        raise UsageError("query_lengths", f"a sum of {sum(query_lengths)}", f"{tokens}, as query")
    for index, (queries, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        if queries < 0 or (queries > cached and not positions_given):
            legal = f"0 to kv_lengths[{index}] = {cached} (more with query_positions)"
            raise UsageError(f"query_lengths[{index}]", queries, legal)


def _check_extras(
    query: Tensor,
    kv_lengths: Sequence[int],
    sinks: Tensor | None,
    score_bias: Tensor | None,
    key_positions: Tensor | None,
    query_positions: Tensor | None,
) -> None:
    tokens, heads, _ = query.shape
    if sinks is not None and sinks.shape != (heads,):
        raise UsageError("sinks", tuple(sinks.shape), f"[{heads}], one a query head")
    if query_positions is not None:
        if query_positions.shape != (tokens,):
            raise UsageError("query_positions", tuple(query_positions.shape), f"[{tokens}]")
        check_index("query_positions", query_positions)
    if score_bias is None:
        return
    shape = score_bias.shape
    needed = max(kv_lengths, default=0) if key_positions is None else 0
    if len(shape) != 3 or shape[:2] != (tokens, heads) or shape[2] < needed:
        raise UsageError("score_bias", tuple(shape), f"[{tokens}, {heads}, {needed} or more]")


def _reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Tensor | None = None,
    score_bias: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    entries: Tensor | None = None,
    key_offset: Tensor | None = None,
    rotary_frequencies: Tensor | None = None,
    offset_query: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    plain = None if offset_query is None else offset_query.to(torch.float32) * softmax_scale
    operands = Operands(
        query=query.to(torch.float32) * softmax_scale,
        key_cache=key_cache,
        value_cache=value_cache,
        key_scale=key_scale,
        value_scale=value_scale,
        key_zero_point=key_zero_point,
        value_zero_point=value_zero_point,
        sinks=sinks,
        score_bias=score_bias,
        key_positions=key_positions,
        query_positions=query_positions,
        causal=causal,
        window=window,
        key_offset=key_offset,
        rotary_frequencies=rotary_frequencies,
        offset_query=plain,
    )
    batch = block_tables, query_lengths, kv_lengths
    if entries is None:
        output, log_sum_exp = attend_all(operands, *batch)
    else:
        output, log_sum_exp = attend_entries(operands, entries, *batch)
    return output.to(query.dtype), log_sum_exp


def _fake(query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output, query.new_empty((tokens, heads), dtype=torch.float32)


_op = register(SCHEMA, _reference, _fake)
