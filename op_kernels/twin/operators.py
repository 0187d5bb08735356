"""Whole operators on the twin: what the NPU's host functions do, with torch CPU tensors.

Each function has the arguments of the operator of its name in ``ascend_kv.ops`` and then
``limits``, the device that its tiling is made for. It cuts, launches and returns the operator's
result, which lay in poisoned memory, and a ``Run`` with the tiling and the counters of every
launch. Arguments are not checked here: the operators do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import launch
from .host import DEFAULT, ELEMENTS, Limits, Run, kernels, launch_all, poisoned
from .launch import inp, out
from .tilings import LoadTiling, QuantizeTiling, StoreTiling, run_tiling
from .windows import hca_compress, hca_decompress, tile_compress

__all__ = [
    "Limits",
    "Run",
    "hca_compress",
    "hca_decompress",
    "kernels",
    "kv_cache_dequantize",
    "kv_cache_load",
    "kv_cache_quantize",
    "kv_cache_store",
    "poisoned",
    "tile_compress",
    "tile_load",
    "tile_quantize",
    "tile_store",
]

Tensor = torch.Tensor
Pair = tuple[Any, Any]

GRANULARITIES = ("layer", "head", "token", "token_head", "channel", "group")
GROUP_DIMS = {
    "layer": (1, 2, 3),
    "head": (2, 3),
    "token": (1, 3),
    "token_head": (3,),
    "channel": (2,),
}
MODES = ("copy", "convert", "token_head", "token", "static")
OFFSETS = ("none", "in_order", "at_positions")


def scale_shape(shape: Sequence[int], granularity: str, group_size: int) -> tuple[int, ...]:
    """Of the scales of a dense tensor."""
    if granularity == "group":
        return (*shape[:3], shape[3] // group_size)
    return tuple(1 if i in GROUP_DIMS[granularity] else n for i, n in enumerate(shape))


def tile_quantize(
    operator: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    granularity: str,
    symmetric: bool = True,
    static: bool = False,
    group_size: int = 0,
    limits: Limits = DEFAULT,
) -> QuantizeTiling:
    """Of ``kv_cache_quantize`` or ``kv_cache_dequantize``; ``dtype`` is that of the values."""
    number = GRANULARITIES.index(granularity)
    sizes = [*shape, number, group_size, ELEMENTS[dtype], symmetric, static]
    return run_tiling(operator, QuantizeTiling, sizes, limits.cores, limits.ub_bytes)


def kv_cache_quantize(
    x: Tensor,
    granularity: str,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    *,
    limits: Limits = DEFAULT,
) -> tuple[tuple[Tensor, Tensor, Tensor], Run]:
    """One launch, or three where a scale spans cores."""
    x, static, shape = x.contiguous(), scale is not None, tuple(x.shape)
    t = tile_quantize(
        "kv_cache_quantize", shape, x.dtype, granularity, symmetric, static, group_size, limits
    )
    codes, groups = poisoned(shape, torch.int8), scale_shape(shape, granularity, group_size)
    scales = poisoned(groups, torch.float32) if scale is None else scale.expand(groups).contiguous()
    zeros = None if symmetric else poisoned(groups, torch.float32)
    if zero_point is not None:
        zeros = zero_point.expand(groups).contiguous()
    given = inp if static else out
    places = given(scales), None if zeros is None else given(zeros)
    calls: list[tuple[Any, ...]] = []
    if t.cores and t.passes == 3:
        work = poisoned((t.workspace_bytes // 4,), torch.float32)
        calls.append(("kv_cache_quantize_reduce", inp(x), out(work)))
        calls.append(("kv_cache_quantize_scales", inp(work), *places))
    if t.cores:
        calls.append(("kv_cache_quantize", inp(x), out(codes), *places))
    run = launch_all(
        "kv_cache_quantize", t, [(name, t.cores, *rest) for name, *rest in calls], limits
    )
    return (codes, scales, scales.new_empty(0) if zeros is None else zeros), run


def kv_cache_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    dtype: torch.dtype | None = None,
    *,
    granularity: str | None = None,
    limits: Limits = DEFAULT,
) -> tuple[Tensor, Run]:
    """``granularity`` where it cannot be seen from the scale's shape."""
    shape = tuple(codes.shape)
    zeros = None if zero_point is None or zero_point.shape == (0,) else zero_point.contiguous()
    if granularity is None:
        names = ("group",) if group_size else GRANULARITIES[:-1]
        granularity = next(n for n in names if scale_shape(shape, n, group_size) == scale.shape)
    values = poisoned(shape, dtype or torch.float32)
    t = tile_quantize(
        "kv_cache_dequantize", shape, values.dtype, granularity, zeros is None, False, group_size,
        limits,
    )  # fmt: skip
    places = inp(codes.contiguous()), inp(scale.contiguous()), None if zeros is None else inp(zeros)
    calls = [("kv_cache_dequantize", t.cores, *places, out(values))] if t.cores else []
    return values, launch_all("kv_cache_dequantize", t, calls, limits)


def tile_store(
    key: Tensor,
    value: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    mode: str,
    symmetric: bool = True,
    positions: Tensor | None = None,
    nz: bool = False,
    limits: Limits = DEFAULT,
) -> StoreTiling:
    """Of ``kv_cache_store``; without ``value`` of a store of keys alone."""
    block_size = cache.shape[3] if nz else cache.shape[2]
    strides = key.stride(0), (key if value is None else value).stride(0)
    sizes = [
        *(*key.shape, block_size, *strides, MODES.index(mode)),
        *(ELEMENTS[key.dtype], ELEMENTS[cache.dtype], symmetric, nz, slots.dtype is torch.int64),
        *(0 if positions is None else positions.element_size(), 1 if value is None else 2),
    ]
    return run_tiling("kv_cache_store", StoreTiling, sizes, limits.cores, limits.ub_bytes)


