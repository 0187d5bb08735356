"""What the kernel tests share: the twin, random data, comparison.

The kernels' sources are compiled unchanged against ``op_kernels/twin``; nothing here says anything
about an NPU beyond what the twin checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kv.evaluate.selftest_cases import random_values
from ascend_kv.evaluate.twin import KERNELS, load_module

twin = load_module("launch")
tilings = load_module("tilings")
operators = load_module("operators")

__all__ = ["KERNELS", "random_values"]  # beside what is defined here

Tensor = torch.Tensor
kernels, poisoned = operators.kernels, operators.poisoned
run_tiling, core_of, core_range = tilings.run_tiling, tilings.core_of, tilings.core_range
usable_ub = tilings.usable_ub
Limits, GRANULARITIES = operators.Limits, operators.GRANULARITIES

HALF_TYPES = (torch.float16, torch.bfloat16)
UB_BYTES = tilings.UB_BYTES
SELECT_BYTES = 8192  # at the end of UB, used by Select itself
SECTOR_BYTES = 32

needs_compiler = pytest.mark.skipif(
    twin.find_compiler() is None, reason="no C++ compiler for the twin (g++ or clang++)"
)


def check_run(run: Any, ub_bytes: int = UB_BYTES) -> None:
    """UB: what the tiling says fits, and no launch used more than it says."""
    assert not run.launches or 0 < run.tiling.ub_bytes <= usable_ub(ub_bytes)
    for result in run.launches:
        assert result.total["ub_high_water"] <= run.tiling.ub_bytes + SELECT_BYTES


def poison_some(generator: torch.Generator, x: Tensor) -> Tensor:
    """``x`` with a few NaN and infinities."""
    x = x.clone()
    flat = x.view(-1)
    for value in (float("nan"), float("inf"), float("-inf")):
        flat[torch.randint(0, flat.numel(), (1,), generator=generator)] = value
    return x


def same(found: Tensor, expected: Tensor) -> None:
    """Equal element by element; a NaN equals a NaN, 0 equals -0."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    differs = ~((found == expected) | (found.isnan() & expected.isnan()))
    if differs.any():
        where = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} differ, first at {where}: "
            f"{found[where].item()} instead of {expected[where].item()}"
        )


def sectors(*tensors: Tensor) -> int:
    """32-byte sectors of whole tensors, each read or written once."""
    return sum(-(-t.numel() * t.element_size() // SECTOR_BYTES) for t in tensors)
