"""The device below the operators, with a torch_npu made up where one is needed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ascend_kv import ops
from ascend_kv.devices import get_device
from ascend_kv.errors import RunError, UsageError
from ascend_kv.ops import native, platform, registration

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


@pytest.mark.parametrize(
    ("reported", "known"), [("Ascend910B3", "910B3"), ("Ascend950PR_9589", "950PR")]
)
def test_an_npu_is_found_named_and_measured(
    reported: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    fake_npu(
        monkeypatch,
        is_available=lambda: True,
        get_device_name=lambda: reported,
        mem_get_info=lambda: (30, 64),
        memory_reserved=lambda: 9,
        memory_allocated=lambda: 5,
        synchronize=lambda: waited.append(True),
    )
    assert platform.find_device() == "npu"
    platform.check_device("npu")
    assert platform.device_name("npu") == get_device(known).name == known
    assert (platform.free_memory_bytes("npu"), platform.total_memory_bytes("npu")) == (34, 64)
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
    ("limit", "used", "files", "expected"),
    [
        (None, None, None, (4096 * 1024, 8192 * 1024)),
        ("max", "5", None, (4096 * 1024, 8192 * 1024)),
        (str(2**22), "1048576", None, (2**22 - 2**20, 2**22)),
        (str(2**22), "1048576", 2**18, (2**22 - 2**20 + 2**18, 2**22)),
        (str(2**22), str(2**22), 2**21, (2**21, 2**22)),
        (str(7 * 2**20), "1048576", 0, (2**22, 7 * 2**20)),
        (str(2**20), str(2**21), 2**10, (0, 2**20)),
    ],
)
def test_memory_of_a_container(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str | None,
    used: str | None,
    files: int | None,
    expected: tuple[int, int],
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\n")
    monkeypatch.setattr(platform, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    for name, content in (("memory.max", limit), ("memory.current", used)):
        if content is not None:
            (tmp_path / name).write_text(content)
    if files is not None:
        stat = f"anon 7\nfile {2 * files}\ninactive_anon 5\ninactive_file {files}\nactive_file 9\n"
        (tmp_path / "memory.stat").write_text(stat)
    assert (platform.free_memory_bytes("cpu"), platform.total_memory_bytes("cpu")) == expected


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = platform._machine_memory_bytes()[1]
    monkeypatch.setattr(platform, "_MEMINFO", tmp_path / "none")
    free, total = platform._machine_memory_bytes()
    assert free == total
    assert abs(total - expected) < 0.1 * expected


def test_every_operator_has_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_handed_over", Counter())
    built = native.find_problem(native.LIBRARY) is None
    expected = dict.fromkeys(ops.__all__, "reference")
    expected |= dict.fromkeys(NATIVE if built else (), "native")
    assert platform.implementations("cpu") == expected
    assert platform.implementations() == platform.implementations(platform.find_device())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for a library of NPU kernels, there or not; returns what is loaded."""
    loaded: list[str] = []
    find_spec = importlib.util.find_spec

    def make(origin: str | None) -> list[str]:
        def find(name: str, *others: Any) -> Any:
            if name == "ascend_kv.ops._npu":
                return origin and SimpleNamespace(origin=origin)
            return find_spec(name, *others)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(torch.ops, "load_library", loaded.append)
        return loaded

    monkeypatch.delenv("ASCEND_KV_OPERATORS", raising=False)
    return make


def test_kernels_are_loaded_where_they_are_built(
    monkeypatch: pytest.MonkeyPatch, built: Any
) -> None:
    loaded = built("/built/_npu.so")
    platform.register_npu_operators()
    assert loaded == []  # no torch_npu here
    fake_npu(monkeypatch, is_available=lambda: True)
    assert not platform.register_npu_operators()  # it has no fused attention
    assert loaded == ["/built/_npu.so"]
    monkeypatch.setenv("ASCEND_KV_OPERATORS", "reference")
    platform.register_npu_operators()
    assert len(loaded) == 1


def test_kernels_that_do_not_load_are_not_ignored(
    monkeypatch: pytest.MonkeyPatch, built: Any
) -> None:
    built("/built/_npu.so")
    fake_npu(monkeypatch)

    def fail(path: str) -> None:
        raise OSError(path) from OSError("libascendcl.so: no such file")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.raises(RunError, match=r"/built/_npu.so do not load \(libascendcl.so"):
        platform.register_npu_operators()


def test_kernels_asked_for_by_name_and_not_built(
    monkeypatch: pytest.MonkeyPatch, built: Any
) -> None:
    loaded = built(None)
    monkeypatch.setenv("ASCEND_KV_OPERATORS", "native")
    platform.register_npu_operators()  # says nothing without torch_npu
    fake_npu(monkeypatch)
    with pytest.raises(RunError, match="ASCEND_KV_OPERATORS=native, but .* not built .*pip inst"):
        platform.register_npu_operators()
    assert loaded == []


def test_missing_kernels_are_said_once(
    monkeypatch: pytest.MonkeyPatch, built: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built(None)
    fake_npu(monkeypatch, is_available=lambda: True)
    platform._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert platform.find_device() == platform.find_device() == "npu"
    assert len(caplog.records) == 1
    assert "kernels are not built" in caplog.text and "references serve" in caplog.text
    platform._say_once.cache_clear()
    caplog.clear()
    monkeypatch.setenv("ASCEND_KV_OPERATORS", "reference")
    assert platform.find_device() == "npu" and not caplog.records


def test_calls_handed_over_to_the_reference_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_handed_over", Counter())
    monkeypatch.setattr(platform, "has_kernel", lambda name, device: name == "kv_cache_load")
    tell = torch.ops.ascend_kv_reference.handed_over
    assert platform.implementations("npu")["kv_cache_load"] == "native"
    with caplog.at_level(logging.WARNING):
        for reason in ("odd sizes", "odd sizes", "no scales"):
            tell("kv_cache_load", "npu", reason)
    assert [record.message for record in caplog.records] == [
        f"kv_cache_load: the reference serves, no kernel on npu does: {reason}"
        for reason in ("odd sizes", "no scales")
    ]
    told = platform.implementations("npu")
    assert told["kv_cache_load"] == "native; reference for odd sizes (2 calls), no scales (1 calls)"
    assert told["kv_cache_store"] == "reference"
    assert platform.implementations("cpu")["kv_cache_load"] == "native"
