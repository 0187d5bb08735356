"""The NPU's host functions: end to end on the twin, and typed against torch_npu's headers.

Nothing here runs on an NPU: kernels run on the twin, launches and streams are stood in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import npu_host
import pytest
import torch
from kernel_harness import KERNELS, needs_compiler, poisoned, twin

pytestmark = needs_compiler
ROOT = KERNELS.parent


def test_operators_on_the_twin() -> None:
    """All of ``npu_checks_*.py``: values, refusals by name, cases for the reference."""
    library = npu_host.build_on_twin()
    command = [sys.executable, str(ROOT / "tests" / "npu_run.py"), str(library)]
    environ = {**os.environ, "ASCEND_KV_OPERATORS": "reference"}  # what to compare with
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    checks = [
        name
        for path in (ROOT / "tests").glob("npu_checks_*.py")
        for name in re.findall(r"^def (check_\w+)", path.read_text(), re.M)
    ]
    assert len(checks) > 10
    assert sorted(done.stdout.splitlines()) == sorted(f"{name} passed" for name in checks)


@pytest.mark.network
def test_types_against_torch_npu(tmp_path: Path) -> None:
    try:
        headers = npu_host.torch_npu_headers()
    except OSError as problem:
        pytest.skip(str(problem))
    npu_host.type_check(headers, tmp_path)


def test_wheel_is_the_one_that_is_installed_on_an_npu() -> None:
    assert f'"{npu_host.TORCH_NPU}"' in (ROOT / "pyproject.toml").read_text()


def test_every_kernel_is_launched() -> None:
    """By its own generated function, under its own name."""
    sources = "\n".join(path.read_text() for path in npu_host.host_sources())
    launched = re.findall(r'Launch\("(\w+)", aclrtlaunch_(\w+),', sources)
    assert all(name == function for name, function in launched)
    assert {name for name, _ in launched} == {entry.name for entry in npu_host.entries()}


def test_no_host_function_waits() -> None:
    """What would wait for the device, or read its memory, has no place in a captured graph."""
    waiting = re.compile(r"synchronize|\.item\(|\.item<|\.cpu\(|to\(at::kCPU|nonzero|aclrtMemcpy")
    for path in (*npu_host.host_sources(), *KERNELS.glob("host/*.h")):
        assert not waiting.search(path.read_text()), path.name


def test_a_source_has_one_kernel_type() -> None:
    """CANN takes the first that a source names for all its kernels."""
    for source in KERNELS.glob("*/*_kernel.cpp"):
        kinds = re.findall(r"KERNEL_TASK_TYPE_DEFAULT\((\w+)\)", source.read_text())
        entries = [entry for entry in npu_host.entries() if entry.source == source]
        assert entries and len(kinds) == len(entries) and len(set(kinds)) == 1, source.name


def test_tiling_structs_are_plain() -> None:
    """CANN copies them to a place where nothing else of the source is known."""
    structs = {entry.struct for entry in npu_host.entries()}
    found = {}
    for header in KERNELS.glob("*/*.h"):
        text = re.sub(r"//.*", "", header.read_text())
        found.update(re.findall(r"^struct (\w+) \{\n(.*?)\n\};", text, re.M | re.S))
        for name in structs & set(re.findall(r"^struct (\w+) \{", text, re.M)):
            assert f"using ascend_kv::{name};" in text
    for name in structs:
        for field in filter(str.strip, found[name].split("\n")):
            assert re.fullmatch(r"    (int32_t|int64_t|float) \w+(\[\d+\])?;\s*", field), field


def test_host_list() -> None:
    """Numbers that a launch carries, from one to as many as it can."""
    library = twin.build(KERNELS / "host" / "host_list_kernel.cpp")
    for count in (1, 7, 8, 100, 127):
        numbers = torch.arange(128, dtype=torch.int32) - 60
        struct = torch.cat([torch.tensor([count], dtype=torch.int32), numbers[:127]])
        target = poisoned((127,), torch.int32)
        library.launch("host_list", 1, twin.out(target[:count]), struct.numpy().tobytes())
        assert torch.equal(target[:count], numbers[:count])
        assert (target[count:] == 85).all()
