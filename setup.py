"""Build script; what is said about the package is in ``pyproject.toml``.

Here is only what has to be compiled: the CPU operators, where torch and a C++ compiler are found,
and, where CANN's environment is loaded, the NPU kernels (``tools/build_npu.py``). Without them
everything works all the same, on the Python references.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from build_npu import add_npu_kernels, read_module

ROOT = Path(__file__).resolve().parent

CPU_MODULE = "ascend_kv.ops._native_cpu"
CPU_FLAGS = (
    "-O3",
    "-g0",
    "-fopenmp",
    "-ffp-contract=off",  # products and sums round as in the references
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
targets = read_module("build_targets.py")
CPU_LEVELS: dict[str, tuple[str, ...]] = targets.CPU_LEVELS


def say(message: str) -> None:
    """For whoever reads the build's output; pip shows it with -v, or when the build fails."""
    print(f"[ascend_kv] {message}", file=sys.stderr)


def compiles(flags: list[str]) -> bool:
    """Whether the compiler knows the flags. Where there is none, that is seen later."""
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    command = [*shlex.split(compiler), *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return True


def cpu_features() -> tuple[str, ...]:
    """What the library may use: ``ascend_kv.ops.native`` looks for the same before it loads it."""
    try:
        found = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        found = []
    widest = os.environ.get("ASCEND_KV_CPU_LEVEL") or next(iter(CPU_LEVELS))
    if widest not in CPU_LEVELS:
        raise SystemExit(f"ASCEND_KV_CPU_LEVEL is {widest!r}; legal are {', '.join(CPU_LEVELS)}")
    allowed = list(CPU_LEVELS.values())[list(CPU_LEVELS).index(widest) :]
    levels = (level for level in allowed if set(level) <= set(found))
    return next(level for level in levels if not level or compiles(targets.flags_of(level)))


def sources_digest() -> str | None:
    """As ``ascend_kv.ops.native`` computes it; that package is not imported, it needs torch."""
    digest: str | None = read_module("ops/native_sources.py").digest()
    return digest


def without_cpu_operators(reason: str) -> None:
    """Say why, and leave no library of an earlier build behind, which may not fit any more."""
    say(f"no native CPU operators: {reason}")
    library = ROOT.joinpath(*CPU_MODULE.split("."))
    for suffix in (".so", ".json"):
        library.with_suffix(suffix).unlink(missing_ok=True)


def has_torch() -> bool:
    """Whether torch can be imported: the environment's own, which build isolation hides."""
    site = sysconfig.get_path("purelib")
    if site not in sys.path and Path(site, "torch").is_dir():
        sys.path.append(site)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        without_cpu_operators(f"torch cannot be imported ({error})")
        return False
    return True


def cpu_operators() -> dict[str, Any]:
    """The arguments of ``setup`` that build the CPU operators; none where there is no torch.

    Where compiling fails the references serve, unless ``ASCEND_KV_OPERATORS=native`` asks for the
    operators by name.
    """
    if not has_torch():
        return {}
    import torch
    from torch.utils import cpp_extension

    features = cpu_features()
    # where pip puts ninja, which compiles on all cores; without it setuptools compiles on one
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")

    class BuildOperators(cpp_extension.BuildExtension):
        """Compiles, and writes beside the library what it was compiled for."""

        def build_extensions(self) -> None:
            self.force = True  # what lies there may have been compiled for another CPU
            try:
                super().build_extensions()
            except Exception as error:
                if os.environ.get("ASCEND_KV_OPERATORS") == "native":
                    raise
                without_cpu_operators(f"they do not compile here ({error})")
                self.extensions = []
                return
            made_for = {
                "torch": torch.__version__,
                "cpu_features": features,
                "sources": sources_digest(),
            }
            library = Path(self.get_ext_fullpath(CPU_MODULE))
            library.with_suffix(".json").write_text(json.dumps(made_for))

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            for ext in self.extensions:
                target, source = self._get_inplace_equivalent(
                    self.get_finalized_command("build_py"), ext
                )
                self.copy_file(*(str(Path(x).with_suffix(".json")) for x in (source, target)))

    sources = ["op_kernels/bindings_cpu.cpp"]
    sources += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("op_kernels/*/*_cpu.cpp"))]
    extension = Extension(
        CPU_MODULE,
        sources,
        depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("op_kernels/**/*.h")],
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch_cpu"],
        extra_compile_args=[*CPU_FLAGS, *targets.flags_of(features)],
        language="c++",
    )
    command = BuildOperators.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": command}}


setup(**add_npu_kernels(cpu_operators()))
