"""The kernels' tilings from Python: ``op_kernels/*/*_tiling.h``, compiled, and their structs.

``run_tiling`` compares the size of each struct here with the compiled one. Needs a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import launch

KERNELS = Path(__file__).resolve().parents[1]
UB_BYTES = 196608  # of a vector core of the 910B (ascend_kv/devices.py)
CORES = 48  # of a 910B1 or 910B2


class QuantizeTiling(ctypes.Structure):
    """``KvCacheQuantizeTiling``."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("mode", "element", "symmetric", "is_static")),
        *((name, ctypes.c_int32) for name in ("cores", "passes")),
        *((name, ctypes.c_int64) for name in ("groups", "heads", "tokens", "cols")),
        *((n, ctypes.c_int32) for n in ("stride", "tile_rows", "tile_cols", "tile_heads")),
        *((name, ctypes.c_int64) for name in ("granule", "share", "workspace_bytes", "ub_bytes")),
    ]


class StoreTiling(ctypes.Structure):
    """``KvCacheStoreTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("mode", "element", "cache_element", "symmetric", "nz")),
        *((n, ctypes.c_int32) for n in ("wide_slots", "positions", "sides", "cores", "stride")),
        *((n, ctypes.c_int32) for n in ("tile_tokens", "tile_heads")),
        *((n, ctypes.c_int64) for n in ("tokens", "heads", "dim", "block_size")),
        ("token_stride", ctypes.c_int64 * 2),
        ("ub_bytes", ctypes.c_int64),
    ]


class LoadTiling(ctypes.Structure):
    """``KvCacheLoadTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("mode", "element", "cache_element", "symmetric")),
        *((n, ctypes.c_int32) for n in ("offset", "nz", "wide_tables", "sides", "cores")),
        *(
            (n, ctypes.c_int32)
            for n in ("stride", "tile_tokens", "tile_heads", "tiles_a_block", "alignment")
        ),
        *((n, ctypes.c_int64) for n in ("batch", "heads", "dim", "block_size", "table_width")),
        *((n, ctypes.c_int64) for n in ("length", "zeros", "ub_bytes")),
    ]


class CompressTiling(ctypes.Structure):
    """``HcaCompressTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("element", "out_element", "overlap", "has_bias")),
        *((n, ctypes.c_int32) for n in ("has_norm", "joint", "bias_stays", "cores")),
        *((n, ctypes.c_int32) for n in ("rotary_dim", "chunk", "stride", "fold")),
        *((n, ctypes.c_int32) for n in ("tile_rows", "tile_windows", "finish_rows", "kept_rows")),
        *((n, ctypes.c_int64) for n in ("windows", "round_windows", "sequences", "dim", "ratio")),
        *((n, ctypes.c_float) for n in ("norm_eps", "norm_factor")),
        *((n, ctypes.c_int64) for n in ("workspace_bytes", "ub_bytes")),
    ]


class DecompressTiling(ctypes.Structure):
    """``HcaDecompressTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("element_bytes", "cores", "stride", "copies", "parts")),
        *((n, ctypes.c_int64) for n in ("entries", "dim", "ratio", "ub_bytes")),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """``op_kernels/tilings.cpp``, built again when a source changed.

    Raises RuntimeError without a compiler, launch.BuildError with the compiler's message.
    """
    compiler = launch.find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or set CXX")
    source = KERNELS / "tilings.cpp"
    read = [source, *KERNELS.glob("common/*.h"), *KERNELS.glob("*/*_tiling.h")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    digest = launch.digest_files(read, " ".join([compiler, *flags]))
    folder = launch.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"tilings-{digest}.so"
    if not target.exists():
        built = target.with_suffix(f".{os.getpid()}.so")
        command = [compiler, *flags, str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise launch.BuildError(done.stderr)
        os.replace(built, target)
    found = ctypes.CDLL(str(target))
    for name in ("core_of", "usable_ub"):
        getattr(found, name).restype = ctypes.c_int64
    return found


def _words(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*(int(v) for v in values))


def run_tiling(
    name: str, struct: type[ctypes.Structure], sizes: Sequence[int], cores: int, ub_bytes: int
) -> Any:
    """The struct that ``tile_<name>`` fills for these sizes."""
    function = getattr(library(), f"tile_{name}")
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
    library().core_range(*numbers, found)
    return found[0], found[1]


def parts_range(units: int, parts: int, cores: int, core: int) -> tuple[int, int]:
    """What ``core`` works on of the units of all parts."""
    found = _words([0, 0])
    library().parts_range(*(ctypes.c_int64(n) for n in (units, parts, cores, core)), found)
    return found[0], found[1]


def core_of(units: int, cores: int, unit: int) -> int:
    """The core that works on ``unit``."""
    return int(library().core_of(*(ctypes.c_int64(n) for n in (units, cores, unit))))


def usable_ub(ub_bytes: int = UB_BYTES) -> int:
    """The bytes that tilings may give out."""
    return int(library().usable_ub(ctypes.c_int64(ub_bytes)))
