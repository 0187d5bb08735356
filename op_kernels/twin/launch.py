"""Builds kernels against the twin and runs them on numpy arrays or torch CPU tensors.

    library = build("op_kernels/kv_cache_store/kv_cache_store_kernel.cpp")
    result = library.launch("kv_cache_store", 24, inp(key), out(cache), tiling_bytes, 7, seed=3)
    result.total["write_sectors"], result.cores[5]["vector_instructions"]

Arguments come in the order of the kernel's parameters: `inp(array)` may be read, `out(array)` also
written, `None` is a null pointer, bytes are a read-only buffer (a tiling struct by address, or by
value where the parameter is a struct), int and float are themselves. A broken rule raises
`Violation` with file, line and rule.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+__aicore__\s+void\s+(\w+)\s*\(')
ALIGNMENT = 512  # what the device's allocator gives


class Violation(RuntimeError):
    """A kernel broke a rule of the device; the run stopped there."""

    def __init__(self, kernel: str, found: dict[str, Any]) -> None:
        self.rule: str = found["rule"]
        self.message: str = found["message"]
        self.file: str = found["file"]
        self.line: int = found["line"]
        self.core: int = found["core"]
        super().__init__(
            f"{self.file}:{self.line}: [{self.rule}] {self.message} ({kernel}, core {self.core})"
        )


class BuildError(RuntimeError):
    """The kernel does not compile against the twin; the message is the compiler's."""


@dataclass(frozen=True)
class Result:
    """Counters of a run: of each core, and summed (ub_high_water: the largest)."""

    cores: list[dict[str, int]]
    order: list[int]
    total: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        names = self.cores[0].keys()
        total = {n: sum(core[n] for core in self.cores) for n in names}
        total["ub_high_water"] = max(core["ub_high_water"] for core in self.cores)
        object.__setattr__(self, "total", total)

    @property
    def mean_read_burst(self) -> float:
        """Bytes of a contiguous piece read from global memory, on average."""
        return self.total["read_bytes"] / max(self.total["read_bursts"], 1)

    @property
    def mean_write_burst(self) -> float:
        return self.total["write_bytes"] / max(self.total["write_bursts"], 1)


@dataclass(frozen=True)
class Buffer:
    """An array in global memory."""

    array: Any
    writable: bool


def inp(array: Any) -> Buffer:
    """An argument that the kernel only reads."""
    return Buffer(array, False)


def out(array: Any) -> Buffer:
    """An argument that the kernel may read and write."""
    return Buffer(array, True)


class _TwinBuffer(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
    ]


def _memory(array: Any) -> tuple[int, int]:
    """Address and bytes of a contiguous torch tensor or numpy array."""
    if hasattr(array, "data_ptr"):
        if not array.is_contiguous():
            raise ValueError("a kernel argument must be contiguous")
        return array.data_ptr(), array.numel() * array.element_size()
    if not array.flags["C_CONTIGUOUS"]:
        raise ValueError("a kernel argument must be contiguous")
    return array.ctypes.data, array.nbytes


