"""Builds the NPU kernels while the package is installed; ``setup.py`` calls ``add_npu_kernels``.

Nothing happens unless ``ASCEND_HOME_PATH`` is set, as CANN's set_env.sh does. Then ``CMake`` builds
``op_kernels`` (target ``npu``) into one library beside the operators, which
``ascend_kv.ops.platform`` loads. What is missing ends the build with a sentence that says what to
do. For which chip: ``SOC_VERSION``, or what npu-smi tells.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

MODULE = "ascend_kv.ops._npu"  # a library to load, not to import
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "op_kernels"
# Chips whose vector cores the kernels are written for (dav-c220), as CANN names them.
KNOWN_CHIPS = ("Ascend910B", "Ascend910_93")
CPU_ONLY = "or unset ASCEND_HOME_PATH to install for the CPU only"


def read_module(name: str) -> ModuleType:
    """A file of the package as a module, by its path: the package may not be importable yet."""
    file = ROOT / "ascend_kv" / name
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


targets = read_module("build_targets.py")


class BuildProblem(SystemExit):
    """Ends the build with a message and no traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"[ascend_kv] the NPU kernels are not built: {message}")


class NpuKernels(Extension):
    """What ``build_ext`` gives to CMake."""

    def __init__(self) -> None:
        super().__init__(MODULE, sources=[])


def add_npu_kernels(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``setup``, with the NPU kernels where CANN's environment is loaded."""
    if not os.environ.get("ASCEND_HOME_PATH"):
        return arguments
    commands = dict(arguments.get("cmdclass", {}))
    commands["build_ext"] = _with_cmake(commands.get("build_ext", build_ext))
    extensions = [*arguments.get("ext_modules", []), NpuKernels()]
    return {**arguments, "ext_modules": extensions, "cmdclass": commands}


def _with_cmake(base: type[Any]) -> type[Any]:
    """A ``build_ext`` that builds ``NpuKernels`` with CMake and leaves all else to ``base``."""

    class BuildWithCMake(base):  # type: ignore[misc]
        def _for_base(self, step: Callable[[], None]) -> list[NpuKernels]:
            """Do a step of ``base`` for what is its own; returns the rest."""
            ours = [ext for ext in self.extensions if isinstance(ext, NpuKernels)]
            self.extensions = [ext for ext in self.extensions if not isinstance(ext, NpuKernels)]
            if self.extensions:
                step()
            self.extensions += ours
            return ours

        def build_extensions(self) -> None:
            for ext in self._for_base(super().build_extensions):
                build(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp), os.environ)

        def copy_extensions_to_source(self) -> None:
            for ext in self._for_base(super().copy_extensions_to_source):
                source, target = self._get_inplace_equivalent(
                    self.get_finalized_command("build_py"), ext
                )
                self.copy_file(*reversed((source, target)), level=self.verbose)

    return BuildWithCMake


def build(library: Path, folder: Path, environ: Mapping[str, str]) -> None:
    """Build ``library`` in ``folder``.

    Raises:
        BuildProblem: something is missing, or CMake fails.
    """
    cann = check_cann(Path(environ["ASCEND_HOME_PATH"]))
    cmake = find_cmake()
    folder = folder.resolve() / "npu"
    configure = [
        *(cmake, "-S", str(SOURCES), "-B", str(folder)),
        *("-DASCEND_KV_NPU=ON", "-DASCEND_KV_TWIN=OFF", "-DCMAKE_BUILD_TYPE=Release"),
        f"-DASCEND_HOME_PATH={cann}",
        f"-DSOC_VERSION={find_soc_version(environ)}",
        f"-DTORCH_DIR={find_package('torch')}",
        f"-DTORCH_NPU_DIR={find_package('torch_npu')}",
    ]
    jobs = environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    for command in (configure, [cmake, "--build", str(folder), "--target", "npu", "-j", jobs]):
        if subprocess.run(command).returncode:
            raise BuildProblem(f"`{' '.join(command)}` failed, its output is above")
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "libascend_kv_npu.so", library)


def check_cann(home: Path) -> Path:
    """CANN's folder, if it is there and not too old."""
    if not home.is_dir():
        raise BuildProblem(f"ASCEND_HOME_PATH={home} is no folder. Source CANN's set_env.sh")
    version = targets.cann_version(home)
    if targets.is_too_old(version):
        raise BuildProblem(
            f"CANN in {home} is version {version}, {targets.OLDEST_CANN}.0 or newer is needed. "
            f"Install it and source its set_env.sh, {CPU_ONLY}"
        )
    return home


def find_soc_version(environ: Mapping[str, str]) -> str:
    """The chip as CANN names it, ``Ascend910B3``."""
    chip = environ.get("SOC_VERSION") or _chip_from_npu_smi()
    if chip is None:
        raise BuildProblem(
            "npu-smi tells no chip here. Name the one to build for: SOC_VERSION=Ascend910B3 "
            f"(npu-smi info, column Name, on the machine that has it), {CPU_ONLY}"
        )
    if not chip.startswith(KNOWN_CHIPS) or chip in KNOWN_CHIPS:
        known = "Ascend910B1 to Ascend910B4, or Ascend910_93..."
        raise BuildProblem(f"SOC_VERSION is {chip}, the kernels are for {known}, {CPU_ONLY}")
    return chip


def _chip_from_npu_smi() -> str | None:
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # | 0     910B3               | OK            | 93.4 ...
    found = re.search(r"^\|\s*\d+\s+(?:Ascend)?(910\w+(?:-\d+)?)\s*\|", done.stdout, re.M)
    return f"Ascend{found[1]}" if found else None


def find_cmake() -> str:
    """CMake's program: on the PATH, or beside this Python, where pip puts it."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        raise BuildProblem(f"no CMake here. Install it (pip install cmake), {CPU_ONLY}")
    return cmake


def find_package(name: str) -> Path:
    """The folder of an installed package, also where build isolation hides the environment's."""
    places = [Path(sysconfig.get_path(kind), name) for kind in ("purelib", "platlib")]
    found = importlib.util.find_spec(name)
    places += [Path(place) for place in (found and found.submodule_search_locations) or ()]
    for place in places:
        if (place / "include").is_dir():
            return place
    raise BuildProblem(f"{name} is not installed. Install it first (pyproject.toml), {CPU_ONLY}")
