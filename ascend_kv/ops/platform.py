"""The device below the operators: which one, how much memory, which implementation serves.

The only Python file that names torch_npu, and it does so only when an NPU is asked for, so that
everything works where torch_npu is not installed. How ``paged_attention`` is said to the NPU's
fused attention is in ``fused_attention``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ascend_kv import ops
from ascend_kv.devices import short_name
from ascend_kv.errors import RunError, UsageError
from ascend_kv.ops import native, profiler
from ascend_kv.ops.fused_attention import FUNCTION, FUNCTION_V2
from ascend_kv.ops.fused_execute import Route, attend, routes_taken
from ascend_kv.ops.native import VARIABLE, operators_wanted
from ascend_kv.ops.registration import DISPATCH_KEYS, NAMESPACE, handed_over, has_kernel
from ascend_kv.ops.sparse_flash_mla import FUNCTIONS as SPARSE_FUNCTIONS

logger = logging.getLogger(__name__)

DEVICES = ("npu", "cpu")
RECORDER_WARM_UP_STEPS = profiler.WARM_UP_STEPS
_NPU_LIBRARY = "ascend_kv.ops._npu"  # built by setup.py; a library, not a module
_NOT_BUILT = (
    "the Ascend C kernels are not built (source CANN's set_env.sh, then: "
    "pip install --no-build-isolation -e .)"
)
_TRANSFORMER_OPS = "cann_ops_transformer"  # CANN's ops-transformer; installed apart from torch_npu
_FUSED = "CANN's fused attention"
_UNTRIED = "tested against a stand-in of torch_npu only, never on an NPU"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# A library that is collected takes its kernels along.
_npu_kernels: list[torch.library.Library] = []


def find_device() -> str:
    """``npu`` where torch_npu finds one, else ``cpu``.

    Raises:
        RunError: torch_npu is installed and does not load. That is never taken for a machine
            without an NPU: whoever wants the CPU all the same asks for it by name.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return "cpu"
    if _torch_npu().npu.is_available():
        if operators_wanted() != "reference" and not has_kernel("kv_cache_store", "npu"):
            _say_once(f"{_NOT_BUILT}: references serve their operators on the NPU")
        return "npu"
    _say_once("torch_npu is installed but finds no NPU: using the CPU")
    return "cpu"


def check_device(device: str) -> None:
    """Refuse a device that is unknown, or that is not here.

    Raises:
        UsageError: not one of ``DEVICES``, or no NPU here.
        RunError: as ``find_device``.
    """
    if device not in DEVICES:
        raise UsageError("device", device, (*DEVICES, "auto"))
    if device == "npu" and find_device() != "npu":
        raise UsageError("device", device, "cpu, there is no NPU here")


def device_name(device: str) -> str:
    """The name ``devices.get_device`` knows the device by: ``cpu`` or the chip, ``910B3``."""
    if device == "cpu":
        return "cpu"
    name: str = _torch_npu().npu.get_device_name()
    return short_name(name)


def synchronize(device: str) -> None:
    """Wait until all that was given to the device is done; on the CPU it already is."""
    if device == "npu":
        _torch_npu().npu.synchronize()


def record_steps(
    device: str, directory: Path, steps: int
) -> AbstractContextManager[Callable[[], None]]:
    """Profile ``RECORDER_WARM_UP_STEPS`` and ``steps`` more, into ``directory``.

    Inside it, call what it yields at the end of each step.
    """
    return profiler.record(_torch_npu() if device == "npu" else None, directory, steps)


def free_memory_bytes(device: str) -> int:
    """Memory that may still be allocated: the NPU's own, or the machine's."""
    return _memory_bytes(device)[0]


def total_memory_bytes(device: str) -> int:
    """All memory of the NPU, or of the machine (of the container, where it has a limit)."""
    return _memory_bytes(device)[1]


def implementations(device: str | None = None) -> dict[str, str]:
    """For each operator what serves it on ``device``: ``native`` code or the ``reference``.

    Where native code handed calls to the reference, the reasons follow:
    ``native; reference for scales by group of channels (12 calls)``. On an NPU
    ``paged_attention`` has CANN's fused attention, and the ways that its calls went follow:
    ``CANN's fused attention; decode: paged (12 calls), prefill: loaded (prefill cache) (3 calls)``.
    """
    where = find_device() if device is None else device
    return {name: f"{served}{_elsewhere(name, where)}" for name, served in served_by(where).items()}


def served_by(device: str) -> dict[str, str]:
    """``implementations`` without the calls that went elsewhere so far."""
    return {name: _served_by(name, device) for name in ops.__all__}


def whole_number_bits(device: str) -> int | None:
    """``native.whole_number_bits`` where compiled operators serve ``device``; None elsewhere."""
    if device != "cpu" or not has_kernel("paged_attention", "cpu"):
        return None
    return native.whole_number_bits()


def _served_by(name: str, device: str) -> str:
    if not has_kernel(name, device):
        return "reference"
    return _FUSED if (name, device) == ("paged_attention", "npu") else "native"


def _elsewhere(name: str, device: str) -> str:
    if not has_kernel(name, device):
        return ""
    if (name, device) == ("paged_attention", "npu"):
        ways = [f"{words} ({way.calls} calls)" for words, way in attention_routes().items()]
        return f"; {', '.join(ways)}" if ways else ""
    reasons = [f"{reason} ({count} calls)" for reason, count in handed_over(name, device).items()]
    return f"; reference for {', '.join(reasons)}" if reasons else ""