class _Arguments:
    """Words and buffers of a launch. Memory off the device's alignment is copied there and back."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.buffers: list[_TwinBuffer] = []
        self._keep: list[Any] = []
        self._back: list[tuple[int, int, int]] = []

    def add(self, value: Any, kind: str) -> None:
        if value is None and kind == "p":
            self.words.append(0)
        elif isinstance(value, Buffer) and kind == "p":
            self._buffer(*_memory(value.array), value.writable)
            self._keep.append(value)
        elif isinstance(value, (bytes, bytearray)) and kind in "ps":
            block = ctypes.create_string_buffer(bytes(value), len(value))
            self._keep.append(block)
            if kind == "p":
                self._buffer(ctypes.addressof(block), len(value), False)
            else:
                self.words.append(ctypes.addressof(block))
        elif isinstance(value, float) and kind == "f":
            self.words.append(ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value)
        elif isinstance(value, int) and kind == "i":
            self.words.append(value & (2**64 - 1))
        else:
            raise TypeError(f"argument {len(self.words)} of kind {kind!r} cannot be {value!r}")

    def _buffer(self, address: int, size: int, writable: bool) -> None:
        if address % 64:  # torch aligns storages to 64 bytes, numpy to 16
            block = ctypes.create_string_buffer(size + ALIGNMENT)
            self._keep.append(block)
            start = ctypes.addressof(block)
            start += -start % ALIGNMENT
            ctypes.memmove(start, address, size)
            if writable:
                self._back.append((address, start, size))
            address = start
        self.buffers.append(_TwinBuffer(address, max(size, 1) if size else 0, writable))
        self.words.append(address)

    def finish(self) -> None:
        for to, start, size in self._back:
            ctypes.memmove(to, start, size)


class Library:
    """Kernels compiled against the twin, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.twin_launch.restype = ctypes.c_char_p
        self._library.twin_kernels.restype = ctypes.c_char_p
        self.kernels: dict[str, str] = json.loads(self._library.twin_kernels())

    def launch(
        self, kernel: str, blocks: int, *arguments: Any, seed: int = 0, auto_sync: bool = False
    ) -> Result:
        """Runs `kernel` on `blocks` cores in an order drawn from `seed`.

        auto_sync: the compiler option that inserts barriers within the vector pipe; off is
        stricter.
        Raises Violation, TypeError for arguments that do not fit.
        """
        if kernel not in self.kernels:
            raise ValueError(f"kernel: {kernel!r} is not one of {sorted(self.kernels)}")
        kinds = self.kernels[kernel]
        if len(kinds) != len(arguments):
            raise TypeError(f"{kernel} takes {len(kinds)} arguments, given {len(arguments)}")
        packed = _Arguments()
        for value, kind in zip(arguments, kinds):
            packed.add(value, kind)
        buffers = (_TwinBuffer * len(packed.buffers))(*packed.buffers)
        words = (ctypes.c_uint64 * len(packed.words))(*packed.words)
        text = self._library.twin_launch(
            kernel.encode(),
            blocks,
            buffers,
            len(buffers),
            words,
            len(words),
            ctypes.c_uint64(seed),
            int(auto_sync),
        )
        packed.finish()
        found = json.loads(text)
        if "error" in found:
            raise ValueError(found["error"])
        if found["violation"]:
            raise Violation(kernel, found["violation"])
        return Result(found["cores"], found["order"])


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or clang++; None without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def cache_folder() -> Path:
    """Where built libraries are kept: $ASCEND_KV_TWIN_CACHE, else below the user's cache folder."""
    given = os.environ.get("ASCEND_KV_TWIN_CACHE")
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "ascend_kv" / "twin"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def digest_files(paths: Sequence[Path], extra: str) -> str:
    """A name for what would be built from these files and `extra`."""
    digest = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _replace(built: Path, target: Path) -> Path:
    os.replace(built, target)  # two processes may build the same thing
    return target


def build_runtime(compiler: str) -> Path:
    """The twin's own part, compiled once for all kernels."""
    parts = sorted(path for path in HERE.glob("*.cpp") if path.stem != "entry")
    flags = ["-std=c++17", "-O2", "-fPIC", "-I", str(HERE), "-c"]
    digest = digest_files(
        [*HERE.glob("*.h"), *parts], " ".join([compiler, *flags, *map(str, parts)])
    )
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"runtime-{digest}.o"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [f"{scratch}/{part.stem}.o" for part in parts]
        commands = [[compiler, *flags, str(a), "-o", b] for a, b in zip(parts, objects)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_run, commands))
        _run(["ld", "-r", "-o", f"{scratch}/all.o", *objects])
        return _replace(Path(scratch) / "all.o", target)


def build(
    source: str | Path,
    *,
    kernels: Sequence[str] | None = None,
    include: Sequence[str | Path] = (),
    flags: Sequence[str] = (),
) -> Library:
    """Compiles a kernel source, unchanged, and loads it.

    Built again only when something that it includes changed.
    kernels: their names, where they are not all written as
    `extern "C" __global__ __aicore__ void name(`.
    Raises BuildError with the compiler's message, RuntimeError without a compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or set CXX")
    source = Path(source).resolve()
    runtime = build_runtime(compiler)
    kernels = KERNEL.findall(source.read_text()) if kernels is None else kernels
    options = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-I", str(HERE)]
    for folder in (source.parent, *include):
        options += ["-I", str(folder)]
    options += [*flags, f'-DTWIN_SOURCE="{source}"']
    options.append("-DTWIN_KERNELS=" + " ".join(f"TWIN_KERNEL({name})" for name in kernels))
    command = [*options, "-x", "c++", str(HERE / "entry.cpp"), "-x", "none"]
    headers = _headers(command)
    digest = digest_files(headers, " ".join(command) + runtime.name)
    target = cache_folder() / f"{source.stem}-{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            _run([*command, str(runtime), "-o", f"{scratch}/kernel.so"])
            _replace(Path(scratch) / "kernel.so", target)
    return Library(target)


def _headers(command: Sequence[str]) -> list[Path]:
    """Every file that the compilation reads, system headers aside."""
    done = subprocess.run([*command, "-MM", "-MG"], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr)
    names = done.stdout.replace("\\\n", " ").split(":", 1)[1].split()
    return [Path(name) for name in names if Path(name).exists()]
