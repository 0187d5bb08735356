"""The device below the operators, with a torch_npu made up where one is needed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ascend_kv import ops
from ascend_kv.devices import get_device
from ascend_kv.errors import RunError, UsageError
from ascend_kv.ops import native, platform

KERNELS = Path(__file__).resolve().parents[2] / "op_kernels"
NATIVE = [path.stem.removesuffix("_cpu") for path in KERNELS.glob("*/*_cpu.cpp")]


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a package of that name, with this source, before all others."""

    def install(source: str) -> None:
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)

    yield install
    sys.modules.pop("torch_npu", None)


def fake_npu(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    module = ModuleType("torch_npu")
    module.npu = SimpleNamespace(**functions)  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", module)


def test_without_torch_npu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert platform.find_device() == "cpu"


@pytest.mark.parametrize("failure", ["raise ImportError('libhccl.so')", "raise OSError('no acl')"])
def test_a_broken_torch_npu_is_never_ignored(torch_npu: Any, failure: str) -> None:
    torch_npu(failure)
    with pytest.raises(RunError, match=r"torch_npu is installed but does not load.*(libhccl|acl)"):
        platform.find_device()


def test_torch_npu_without_an_npu_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_npu(monkeypatch, is_available=lambda: False)
    platform._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert platform.find_device() == "cpu"
        assert platform.find_device() == "cpu"
    assert [record.message for record in caplog.records] == [
        "torch_npu is installed but finds no NPU: using the CPU"
    ]


def test_an_npu_is_found_named_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    fake_npu(
        monkeypatch,
        is_available=lambda: True,
        get_device_name=lambda: "Ascend910B3",
        mem_get_info=lambda: (30, 64),
        synchronize=lambda: waited.append(True),
    )
    assert platform.find_device() == "npu"
    platform.check_device("npu")
    assert platform.device_name("npu") == get_device("910B3").name == "910B3"
    assert (platform.free_memory_bytes("npu"), platform.total_memory_bytes("npu")) == (30, 64)
    platform.synchronize("npu")
    assert waited == [True]


def test_devices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    platform.check_device("cpu")
    with pytest.raises(UsageError, match="npu, cpu, auto"):
        platform.check_device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no NPU here"):
        platform.check_device("npu")


def test_the_cpu_has_a_name_and_nothing_to_wait_for() -> None:
    assert get_device(platform.device_name("cpu")).name == "cpu"
    platform.synchronize("cpu")


def test_memory_of_this_machine() -> None:
    free, total = platform.free_memory_bytes("cpu"), platform.total_memory_bytes("cpu")
    assert 2**24 < free <= total < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, (4096 * 1024, 8192 * 1024)),
        ("max", "5", (4096 * 1024, 8192 * 1024)),
        (str(2**22), "1048576", (2**22 - 2**20, 2**22)),
        (str(7 * 2**20), "1048576", (2**22, 7 * 2**20)),
        (str(2**20), str(2**21), (0, 2**20)),
    ],
)
def test_memory_of_a_container(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str | None,
    used: str | None,
    expected: tuple[int, int],
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\n")
    monkeypatch.setattr(platform, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    for name, content in (("memory.max", limit), ("memory.current", used)):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert (platform.free_memory_bytes("cpu"), platform.total_memory_bytes("cpu")) == expected


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = platform._machine_memory_bytes()[1]
    monkeypatch.setattr(platform, "_MEMINFO", tmp_path / "none")
    free, total = platform._machine_memory_bytes()
    assert free == total
    assert abs(total - expected) < 0.1 * expected


def test_every_operator_has_an_implementation() -> None:
    built = native.find_problem(native.LIBRARY) is None
    expected = dict.fromkeys(ops.__all__, "reference")
    expected |= dict.fromkeys(NATIVE if built else (), "native")
    assert platform.implementations("cpu") == expected
    assert platform.implementations() == platform.implementations(platform.find_device())