def register_npu_operators() -> bool:
    """Let the Ascend C kernels and CANN's fused attention serve the NPU, where torch_npu is loaded.

    It is called when the operators are imported, and when torch_npu is loaded after them; each
    part happens once. Nothing happens without torch_npu, nor with
    ``ASCEND_KV_OPERATORS=reference``.

    Returns:
        Whether fused attention serves ``paged_attention``; ``implementations`` tells of the rest.

    Raises:
        RunError: the library of kernels does not load, or ``ASCEND_KV_OPERATORS=native`` asks for
            kernels and there are none.
    """
    library = sys.modules.get("torch_npu")
    if library is None or operators_wanted() == "reference":
        return False
    _load_kernels()
    return _register_attention(library)


def _load_kernels() -> None:
    if has_kernel("kv_cache_store", "npu"):
        return
    found = importlib.util.find_spec(_NPU_LIBRARY)
    if found is None or found.origin is None:
        if operators_wanted() == "native":
            raise RunError(f"{VARIABLE}=native, but {_NOT_BUILT}")
        return
    try:
        torch.ops.load_library(found.origin)
    except OSError as error:
        raise RunError(
            f"the NPU kernels in {found.origin} do not load ({error.__cause__ or error}). Source "
            "the set_env.sh of the CANN that they were built with, or install ascend_kv again"
        ) from error


def _register_attention(library: ModuleType) -> bool:
    if not all(hasattr(library, name) for name in (FUNCTION, FUNCTION_V2)):
        return False
    if has_kernel("paged_attention", "npu"):
        return True

    def paged_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _say_once(
            f"{_FUSED} serves paged_attention, which was {_UNTRIED}; "
            f"{VARIABLE}=reference leaves it out"
        )
        return attend(library, *args, **kwargs)

    kernels = torch.library.Library(NAMESPACE, "IMPL")
    kernels.impl("paged_attention", paged_attention, DISPATCH_KEYS["npu"])
    _npu_kernels.append(kernels)
    return True


def attention_routes() -> dict[str, Route]:
    """The ways that ``paged_attention`` went on the NPU, how often and why; none on a CPU.

    By their names: ``decode: paged``, ``decode: loaded (cache type)`` for keys and values that
    are copied out first, ``decode: reference (query type)``.
    """
    return {words: replace(route) for words, route in routes_taken.items()}


def describe_attention(device: str) -> str:
    """What serves ``paged_attention`` on a device that has CANN's fused attention, or has not."""
    if device == "cpu":
        return "not used: it is for the NPU"
    if has_kernel("paged_attention", "npu"):
        return f"serves paged_attention, {_UNTRIED}"
    if operators_wanted() == "reference":
        return f"not used: {VARIABLE}=reference"
    return f"not used: torch_npu has no {FUNCTION} or {FUNCTION_V2}"


def sparse_flash_mla_library(device: str) -> Any:
    """What has CANN's SparseFlashMla on a device: the operators of ``cann_ops_transformer``.

    None on a CPU, where that package of ops-transformer is not installed or lacks it, and with
    ``ASCEND_KV_OPERATORS=reference``; our own operators serve then, which the log says once.
    """
    if device != "npu" or operators_wanted() == "reference":
        return None
    if importlib.util.find_spec(_TRANSFORMER_OPS) is None:
        _say_once(f"{_TRANSFORMER_OPS} is not installed: our operators attend to entries")
        return None
    library = importlib.import_module(_TRANSFORMER_OPS).ops
    if not all(hasattr(library, name) for name in SPARSE_FUNCTIONS):
        _say_once(f"{_TRANSFORMER_OPS} has no {SPARSE_FUNCTIONS[0]}: our operators attend")
        return None
    _say_once(f"CANN's SparseFlashMla attends to entries, which was {_UNTRIED}")
    return library


def _torch_npu() -> ModuleType:
    try:
        module = importlib.import_module("torch_npu")
    except Exception as error:  # a library of CANN that is missing is an OSError
        raise RunError(
            f"torch_npu is installed but does not load ({type(error).__name__}: {error}). "
            "Source CANN's set_env.sh, uninstall torch_npu, or ask for the device cpu"
        ) from error
    register_npu_operators()
    return module


@lru_cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _memory_bytes(device: str) -> tuple[int, int]:
    """Free and total."""
    if device == "npu":
        npu = _torch_npu().npu
        free, total = npu.mem_get_info()
        # What torch holds of the device and has lent to no tensor can be allocated as well.
        return int(free) + npu.memory_reserved() - npu.memory_allocated(), int(total)
    free, total = _machine_memory_bytes()
    limit, used = (_read_bytes(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None and limit < total:
        return max(0, min(free, limit - used + _file_cache_bytes())), limit
    return free, total


def _file_cache_bytes() -> int:
    """What the container's use counts of files in memory and would be given up when needed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _machine_memory_bytes() -> tuple[int, int]:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux: what is free is not told, so all of it counts
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kibibytes = {name: int(rest.split()[0]) for name, rest in (x.split(":") for x in lines)}
    return kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024


def _read_bytes(path: Path) -> int | None:
    """A cgroup figure; None where there is none or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
