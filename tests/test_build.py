"""What setup.py makes of the CPU operators, on a copy with one small file in their place."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_harness import twin

from ascend_kv.build_targets import CPU_LEVELS, flags_of
from ascend_kv.ops import native_sources

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "ascend_kv/ops/_native_cpu"
# As much of a CPU operator as shows that it was compiled for this machine and loaded.
SOURCE = """
#include <c10/macros/Macros.h>
extern "C" C10_EXPORT int answer() { return 42; }
extern "C" C10_EXPORT void add(float* x) { for (int i = 0; i < 64; ++i) x[i] += 1; }
"""
STEERING = ("ASCEND_KV_OPERATORS", "ASCEND_KV_CPU_LEVEL")
NOWHERE = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.mark.skipif(twin.find_compiler() is None, reason="no C++ compiler (g++ or clang++)")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are levels of x86")
@pytest.mark.parametrize("level", CPU_LEVELS)
def test_the_vector_code_of_every_level_compiles(level: str) -> None:
    """Also of CPUs that have more than this one: its syntax and types at least."""
    flags = flags_of(CPU_LEVELS[level])
    command = [str(twin.find_compiler()), "-std=c++20", "-fsyntax-only", "-Wno-psabi", *flags]
    nothing = ["-x", "c++", os.devnull]
    if subprocess.run([*command, *nothing], capture_output=True).returncode:
        pytest.skip(f"the compiler does not know {flags}")
    for header in ("paged_attention/cpu_item.h", "common/cpu_quantized.h"):
        done = subprocess.run(
            [*command, "-x", "c++", str(ROOT / "op_kernels" / header)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    scripts = ("setup.py", "tools/build_npu.py", "pyproject.toml")
    package = tuple(
        f"ascend_kv/{name}.py" for name in ("__init__", "build_targets", "ops/native_sources")
    )
    for name in (*scripts, "README.md", "LICENSE", *package):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("ascend_kv/ops/__init__.py", "op_kernels/bindings_cpu.cpp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SOURCE if name.endswith("cpp") else "")
    return tmp_path


def build(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={k: v for k, v in os.environ.items() if k not in STEERING} | variables,
    )


def files(checkout: Path) -> list[str]:
    return sorted(path.name for path in (checkout / "ascend_kv/ops").glob("_native*"))


@pytest.mark.skipif(twin.find_compiler() is None, reason="no C++ compiler (g++ or clang++)")
def test_the_library_lies_beside_what_it_was_made_for(checkout: Path) -> None:
    done = build(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(checkout) == ["_native_cpu.json", "_native_cpu.so"]
    made_for = json.loads((checkout / f"{LIBRARY}.json").read_text())
    assert made_for["torch"] == torch.__version__
    assert made_for["sources"] == native_sources.digest(checkout / "op_kernels")
    assert set(made_for["cpu_features"]) <= set(Path("/proc/cpuinfo").read_text().split())
    load = f"import ctypes, torch; print(ctypes.CDLL('{LIBRARY}.so').answer())"
    done = subprocess.run(
        [sys.executable, "-c", load], capture_output=True, text=True, cwd=checkout
    )
    assert done.stdout == "42\n", done.stderr


@pytest.mark.skipif(twin.find_compiler() is None, reason="no C++ compiler (g++ or clang++)")
def test_what_an_old_compiler_does_not_know_is_not_asked_of_it(
    checkout: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "old_compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx*|*-mavx512*) exit 1;; esac\n'
        f'exec {twin.find_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    done = build(checkout, CXX=str(compiler), CC=str(compiler))
    assert done.returncode == 0, done.stdout + done.stderr
    made_for = json.loads((checkout / f"{LIBRARY}.json").read_text())
    assert not [name for name in made_for["cpu_features"] if name.startswith(("amx", "avx512"))]


@pytest.mark.skipif(twin.find_compiler() is None, reason="no C++ compiler (g++ or clang++)")
@pytest.mark.parametrize("level, allowed", [("avx2", {"avx2", "fma", "f16c"}), ("baseline", set())])
def test_a_library_for_lesser_cpus(checkout: Path, level: str, allowed: set[str]) -> None:
    done = build(checkout, ASCEND_KV_CPU_LEVEL=level)
    assert done.returncode == 0, done.stdout + done.stderr
    made_for = json.loads((checkout / f"{LIBRARY}.json").read_text())
    here = set(Path("/proc/cpuinfo").read_text().split())
    assert set(made_for["cpu_features"]) == (allowed if allowed <= here else set())
    # a later build for this CPU does not take what was compiled for the lesser one
    before = (checkout / f"{LIBRARY}.so").read_bytes()
    assert build(checkout).returncode == 0
    same = json.loads((checkout / f"{LIBRARY}.json").read_text()) == made_for
    assert ((checkout / f"{LIBRARY}.so").read_bytes() == before) == same


def test_an_unknown_level_is_refused_and_nothing_is_lost(checkout: Path) -> None:
    (checkout / f"{LIBRARY}.so").write_text("of an earlier build")
    done = build(checkout, ASCEND_KV_CPU_LEVEL="sse9")
    assert done.returncode != 0
    assert "ASCEND_KV_CPU_LEVEL is 'sse9'" in done.stderr
    assert "amx, avx512, avx2, baseline" in done.stderr
    assert files(checkout) == ["_native_cpu.so"]


def test_without_a_compiler_the_references_serve_and_nothing_old_stays(checkout: Path) -> None:
    for suffix in ("so", "json"):
        (checkout / f"{LIBRARY}.{suffix}").write_text("of an earlier build")
    done = build(checkout, **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert "no native CPU operators: they do not compile here" in done.stderr
    assert files(checkout) == []


def test_operators_asked_for_by_name_must_compile(checkout: Path) -> None:
    assert build(checkout, ASCEND_KV_OPERATORS="native", **NOWHERE).returncode != 0


def test_without_torch_the_references_serve(checkout: Path) -> None:
    (checkout / "torch.py").write_text("raise ImportError('torch is hidden')")
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    assert "torch cannot be imported (torch is hidden)" in done.stderr
    assert files(checkout) == []
