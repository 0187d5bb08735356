"""What the operators over the paged cache share: host checks, and gathering blocks.

The checks look at shapes, types and host lists only, so that they cost microseconds and never
synchronise a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import format_of

Tensor = torch.Tensor


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_zero_point: Tensor | None,
    value_zero_point: Tensor | None,
) -> torch.Size:
    """The shape ``[K, N, S, D]`` that both caches must have, D counted in channels.

    Refuses scales and zero points that do not belong to their cache.
    """
    shape = check_cache("key", key_cache, key_scale, key_zero_point)
    if check_cache("value", value_cache, value_scale, value_zero_point) != shape:
        legal = f"{tuple(shape)}, as key_cache"
        raise UsageError("value_cache", tuple(value_cache.shape), legal)
    return shape


def check_cache(
    side: str, cache: Tensor, scale: Tensor | None, zero_point: Tensor | None
) -> torch.Size:
    """``[K, N, S, D]`` of one cache; ``side`` is ``key`` or ``value``.

    The last dimension of the tensor is D / 2 where two codes share a byte.
    """
    shape = cache.shape
    if len(shape) != 4:
        legal = "[blocks, kv_heads, block_size, head_dim]"
        raise UsageError(f"{side}_cache", tuple(shape), legal)
    kind = format_of(cache.dtype, f"{side}_cache")
    if kind.codes_per_element != 1:
        shape = torch.Size((*shape[:3], kind.head_dim(cache)))
    if not kind.quantized:
        for name, given in (("scale", scale), ("zero_point", zero_point)):
            if given is not None:
                legal = f"None, {side}_cache is {cache.dtype}"
                raise UsageError(f"{side}_{name}", tuple(given.shape), legal)
        return shape
    if scale is None:
        legal = f"a tensor of {kind.scale_dtype}, {side}_cache is {cache.dtype}"
        raise UsageError(f"{side}_scale", None, legal)
    _check_scale(f"{side}_scale", scale, shape, kind.scale_dtype)
    if zero_point is not None:
        if not kind.zero_points:
            legal = f"None, {kind.name} has no zero points"
            raise UsageError(f"{side}_zero_point", tuple(zero_point.shape), legal)
        _check_scale(f"{side}_zero_point", zero_point, shape, kind.scale_dtype)
        if zero_point.shape != scale.shape:
            legal = f"{tuple(scale.shape)}, as {side}_scale"
            raise UsageError(f"{side}_zero_point", tuple(zero_point.shape), legal)
    return shape


def _check_scale(name: str, scale: Tensor, cache_shape: torch.Size, dtype: torch.dtype) -> None:
    blocks, kv_heads, block_size, head_dim = cache_shape
    shape = scale.shape
    if len(shape) == 3:
        fits = shape[0] == blocks and shape[1] in (1, kv_heads) and shape[2] == block_size
    elif is_by_block(scale, head_dim):
        fits = shape == (blocks, kv_heads, 1, head_dim)
    elif is_grouped(scale, head_dim):
        groups = shape[3]
        fits = shape[:3] == cache_shape[:3] and 1 < groups < head_dim and head_dim % groups == 0
    else:
        fits = len(shape) == 4 and shape[0] == shape[2] == 1 and shape[1] in (1, kv_heads)
    if not fits:
        legal = (
            f"paged [{blocks}, {kv_heads} or 1, {block_size}], grouped [{blocks}, {kv_heads}, "
            f"{block_size}, {head_dim} / group], by block [{blocks}, {kv_heads}, 1, {head_dim}] or "
            f"static [1, {kv_heads} or 1, 1, {head_dim} or 1]"
        )
        raise UsageError(name, tuple(shape), legal)
    if scale.dtype is not dtype:
        raise UsageError(name, scale.dtype, str(dtype))


def is_by_block(scale: Tensor, head_dim: int) -> bool:
    """Scales ``[K, N, 1, D]``: each for one channel of the tokens of a block.

    Those of a cache of one block are read as static ones, which is the same.
    """
    return (
        scale.dim() == 4
        and scale.shape[0] != 1
        and scale.shape[2] == 1
        and scale.shape[3] == head_dim > 1
    )


def for_each_token(scale: Tensor | None, block_size: int, head_dim: int) -> Tensor | None:
    """Scales by block as they would lie beside every token, ``[K, N, S, D]``; others as given."""
    if scale is None or not is_by_block(scale, head_dim):
        return scale
    return scale.expand(-1, -1, block_size, -1)


def is_grouped(scale: Tensor, head_dim: int) -> bool:
    """Paged scales ``[K, N, S, D / g]``: each for g channels of a vector, 1 < g < D.

    Also what ``for_each_token`` made, where g is 1.
    """
    return scale.dim() == 4 and (scale.shape[3] not in (1, head_dim) or scale.shape[2] != 1)


def is_paged(scale: Tensor, head_dim: int) -> bool:
    """Scales that lie beside the cache, against static ones, ``[1, N or 1, 1, D or 1]``."""
    return scale.dim() == 3 or is_grouped(scale, head_dim)


def spread(scale: Tensor, head_dim: int) -> Tensor:
    """Scales of groups ``[..., D / g]`` for each channel: ``[..., D]``."""
    return scale.repeat_interleave(head_dim // scale.shape[-1], -1)


def check_positions(name: str, positions: Tensor, cache_shape: torch.Size) -> None:
    """Key positions lie beside the cache: int32 ``[K, N, S]``."""
    if positions.shape != cache_shape[:3]:
        raise UsageError(name, tuple(positions.shape), tuple(cache_shape[:3]))
    if positions.dtype is not torch.int32:
        raise UsageError(name, positions.dtype, "torch.int32")


def check_index(name: str, given: Tensor) -> None:
    """Positions, slots and blocks are int32 or int64."""
    if given.dtype not in (torch.int32, torch.int64):
        raise UsageError(name, given.dtype, (torch.int32, torch.int64))


def check_tables(block_tables: Tensor, kv_lengths: Sequence[int], block_size: int) -> None:
    """Every sequence has a row, and the row is long enough for its tokens."""
    if block_tables.dim() != 2 or block_tables.shape[0] != len(kv_lengths):
        legal = f"[{len(kv_lengths)}, blocks of the longest sequence]"
        raise UsageError("block_tables", tuple(block_tables.shape), legal)
    check_index("block_tables", block_tables)
    if not kv_lengths:
        return
    if min(kv_lengths) < 0:
        raise UsageError("kv_lengths", min(kv_lengths), "0 or more tokens")
    room = block_tables.shape[1] * block_size
    if max(kv_lengths) > room:
        legal = f"at most {room}, {block_tables.shape[1]} table entries of {block_size} tokens"
        raise UsageError("kv_lengths", max(kv_lengths), legal)


def gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks ``[b, n]`` of a cache ``[K, N, S, ...]``, converted: ``[b, N, n*S, ...]``.

    Codes that share a byte come one a channel where floats are asked for.

    Raises:
        UsageError: a table entry names no block (seen on a CPU).
    """
    b, n = blocks.shape
    num_blocks, heads, block_size, *rest = cache.shape
    try:
        taken = cache.index_select(0, blocks.reshape(-1))
    except IndexError:
        check_blocks(blocks, num_blocks)
        raise
    taken = taken.view(b, n, heads, block_size, *rest).transpose(1, 2)
    taken = _converted(taken, dtype)
    return taken.view(b, heads, n * block_size, *taken.shape[4:])


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is torch.uint8 and dtype is torch.float32:
        return format_of(x.dtype).codes_as_floats(x)
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def gather_tokens(
    cache: Tensor, block: Tensor, offset: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Tokens ``[b, P]`` of a cache ``[K, N, S, ...]``, converted: ``[b, N, P, ...]``."""
    return _converted(cache[block, :, offset].transpose(1, 2), dtype)


def check_blocks(blocks: Tensor, num_blocks: int) -> None:
    """Refuse table entries that name no block; on a CPU only, to synchronise no device."""
    if blocks.device.type != "cpu" or blocks.numel() == 0:
        return
    low, high = (int(bound) for bound in blocks.aminmax())
    if low < 0 or high >= num_blocks:
        legal = f"block numbers 0 to {num_blocks - 1}"
        raise UsageError("block_tables", low if low < 0 else high, legal)
