"""``kv_cache_load``: the paged cache → dense keys and values, for attention that wants them so.

Reads the layout that ``kv_cache_store`` writes, dequantizes, and, where keys are stored without
a known offset, gives it back: ``key + R(n) * offset`` for a key at position n, with the rotary
embedding R in the half-split order of Hugging Face's ``rotate_half``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES, format_of
from ascend_kv.formats.base import Encoded
from ascend_kv.ops.paged import (
    check_caches,
    check_positions,
    check_tables,
    for_each_token,
    gather,
    is_grouped,
    is_paged,
    spread,
)
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "kv_cache_load(Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "SymInt[] kv_lengths, *, Tensor? key_scale=None, Tensor? value_scale=None, "
    "Tensor? key_zero_point=None, Tensor? value_zero_point=None, Tensor? key_offset=None, "
    "Tensor? rotary_table=None, Tensor? key_positions=None, ScalarType? dtype=None) "
    "-> (Tensor key, Tensor value)"
)


def kv_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Sequence[int],
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    key_offset: Tensor | None = None,
    rotary_table: Tensor | None = None,
    key_positions: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the cached tokens of B sequences as dense tensors.

    Args:
        key_cache: ``[K, N, S, D]``, int8, float8_e4m3fn, float8_e5m2 or a float type, or uint8
            ``[K, N, S, D / 2]`` for INT4.
        value_cache: as ``key_cache``; it may be of another type.
        block_tables: ``[B, M]`` int32 or int64. Entries past a sequence's tokens may be
            anything.
        kv_lengths: B host ints, tokens cached for each sequence.
        key_scale: for a quantized cache, float32 (INT4: float16): ``[K, N, S]`` (token_head),
            ``[K, 1, S]`` (token), ``[K, N, S, D / g]`` (groups of g channels, 1 < g < D),
            ``[K, N, 1, D]`` (each channel of a block), or static ``[1, N, 1, D]`` with any of N and
            D as 1.
        value_scale: as ``key_scale``.
        key_zero_point: as ``key_scale``; given means asymmetric.
        value_zero_point: as ``key_zero_point``.
        key_offset: ``[N, D]``, what the stored keys lack, before the rotary embedding.
        rotary_table: ``[P, D / 2, 2]``, cosine and sine for each position and channel pair
            (c, c + D / 2); P exceeds every key position. Given with ``key_offset`` only.
        key_positions: ``[K, N, S]`` int32, where slot and position differ.
        dtype: of the result; None means the cache's own type, float32 for a quantized one.

    Returns:
        key and value, ``[B, N, max(kv_lengths), D]``; zeros past a sequence's length.

    Raises:
        UsageError: shapes or types that disagree, a scale missing or not wanted; on a CPU also
            a table entry that is used and names no block, and a position that the
            ``rotary_table`` does not have.
    """
    scales = key_scale, value_scale, key_zero_point, value_zero_point
    cache_shape = check_caches(key_cache, value_cache, *scales)
    check_tables(block_tables, kv_lengths, cache_shape[2])
    if key_positions is not None:
        check_positions("key_positions", key_positions, cache_shape)
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UsageError("dtype", dtype, FLOAT_DTYPES)
    _check_offset(key_offset, rotary_table, kv_lengths, cache_shape)
    key, value = _op(
        key_cache,
        value_cache,
        block_tables,
        kv_lengths,
        key_scale=key_scale,
        value_scale=value_scale,
        key_zero_point=key_zero_point,
        value_zero_point=value_zero_point,
        key_offset=key_offset,
        rotary_table=rotary_table,
        key_positions=key_positions,
        dtype=dtype,
    )
    return key, value


