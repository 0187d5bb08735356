"""How the tests tile and launch the kernels of ``kv_cache_quantize``."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from kernel_harness import (
    ELEMENTS,
    SELECT_BYTES,
    UB_BYTES,
    inp,
    kernels,
    out,
    poisoned,
    run_tiling,
    twin,
    usable_ub,
)
from kernel_tilings import QuantizeTiling

GRANULARITIES = ("layer", "head", "token", "token_head", "channel", "group")
DIMS = {"layer": (1, 2, 3), "head": (2, 3), "token": (1, 3), "token_head": (3,), "channel": (2,)}


class Quantized(NamedTuple):
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    tiling: QuantizeTiling
    results: list[twin.Result]


def tile(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    granularity: str,
    symmetric: bool = True,
    static: bool = False,
    group_size: int = 0,
    cores: int = 48,
    ub_bytes: int = UB_BYTES,
    operator: str = "kv_cache_quantize",
) -> QuantizeTiling:
    number = GRANULARITIES.index(granularity)
    sizes = [*shape, number, group_size, ELEMENTS[dtype], symmetric, static]
    return run_tiling(operator, QuantizeTiling, sizes, cores, ub_bytes)


def scale_shape(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[int, ...]:
    if granularity == "group":
        return (*shape[:3], shape[3] // group_size)
    dims = DIMS[granularity]
    return tuple(1 if i in dims else n for i, n in enumerate(shape))


def quantize(
    x: torch.Tensor,
    granularity: str,
    symmetric: bool = True,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    group_size: int = 0,
    cores: int = 48,
    ub_bytes: int = UB_BYTES,
    seed: int = 0,
) -> Quantized:
    """Launch as the host would: one kernel, or three."""
    static = scale is not None
    shape = tuple(x.shape)
    t = tile(shape, x.dtype, granularity, symmetric, static, group_size, cores, ub_bytes)
    codes = poisoned(shape, torch.int8)
    if scale is None:
        scale = poisoned(scale_shape(shape, granularity, group_size), torch.float32)
        zero_point = None if symmetric else scale.clone()
    results = []
    if t.cores:
        library, blocks, struct = kernels("kv_cache_quantize"), t.cores, bytes(t)
        zeros = None if zero_point is None else (inp if static else out)(zero_point)
        scales = (inp if static else out)(scale)
        if t.passes == 3:
            work = poisoned((t.workspace_bytes // 4,), torch.float32)
            first = ("kv_cache_quantize_reduce", blocks, inp(x), out(work), struct)
            results.append(library.launch(*first, seed=seed))
            second = ("kv_cache_quantize_scales", blocks, inp(work), scales, zeros, struct)
            results.append(library.launch(*second, seed=seed + 1))
        last = ("kv_cache_quantize", blocks, inp(x), out(codes), scales, zeros, struct)
        results.append(library.launch(*last, seed=seed + 2))
    assert t.ub_bytes <= usable_ub(ub_bytes)
    assert all(r.total["ub_high_water"] <= t.ub_bytes + SELECT_BYTES for r in results)
    return Quantized(codes, scale, zero_point, t, results)


def random_shape(draw: random.Random, granularity: str) -> tuple[tuple[int, ...], int]:
    dim = draw.choice([8, 40, 64, 72, 80, 96, 128, 192, 256])
    group_size = draw.choice([g for g in (8, 16, 24, 32, 64) if dim % g == 0])
    tokens = draw.choice([1, 2, 3, 7, 17, 48, 65, 130])
    shape = (draw.choice([1, 1, 2]), draw.choice([1, 2, 3, 5]), tokens, dim)
    return shape, group_size if granularity == "group" else 0
