"""``kv_cache_store``: new keys and values → their own scales → the paged cache, by slot.

Layout written, for a token whose slot is ``block * S + offset`` (letters: geometry.py)::

    key_cache      [K, N, S, D]   [block, n, offset, :]  the codes or values of KV head n; INT4,
                   [K, N, S, D/2]                        two codes a byte, as uint8
    key_scale      [K, N, S]      [block, n, offset]     token_head: float32, of INT4 float16
                   [K, 1, S]      [block, 0, offset]     token (all heads together), alike
                   [K, N, S, D/g] [block, n, offset, :]  groups of g channels, alike
    key_zero_point as key_scale                          asymmetric INT8 and INT4
    key_positions  [K, N, S]      [block, :, offset]     int32, the token's position

Values alike, in the same format or another. What one vector's bytes mean is said in
``ascend_kv.formats``.
"""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES, format_of, require_finite
from ascend_kv.ops.paged import (
    check_caches,
    check_index,
    check_positions,
    is_by_block,
    is_grouped,
    is_paged,
    spread,
)
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "kv_cache_store(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None, "
    "Tensor(e!)? key_zero_point=None, Tensor(f!)? value_zero_point=None, "
    "Tensor(g!)? key_positions=None, Tensor? positions=None, bool dynamic=True) -> ()"
)


def kv_cache_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    key_positions: Tensor | None = None,
    positions: Tensor | None = None,
    dynamic: bool = True,
) -> None:
    """Store the keys and values of T tokens; mutates the caches, scales and positions.

    Args:
        key: ``[T, N, D]``, float32, float16 or bfloat16, contiguous or not.
        value: as ``key``.
        key_cache: ``[K, N, S, D]``, int8, float8_e4m3fn, float8_e5m2 or a float type, or uint8
            ``[K, N, S, D / 2]`` for INT4; a float cache stores the values converted, and beyond
            half range they become infinity.
        value_cache: as ``key_cache``; it may be of another type.
        slot_mapping: ``[T]`` int32 or int64, ``block * S + offset``; -1 skips the token. A slot
            named twice holds one of the two tokens, no telling which.
        key_scale: for a quantized cache. ``[K, N, S]`` (token_head), ``[K, 1, S]`` (token) or
            ``[K, N, S, D / g]`` (groups of g channels, 1 < g < D), float32 (INT4: float16):
            written when ``dynamic``, else read at the slots. ``[1, N, 1, D]`` with any of N and D
            as 1: one static scale, needs ``dynamic=False``. INT4 is dynamic only.
        value_scale: as ``key_scale``.
        key_zero_point: as ``key_scale``; given means asymmetric, which FP8 cannot be.
        value_zero_point: as ``key_zero_point``.
        key_positions: ``[K, N, S]`` int32, receives ``positions`` for every head.
        positions: ``[T]`` int32 or int64; both or none of the two.
        dynamic: each token gets its own scale.

    Raises:
        UsageError: shapes or types that disagree, a scale missing or not wanted; on a CPU also
            a slot out of range, and NaN or infinity where the scale is static.

    A slot out of range cannot be seen on a device without synchronising it: it is the caller's.
    Where no kernel is built, skipping slots synchronises a device once.
    """
    scales = key_scale, value_scale, key_zero_point, value_zero_point
    cache_shape = check_caches(key_cache, value_cache, *scales)
    _check_tokens(key, value, slot_mapping, cache_shape)
    for side, cache, scale in (
        ("key", key_cache, key_scale),
        ("value", value_cache, value_scale),
    ):
        if scale is not None and is_by_block(scale, cache_shape[3]):
            legal = "scales of tokens: those of a block are made of all of its tokens at once"
            raise UsageError(f"{side}_scale", tuple(scale.shape), legal)
        if dynamic and scale is not None and not is_paged(scale, cache_shape[3]):
            legal = f"False, {side}_scale is static, no slot has its own"
            raise UsageError("dynamic", True, legal)
        if not dynamic and not format_of(cache.dtype).static:
            raise UsageError("dynamic", False, f"True, {side}_cache is int4")
    if (key_positions is None) != (positions is None):
        name = "key_positions" if key_positions is None else "positions"
        raise UsageError(name, None, "a tensor: positions and key_positions come together")
    if key_positions is not None and positions is not None:
        check_positions("key_positions", key_positions, cache_shape)
        if positions.shape != slot_mapping.shape:
            raise UsageError("positions", tuple(positions.shape), tuple(slot_mapping.shape))
        check_index("positions", positions)
    _op(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
        key_zero_point=key_zero_point,
        value_zero_point=value_zero_point,
        key_positions=key_positions,
        positions=positions,
        dynamic=dynamic,
    )


