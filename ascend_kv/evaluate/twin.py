"""The CPU twin of the Ascend C kernels, which lies beside the package, in ``op_kernels/twin``.

The kernels' sources are no part of the installed package; an editable install
(``pip install -e .``) finds them in its checkout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ascend_kv.errors import RunError

KERNELS = Path(__file__).resolve().parents[2] / "op_kernels"
OPERATORS = (
    "kv_cache_quantize",
    "kv_cache_dequantize",
    "kv_cache_store",
    "kv_cache_load",
    "hca_compress",
    "hca_decompress",
)
"""Those with a kernel."""
_NAME = "ascend_kv_twin"


def missing() -> str | None:
    """What the twin lacks here, with what to do about it; None where it can run."""
    if not (KERNELS / "twin" / "launch.py").is_file():
        return (
            f"the kernels' sources are not beside the package ({KERNELS}): use a clone of the "
            "repository, installed with pip install -e ."
        )
    if load_module("launch").find_compiler() is None:
        return "there is no C++ compiler: install g++ or clang++, or set CXX"
    if shutil.which("ld") is None:
        return "there is no linker (ld): install binutils"
    return None


def require_twin() -> ModuleType:
    """The twin's ``operators``: each operator on the twin, with its counters.

    Raises:
        RunError: as ``missing`` says.
    """
    lacking = missing()
    if lacking:
        raise RunError(f"the CPU twin cannot run: {lacking}")
    return load_module("operators")


def build_kernels(advance: Callable[[int], None]) -> ModuleType:
    """``require_twin`` with every kernel compiled, which takes a while where none was kept.

    Args:
        advance: called after each of ``OPERATORS``.

    Raises:
        RunError: as ``require_twin``, or a kernel does not compile.
    """
    operators, launch = require_twin(), load_module("launch")
    for name in OPERATORS:
        try:
            operators.kernels(name)
        except launch.BuildError as error:
            raise RunError(f"compiling {name} for the CPU twin fails: {error}") from error
        advance(1)
    return operators


@functools.cache
def load_module(name: str) -> ModuleType:
    """A module of ``op_kernels/twin``: ``launch``, ``tilings`` or ``operators``."""
    if _NAME not in sys.modules:
        folder = KERNELS / "twin"
        spec = importlib.util.spec_from_file_location(
            _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_NAME}.{name}")