def _check_offset(
    offset: Tensor | None,
    table: Tensor | None,
    kv_lengths: Sequence[int],
    cache_shape: torch.Size,
) -> None:
    _, kv_heads, _, head_dim = cache_shape
    if offset is None or table is None:
        if offset is not None or table is not None:
            name = "key_offset" if offset is None else "rotary_table"
            raise UsageError(name, None, "a tensor: key_offset and rotary_table come together")
        return
    if head_dim % 2:
        legal = "None with an odd number of channels, which form no pairs"
        raise UsageError("key_offset", tuple(offset.shape), legal)
    if offset.shape != (kv_heads, head_dim):
        raise UsageError("key_offset", tuple(offset.shape), f"[{kv_heads}, {head_dim}]")
    longest = max(kv_lengths, default=0)
    if table.dim() != 3 or table.shape[1:] != (head_dim // 2, 2) or table.shape[0] < longest:
        legal = f"[{longest} or more, {head_dim // 2}, 2]"
        raise UsageError("rotary_table", tuple(table.shape), legal)


def _reference(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Sequence[int],
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    key_offset: Tensor | None = None,
    rotary_table: Tensor | None = None,
    key_positions: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    key_dtype, value_dtype = (_result_dtype(cache, dtype) for cache in (key_cache, value_cache))
    _, kv_heads, block_size, _ = key_cache.shape
    head_dim = format_of(key_cache.dtype).head_dim(key_cache)
    longest = max(kv_lengths, default=0)
    if longest == 0:
        shape = (len(kv_lengths), kv_heads, 0, head_dim)
        return key_cache.new_empty(shape, dtype=key_dtype), value_cache.new_empty(
            shape, dtype=value_dtype
        )
    device = key_cache.device
    lengths = torch.tensor(kv_lengths, device=device)[:, None]
    first_tokens = torch.arange(0, longest, block_size, device=device)
    blocks = block_tables[:, : len(first_tokens)].masked_fill(first_tokens >= lengths, 0)
    index = torch.arange(longest, device=device)[None]
    outside = index >= lengths

    key = _decode(key_cache, key_scale, key_zero_point, blocks, longest)
    value = _decode(value_cache, value_scale, value_zero_point, blocks, longest)
    if key_offset is not None and rotary_table is not None:
        if key_positions is None:
            positions = index[:, None]
        else:
            positions = gather(key_positions, blocks, torch.int64)[:, :, :longest]
            positions.masked_fill_(outside[:, None], 0)
            _check_rows(positions, rotary_table)
        key = key + rotated_offset(key_offset, rotary_table, positions)
    key = key.masked_fill_(outside[:, None, :, None], 0.0)
    value = value.masked_fill_(outside[:, None, :, None], 0.0)
    return key.to(key_dtype).contiguous(), value.to(value_dtype).contiguous()


def _check_rows(positions: Tensor, table: Tensor) -> None:
    """Refuse positions that the table does not have; on a CPU only, to synchronise no device."""
    if positions.device.type != "cpu":
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low < 0 or high >= table.shape[0]:
        legal = f"0 to {table.shape[0] - 1}, as rotary_table"
        raise UsageError("key_positions", low if low < 0 else high, legal)


def _result_dtype(cache: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.float32 if format_of(cache.dtype).quantized else cache.dtype


def _decode(
    cache: Tensor, scale: Tensor | None, zero_point: Tensor | None, blocks: Tensor, tokens: int
) -> Tensor:
    """``[B, N, tokens, D]`` in float32, whatever lies past a sequence's length."""

    kind = format_of(cache.dtype)
    dim = kind.head_dim(cache)

    def side(x: Tensor | None) -> Tensor | None:
        x = for_each_token(x, cache.shape[2], dim)
        if x is None or not is_paged(x, dim):
            return x
        taken = gather(x, blocks)[:, :, :tokens]
        return spread(taken, dim) if is_grouped(x, dim) else taken[..., None]

    codes = gather(cache, blocks, cache.dtype)[:, :, :tokens]
    return kind.decode(Encoded(codes, side(scale), side(zero_point)))


def rotated_offset(offset: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """R(n) times the offset ``[N, D]`` in float32: ``[B, N, P, D]``.

    Args:
        offset: before the rotary embedding.
        table: ``[P, D / 2, 2]``, as the operator's ``rotary_table``.
        positions: ``[B, N or 1, P]``, n.
    """
    cosine, sine = table.to(torch.float32)[positions].unbind(-1)
    first, second = offset.to(torch.float32)[:, None].chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def _fake(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    dim = format_of(key_cache.dtype).head_dim(key_cache)
    shape = (len(kv_lengths), key_cache.shape[1], max(kv_lengths, default=0), dim)
    return (
        key_cache.new_empty(shape, dtype=_result_dtype(key_cache, dtype)),
        value_cache.new_empty(shape, dtype=_result_dtype(value_cache, dtype)),
    )


_op = register(SCHEMA, _reference, _fake)
