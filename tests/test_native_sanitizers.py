"""The native CPU operators under the address and undefined-behaviour sanitizers.

The operators are compiled once more, with the sanitizers, and their own tests run again on them in
another process. The narrowest vectors are taken: they compile in a fraction of the time, and rows
that fill no whole vector go the same ways. What only AVX2 has, attention in words, is compiled and
tested besides.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_harness import KERNELS, twin
from torch.utils import cpp_extension

TESTS = Path(__file__).resolve().parent
SOURCES = sorted([KERNELS / "bindings_cpu.cpp", *KERNELS.glob("*/*_cpu.cpp")])
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w", *SANITIZERS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(twin.find_compiler() is None, reason="no C++ compiler (g++ or clang++)"),
]


def find_runtimes() -> str:
    """What has to be loaded before everything else, since Python itself is not sanitized."""
    compiler = twin.find_compiler()
    assert compiler
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        asked = [compiler, f"-print-file-name={name}"]
        paths.append(subprocess.run(asked, capture_output=True, text=True).stdout.strip())
    if not Path(paths[0]).is_absolute():
        pytest.skip(f"{compiler} has no shared runtime of the address sanitizer")
    return " ".join(paths)


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """The library for the narrowest vectors."""
    return build()


@pytest.fixture(scope="module")
def sanitized_words(request: pytest.FixtureRequest) -> Path:
    """The library for AVX2."""
    if "slow" not in request.config.option.markexpr:
        pytest.skip("compiles for minutes more; run it with -m slow")
    features = ("avx2", "fma", "f16c")
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or not set(features) <= set(cpuinfo.read_text().split()):
        pytest.skip("this CPU has no AVX2")
    return build(*(f"-m{feature}" for feature in features))


def build(*more_flags: str) -> Path:
    """The library, built again when a source changed."""
    flags = (*FLAGS, *more_flags)
    digest = hashlib.sha256(" ".join((*flags, *cpp_extension.include_paths())).encode())
    for source in sorted([*SOURCES, *KERNELS.glob("*/cpu_*.h")]):
        digest.update(source.read_bytes())
    folder = twin.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"sanitized-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = twin.find_compiler()
    assert compiler
    includes = [x for path in cpp_extension.include_paths() for x in ("-isystem", path)]
    objects = [folder / f"{target.stem}-{source.stem}.o" for source in SOURCES]
    for source, compiled in zip(SOURCES, objects, strict=True):
        command = [compiler, *flags, *includes, "-c", str(source), "-o", str(compiled)]
        subprocess.run(command, check=True)
    built = target.with_suffix(f".{os.getpid()}.so")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
    link = [compiler, "-shared", *SANITIZERS, *map(str, objects), *libraries, "-o", str(built)]
    subprocess.run(link, check=True)
    for compiled in objects:
        compiled.unlink()
    os.replace(built, target)
    return target


def run_python(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": find_runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "ASCEND_KV_OPERATORS": "reference",
        "SANITIZED_OPERATORS": str(library),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=TESTS
    )


OVERRUN = """
import numpy, under_sanitizers, torch
blocks = numpy.zeros((2, 1, 16, 64), numpy.float32)
longer = numpy.lib.stride_tricks.as_strided(blocks, (3, 1, 16, 64))  # the last is not there
cache, query = torch.from_numpy(longer), torch.zeros(1, 1, 64)
torch.ops.ascend_kv.paged_attention(query, cache, cache, torch.tensor([[2]]), [1], [16], 1.0)
"""


def test_the_sanitizers_are_awake(sanitized: Path) -> None:
    done = run_python(sanitized, "-c", OVERRUN)
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr


@pytest.mark.parametrize("tests", ["ops", "test_native_operators.py", "test_by_block_scales.py"])
def test_operators(sanitized: Path, tests: str) -> None:
    names = [source.parent.name for source in SOURCES if source.parent != KERNELS]
    names += ["attention_offset", "kv_cache_store_static"]
    files = [f"ops/test_{name}.py" for name in names] if tests == "ops" else [tests]
    chosen = {
        "ops": ("-k", "native and not opcheck and not millionth"),
        "test_by_block_scales.py": ("-k", "not reference and not window and not bias"),
    }.get(tests, ())
    done = run_python(
        sanitized, "-m", "pytest", "-q", "-x", "-p", "under_sanitizers", *chosen, *files
    )
    check_passed(done)


def test_attention_in_words(sanitized_words: Path) -> None:
    names = ("paged_attention_int8", "paged_attention", "attention_offset")
    files = [*(f"ops/test_{name}.py" for name in names), "test_by_block_scales.py"]
    arguments = ("-q", "-x", "-p", "under_sanitizers", "-k", "not opcheck and not reference")
    check_passed(run_python(sanitized_words, "-m", "pytest", *arguments, *files))


def check_passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-400:]
