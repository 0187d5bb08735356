"""What the kernel tests share: the tilings compiled and called, kernels on the twin, random data.

The kernels' sources are compiled unchanged against ``op_kernels/twin``; nothing here says anything
about an NPU beyond what the twin checks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

KERNELS = Path(__file__).resolve().parents[1] / "op_kernels"
sys.path.insert(0, str(KERNELS / "twin"))

import launch as twin  # noqa: E402
from launch import inp, out  # noqa: E402, F401

Tensor = torch.Tensor

ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int8: 3}
HALF_TYPES = (torch.float16, torch.bfloat16)
UB_BYTES = 196608  # of a vector core of the 910B (ascend_kv/devices.py)
SELECT_BYTES = 8192  # at the end of UB, used by Select itself
SECTOR_BYTES = 32

needs_compiler = pytest.mark.skipif(
    twin.find_compiler() is None, reason="no C++ compiler for the twin (g++ or clang++)"
)


@functools.cache
def tilings() -> ctypes.CDLL:
    """``op_kernels/tilings.cpp``, built again when a source changed."""
    compiler = twin.find_compiler()
    sources = [KERNELS / "tilings.cpp", *KERNELS.glob("common/*.h"), *KERNELS.glob("*/*_tiling.h")]
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    folder = twin.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"tilings-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        built = target.with_suffix(f".{os.getpid()}.so")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        subprocess.run([compiler, *flags, str(sources[0]), "-o", str(built)], check=True)
        os.replace(built, target)
    library = ctypes.CDLL(str(target))
    for name in ("core_of", "usable_ub"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def _words(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*(int(v) for v in values))


def run_tiling(
    name: str, struct: type[ctypes.Structure], sizes: Sequence[int], cores: int, ub_bytes: int
) -> Any:
    """The struct that ``tile_<name>`` fills for these sizes."""
    function = getattr(tilings(), f"tile_{name}")
    function.restype = ctypes.c_int64
    words, limits = _words(sizes), (ctypes.c_int64(cores), ctypes.c_int64(ub_bytes))
    assert function(words, *limits, None) == ctypes.sizeof(struct), f"{name}: fields differ"
    found = struct()
    function(words, *limits, ctypes.byref(found))
    return found


def core_range(units: int, cores: int, core: int, granule: int) -> tuple[int, int]:
    """What ``core`` works on."""
    found = _words([0, 0])
    numbers = (ctypes.c_int64(n) for n in (units, cores, core, granule))
    tilings().core_range(*numbers, found)
    return found[0], found[1]


def core_of(units: int, cores: int, unit: int) -> int:
    """The core that works on ``unit``."""
    return int(tilings().core_of(*(ctypes.c_int64(n) for n in (units, cores, unit))))


def usable_ub(ub_bytes: int = UB_BYTES) -> int:
    """The bytes that tilings may give out."""
    return int(tilings().usable_ub(ctypes.c_int64(ub_bytes)))


@functools.cache
def kernels(operator: str) -> twin.Library:
    """The kernels of one operator, on the twin."""
    return twin.build(KERNELS / operator / f"{operator}_kernel.cpp")


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a kernel has to fill: NaN, or a pattern where the type has none."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    return torch.full(tuple(shape), 85, dtype=dtype)


def random_values(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal values, with rows of zeros, constants, denormals and extreme numbers among them."""
    x = torch.randn(tuple(shape), generator=generator) * 3
    rows = x.view(-1, shape[-1])
    limits = torch.finfo(dtype)
    special = torch.randint(0, 12, (rows.shape[0],), generator=generator)
    rows[special == 0] = 0.0
    rows[special == 1] = -1.7
    rows[special == 2] *= limits.tiny / 4
    rows[special == 3] *= limits.max / 40
    rows[special == 4] = rows[special == 4].round()
    return x.clamp(limits.min, limits.max).to(dtype)


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