def _check_tokens(key: Tensor, value: Tensor, slots: Tensor, cache_shape: torch.Size) -> None:
    _, kv_heads, _, head_dim = cache_shape
    shape = key.shape
    if len(shape) != 3 or shape[1] != kv_heads or shape[2] != head_dim:
        raise UsageError("key", tuple(shape), f"[tokens, {kv_heads}, {head_dim}], as key_cache")
    if value.shape != shape:
        raise UsageError("value", tuple(value.shape), f"{tuple(shape)}, as key")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in FLOAT_DTYPES:
            raise UsageError(name, tensor.dtype, FLOAT_DTYPES)
    if slots.shape != shape[:1]:
        raise UsageError("slot_mapping", tuple(slots.shape), f"[{shape[0]}], one slot a token")
    check_index("slot_mapping", slots)


def _reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    key_positions: Tensor | None = None,
    positions: Tensor | None = None,
    dynamic: bool = True,
) -> None:
    blocks, _, block_size, _ = key_cache.shape
    if key.shape[0] == 0:
        return
    kept = _kept(slot_mapping, blocks * block_size)
    if kept is not None:
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
        positions = None if positions is None else positions[kept]
    if not dynamic:  # before anything is written
        for name, x, scale in (("key", key, key_scale), ("value", value, value_scale)):
            if scale is not None:
                require_finite(name, x)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    _store(key, key_cache, block, offset, key_scale, key_zero_point, dynamic)
    _store(value, value_cache, block, offset, value_scale, value_zero_point, dynamic)
    if key_positions is not None and positions is not None:
        key_positions[block, :, offset] = positions[:, None].to(torch.int32)


def _kept(slots: Tensor, num_slots: int) -> Tensor | None:
    """Which tokens are stored; None for all of them."""
    if slots.device.type != "cpu":
        return slots >= 0
    low, high = (int(bound) for bound in slots.aminmax())
    if low < -1 or high >= num_slots:
        given = low if low < -1 else high
        raise UsageError("slot_mapping", given, f"0 to {num_slots - 1}, or -1 to skip the token")
    return slots >= 0 if low < 0 else None


def _store(
    x: Tensor,
    cache: Tensor,
    block: Tensor,
    offset: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    dynamic: bool,
) -> None:
    """Write ``x`` [T, N, D] at ``[block, :, offset]`` of one cache, with its scales."""
    kind = format_of(cache.dtype)
    if scale is None:
        cache[block, :, offset] = kind.encode(x, ()).codes
    elif dynamic:
        if is_grouped(scale, x.shape[2]):
            groups = x.unflatten(2, (scale.shape[3], -1))
            encoded = kind.encode(groups, (3,), symmetric=zero_point is None)
        else:
            dims = (2,) if scale.shape[1] == cache.shape[1] else (1, 2)
            encoded = kind.encode(x, dims, symmetric=zero_point is None)
        cache[block, :, offset] = encoded.codes.reshape(*x.shape[:2], cache.shape[3])
        for target, source in ((scale, encoded.scale), (zero_point, encoded.zero_point)):
            if target is not None and source is not None:
                target[block, :, offset] = source.squeeze(-1)
    else:
        at_slots = _static(scale, cache, block, offset)
        zeros = None if zero_point is None else _static(zero_point, cache, block, offset)
        cache[block, :, offset] = kind.encode_static(x, at_slots, zeros).codes


def _static(scale: Tensor, cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """A given scale as it broadcasts to [T, N, D]."""
    dim = format_of(cache.dtype).head_dim(cache)
    if not is_paged(scale, dim):
        return scale.squeeze(2)
    at_slots = scale[block, :, offset]
    return spread(at_slots, dim) if is_grouped(scale, dim) else at_slots[..., None]


def _fake(*args: object, **kwargs: object) -> None:
    return None


_op = register(SCHEMA, _reference, _fake)
