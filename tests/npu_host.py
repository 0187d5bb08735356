"""Builds the NPU's host functions and bindings where there is no NPU.

The launch headers, which CANN generates, are generated here from the kernels' entry signatures, as
CANN's ``ascendc_library`` does: addresses as ``void *``, a struct as a pointer to it. With them

* ``type_check`` compiles everything against the headers of the official torch_npu wheel;
* ``build_on_twin`` makes a library whose launches run the kernels on the CPU twin, so that the
  operators can be called with CPU tensors (as if these were the NPU's) from end to end.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from kernel_harness import KERNELS, kernels, twin

TESTS = Path(__file__).resolve().parent
STAND_INS = TESTS / "npu_headers"
TORCH_NPU = "torch_npu==2.13.0"  # as in pyproject.toml
ENTRY = re.compile(r'extern "C" __global__ __aicore__ void (\w+)\(([^)]*)\)')


class Entry(NamedTuple):
    """A kernel's entry."""

    source: Path
    name: str
    addresses: tuple[str, ...]
    struct: str
    struct_name: str

    def declaration(self) -> str:
        parameters = ["uint32_t numBlocks", "aclrtStream stream"]
        parameters += [f"void *{address}" for address in self.addresses]
        parameters.append(f"{self.struct} *{self.struct_name}")
        return f'extern "C" uint32_t aclrtlaunch_{self.name}({", ".join(parameters)})'


def entries() -> list[Entry]:
    """Every kernel; addresses come first and a struct, by its bare name, last."""
    found = []
    for source in sorted(KERNELS.glob("*/*_kernel.cpp")):
        for name, parameters in ENTRY.findall(source.read_text()):
            *addresses, struct = (parameter.split() for parameter in parameters.split(","))
            assert all(kind == "GM_ADDR" for kind, _ in addresses), name
            assert re.fullmatch(r"[A-Z]\w+", struct[0]), f"{name}: {struct[0]} as CANN finds it"
            found.append(Entry(source, name, tuple(n for _, n in addresses), *struct))
    return found


def write_headers(folder: Path) -> None:
    """``aclrtlaunch_<kernel>.h`` of each kernel."""
    for entry in entries():
        text = f'#pragma once\n#include "acl/acl_base.h"\n{entry.declaration()};\n'
        (folder / f"aclrtlaunch_{entry.name}.h").write_text(text)


def host_sources() -> list[Path]:
    """The bindings and every host function."""
    return [KERNELS / "bindings_npu.cpp", *sorted(KERNELS.glob("*/*_host.cpp"))]


def _unit(folder: Path, *, on_twin: bool) -> Path:
    """All sources as one, since reading torch's headers is what takes the time."""
    lines = [f'#include "{source}"' for source in host_sources()]
    if on_twin:
        lines.append('#include "on_twin.h"')
        for entry in entries():
            library = kernels_of(entry.source).path
            arguments = [*entry.addresses, entry.struct_name]
            words = ", ".join(f"reinterpret_cast<uint64_t>({name})" for name in arguments)
            call = f'"{library}", "{entry.name}", numBlocks, {{{words}}}, {len(entry.addresses)}'
            lines.append(f"{entry.declaration()} {{ (void)stream; return on_twin::Run({call}); }}")
    unit = folder / "unit.cpp"
    unit.write_text("\n".join(lines) + "\n")
    return unit


def kernels_of(source: Path) -> twin.Library:
    """The kernels of a source on the twin."""
    operator = source.stem.removesuffix("_kernel")
    return kernels(operator) if operator == source.parent.name else twin.build(source)


def _flags(*include: Path) -> list[str]:
    home = Path(torch.__file__).parent / "include"
    folders = [*include, home, home / "torch" / "csrc" / "api" / "include"]
    abi = int(torch.compiled_with_cxx11_abi())
    warnings = ["-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{folder}" for folder in include]
    includes += [part for folder in folders[len(include) :] for part in ("-isystem", str(folder))]
    return ["-std=c++17", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *warnings, *includes]


def _compile(arguments: list[str]) -> None:
    command = ["nice", "-n", "15", str(twin.find_compiler()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr[:6000])


def _digest() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    ours = [*STAND_INS.rglob("*.h"), Path(__file__), KERNELS / "bindings_npu.cpp"]
    for path in sorted([*ours, *KERNELS.glob("*/*.h"), *KERNELS.glob("*/*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build_on_twin() -> Path:
    """The library that registers the operators for PrivateUse1; built when something changed."""
    folder = twin.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"npu_host-{_digest()}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        here = Path(scratch)
        write_headers(here)
        include = [here, STAND_INS / "cpu", STAND_INS / "cann", KERNELS / "twin"]
        built = here / "host.so"
        unit = str(_unit(here, on_twin=True))
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ldl"]
        _compile([*_flags(*include), "-O0", "-fPIC", "-shared", unit, "-o", str(built), *libraries])
        os.replace(built, target)
    return target


def torch_npu_headers() -> Path:
    """The headers of the official wheel: fetched once, unpacked, never installed.

    Raises:
        OSError: the package index gives none.
    """
    folder = twin.cache_folder().parent / "torch_npu" / TORCH_NPU.partition("==")[2]
    if (folder / "complete").exists():
        return folder / "torch_npu" / "include"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command = [*pip, "-d", scratch, TORCH_NPU]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise OSError(f"{TORCH_NPU} cannot be downloaded: {done.stderr[-300:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            headers = [name for name in wheel.namelist() if name.startswith("torch_npu/include/")]
            wheel.extractall(folder, headers)
    (folder / "complete").touch()
    return folder / "torch_npu" / "include"


def type_check(torch_npu: Path, folder: Path) -> None:
    """Compile bindings and host functions without making code; raises AssertionError.

    What passed once is not compiled again until something changes.
    """
    passed = twin.cache_folder() / f"npu_types-{_digest()}"
    if passed.exists():
        return
    write_headers(folder)
    foreign = [torch_npu, torch_npu / "third_party" / "acl" / "inc"]
    flags = _flags(folder, STAND_INS / "cann")
    flags += [part for place in foreign for part in ("-isystem", str(place))]
    _compile([*flags, "-fsyntax-only", str(_unit(folder, on_twin=False))])
    passed.touch()