def kv_cache_store(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_zero_point: Tensor | None = None,
    value_zero_point: Tensor | None = None,
    key_positions: Tensor | None = None,
    positions: Tensor | None = None,
    dynamic: bool = True,
    nz: bool = False,
    mode: str | None = None,
    limits: Limits = DEFAULT,
) -> tuple[None, Run]:
    """Without ``value`` and its cache keys alone; ``mode`` where one head leaves two of them."""
    if mode is None:
        mode = _mode(key.dtype, key_cache, key_scale, key.shape[1], dynamic)
    symmetric = key_zero_point is None
    t = tile_store(key, value, key_cache, slot_mapping, mode, symmetric, positions, nz, limits)
    rows = [None if x is None else inp(_from_first_element(x)) for x in (key, value)]
    given = inp if mode == "static" else out
    scales = _sides(_static((key_scale, value_scale), key, mode), given)
    zeros = _sides(_static((key_zero_point, value_zero_point), key, mode), given)
    call = (
        "kv_cache_store", t.cores, *rows, *_sides((key_cache, value_cache), out),
        inp(slot_mapping), *scales, *zeros, *_sides((key_positions, None), out)[:1],
        *_sides((positions, None), inp)[:1],
    )  # fmt: skip
    return None, launch_all("kv_cache_store", t, [call] if t.cores else [], limits)


def tile_load(
    cache: Tensor,
    block_tables: Tensor,
    kv_lengths: Sequence[int],
    dtype: torch.dtype,
    mode: str,
    symmetric: bool = True,
    offset: str = "none",
    nz: bool = False,
    limits: Limits = DEFAULT,
) -> LoadTiling:
    """Of ``kv_cache_load``."""
    heads, block_size, dim = cache.shape[1], cache.shape[2], cache.shape[3]
    if nz:
        block_size, dim = cache.shape[3], cache.shape[2] * cache.shape[4]
    sizes = [
        *(len(kv_lengths), heads, dim, block_size, block_tables.shape[1]),
        *(max(kv_lengths, default=0), MODES.index(mode), ELEMENTS[dtype], ELEMENTS[cache.dtype]),
        *(symmetric, nz, block_tables.dtype is torch.int64, OFFSETS.index(offset), 2),
    ]
    return run_tiling("kv_cache_load", LoadTiling, sizes, limits.cores, limits.ub_bytes)


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
    nz: bool = False,
    mode: str | None = None,
    limits: Limits = DEFAULT,
) -> tuple[tuple[Tensor, Tensor], Run]:
    """``mode`` where one head leaves two of them."""
    quantized = key_cache.dtype is torch.int8
    dtype = dtype or (torch.float32 if quantized else key_cache.dtype)
    heads, dim = key_cache.shape[1], key_cache.shape[3]
    if nz:
        dim = key_cache.shape[2] * key_cache.shape[4]
    offset = "none"
    if key_offset is not None:
        offset = "in_order" if key_positions is None else "at_positions"
    if mode is None:
        mode = _mode(dtype, key_cache, key_scale, heads, key_scale is None or key_scale.dim() == 3)
        mode = "convert" if mode == "copy" and offset != "none" else mode
    t = tile_load(
        key_cache, block_tables, kv_lengths, dtype, mode, key_zero_point is None, offset, nz, limits
    )
    shape = (len(kv_lengths), heads, max(kv_lengths, default=0), dim)
    key, value = poisoned(shape, dtype), poisoned(shape, dtype)
    like = key_cache.new_empty(1, heads, dim)
    used = key_positions if offset == "at_positions" else None
    call = (
        "kv_cache_load", t.cores, inp(key_cache), inp(value_cache), inp(block_tables),
        inp(torch.tensor(kv_lengths, dtype=torch.int32)),
        *_sides(_static((key_scale, value_scale), like, mode), inp),
        *_sides(_static((key_zero_point, value_zero_point), like, mode), inp),
        *(None if x is None else inp(x) for x in (key_offset, rotary_table, used)),
        out(key), out(value),
    )  # fmt: skip
    return (key, value), launch_all("kv_cache_load", t, [call] if t.cores else [], limits)


def _mode(dtype: torch.dtype, cache: Tensor, scale: Tensor | None, heads: int, paged: bool) -> str:
    """What becomes of values of ``dtype`` on their way into or out of a cache."""
    if scale is None:
        return "copy" if dtype is cache.dtype else "convert"
    if not paged:
        return "static"
    return "token_head" if scale.shape[1] == heads else "token"


def _static(pair: Pair, rows: Tensor, mode: str) -> Pair:
    """Static scales for each head and channel; others as they are."""
    if mode != "static":
        return pair
    _, heads, dim = rows.shape
    key, value = (
        None if x is None else x.expand(1, heads, 1, dim).reshape(heads, dim).contiguous()
        for x in pair
    )
    return key, value


def _sides(pair: Pair, mark: Callable[[Tensor], launch.Buffer]) -> list[launch.Buffer | None]:
    return [None if x is None else mark(x) for x in pair]


def _from_first_element(x: Tensor) -> Tensor:
    """The memory from the tensor's first element on, as a kernel gets it; a copy."""
    size = (x.shape[0] - 1) * x.stride(0) + x.shape[1] * x.shape[2] if x.shape[0] else 0
    return x.as_strided((size,), (1,), x.storage_offset()).clone()
