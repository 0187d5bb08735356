"""How the tests tile and launch the kernels of ``kv_cache_quantize``."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from kernel_harness import GRANULARITIES, UB_BYTES, Limits, check_run, operators

DIMS = operators.GROUP_DIMS
scale_shape = operators.scale_shape

__all__ = ["DIMS", "GRANULARITIES", "Quantized", "quantize", "random_shape", "scale_shape"]


class Quantized(NamedTuple):
    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    tiling: Any
    results: list[Any]


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
    (codes, scales, zeros), run = operators.kv_cache_quantize(
        x, granularity, symmetric, scale, zero_point, group_size,
        limits=Limits(cores, ub_bytes, seed),
    )  # fmt: skip
    check_run(run, ub_bytes)
    return Quantized(codes, scales, None if symmetric else zeros, run.tiling, run.launches)


def random_shape(draw: random.Random, granularity: str) -> tuple[tuple[int, ...], int]:
    dim = draw.choice([8, 40, 64, 72, 80, 96, 128, 192, 256])
    group_size = draw.choice([g for g in (8, 16, 24, 32, 64) if dim % g == 0])
    tokens = draw.choice([1, 2, 3, 7, 17, 48, 65, 130])
    shape = (draw.choice([1, 1, 2]), draw.choice([1, 2, 3, 5]), tokens, dim)
    return shape, group_size if granularity == "group" else 0
