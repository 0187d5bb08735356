"""What every operator on the twin shares: limits, compiled kernels, poisoned memory, launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import launch
from .tilings import CORES, KERNELS, UB_BYTES

Tensor = torch.Tensor

ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int8: 3}


@dataclass(frozen=True)
class Limits:
    """What a tiling is made for, and the seed of the run (order of the cores)."""

    cores: int = CORES
    ub_bytes: int = UB_BYTES
    seed: int = 0


class Run(NamedTuple):
    """How an operator was cut, and what each of its launches counted; none for nothing to do."""

    tiling: Any
    launches: list[launch.Result]


DEFAULT = Limits()


@functools.cache
def kernels(operator: str) -> launch.Library:
    """The kernels of one operator, on the twin."""
    return launch.build(KERNELS / operator / f"{operator}_kernel.cpp")


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a kernel has to fill: NaN, or a pattern where the type has none."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 85, dtype=dtype)


def launch_all(operator: str, tiling: Any, calls: Sequence[tuple[Any, ...]], limits: Limits) -> Run:
    """Each call is a kernel's name, its cores and its arguments but the tiling."""
    results = [
        kernels(operator).launch(name, cores, *arguments, bytes(tiling), seed=limits.seed + number)
        for number, (name, cores, *arguments) in enumerate(calls)
    ]
    return Run(tiling, results)
