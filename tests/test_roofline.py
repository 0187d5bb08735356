"""The roofline: its arithmetic by hand, the traffic that workloads need, and the tool."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_harness import needs_compiler

from ascend_kv.devices import get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate import kernel_workloads as workloads
from ascend_kv.evaluate import twin
from ascend_kv.plan.roofline import floor_seconds, predict, rates_of

ROOT = Path(__file__).resolve().parents[1]
DEVICE = get_device("910B2")  # 48 cores at 1.8 GHz
ZERO = dict.fromkeys(
    ("read_sectors", "write_sectors", "cache_lines", "vector_repeats", "barriers", "events",
     "scalar_instructions", "vector_instructions", "mte2_instructions", "mte3_instructions"), 0,
)  # fmt: skip


def core(**counts: int) -> dict[str, int]:
    return {**ZERO, **counts}


@pytest.mark.parametrize(
    ("cores", "bound", "seconds"),
    [
        # 48 cores read 3.2 MB each: 153.6 MB at 1.6 TB/s
        ([core(read_sectors=100_000)] * 48, "HBM", 96e-6),
        # one core moves 32 bytes a cycle in and 64 out, both at once
        ([core(read_sectors=180_000, write_sectors=100_000)], "one core's MTE", 100e-6),
        ([core(read_sectors=1, write_sectors=360_000)], "one core's MTE", 100e-6),
        ([core(vector_repeats=180_000), core(vector_repeats=9)], "vector", 100e-6),
        ([core(scalar_instructions=90_000, events=45_000, barriers=45_000)], "scalar", 100e-6),
        ([core(vector_repeats=18_000)], "launch", 10e-6),
    ],
)
def test_each_limit_by_hand(cores: list[dict[str, int]], bound: str, seconds: float) -> None:
    found = predict([cores], DEVICE)
    assert found.bound == bound
    assert found.seconds == pytest.approx(20e-6 + seconds)


def test_launches_add_up_and_their_limits_too() -> None:
    vector, scalar = [core(vector_repeats=90_000)], [core(vector_instructions=45_000)]
    found = predict([vector, scalar], DEVICE)
    assert found.seconds == pytest.approx(2 * 20e-6 + 50e-6 + 25e-6)
    assert found.parts["launch"] == pytest.approx(40e-6)
    assert found.parts["vector"] == pytest.approx(50e-6)
    assert found.parts["scalar"] == pytest.approx(25e-6)


def test_balance_counts_idle_cores_and_traffic_counts_cache_lines() -> None:
    even = [core(vector_repeats=100)] * 48
    assert predict([even], DEVICE).balance == pytest.approx(1)
    assert predict([even[:24]], DEVICE).balance == pytest.approx(2)
    uneven = [*even[:47], core(vector_repeats=300)]
    assert predict([uneven], DEVICE).balance == pytest.approx(300 / (5000 / 48))
    assert predict([[core(cache_lines=3, write_sectors=2)]], DEVICE).traffic_bytes == 256


def test_a_device_without_figures_is_refused() -> None:
    for name in ("cpu", "910B4", "950"):
        with pytest.raises(UsageError, match="910B1, 910B2, 910B3"):
            rates_of(get_device(name))
    assert floor_seconds(1_600_000, DEVICE) == pytest.approx(21e-6)


def test_touched_sectors_against_counting_bytes() -> None:
    draw = random.Random(0)
    for _ in range(50):
        width = draw.choice([1, 4, 31, 32, 40, 128])
        starts = [draw.randrange(2000) for _ in range(draw.randrange(1, 9))]
        touched = {byte // 32 for start in starts for byte in range(start, start + width)}
        assert workloads.touched_bytes(torch.tensor(starts), width) == 32 * len(touched)
    assert workloads.touched_bytes(torch.empty(0, dtype=torch.int64), 4) == 0


def test_needed_bytes_by_hand() -> None:
    # 2 tokens in blocks of their own: 2 x 1 KiB of bf16 in a side, 16 bytes of slots are a sector,
    # 4 heads x 128 codes and a sector of scales each out
    store = workloads.store(2, 4, 128, torch.int8, prefill=False)
    assert store.unavoidable_bytes == 2 * 2048 + 32 + 2 * 2 * 4 * (128 + 32)
    # 128 tokens fill a block: its scales are whole sectors
    load = workloads.load([128], 4, 128, torch.int8)
    assert load.unavoidable_bytes == 2 * 4 * 128 * (128 + 4 + 256) + 2 * 32
    assert workloads.quantize(64, 4, 128, "head").unavoidable_bytes == 32768 * 5 + 32
    assert workloads.dequantize(64, 4, 128, "token_head").unavoidable_bytes == 32768 * 3 + 1024
    hca = workloads.compress([256], 128, 512, overlap=False)
    assert hca.unavoidable_bytes == 2 * 256 * 1024 + 129 * 2048 + 2 * (1024 + 256)
    # the first window has no predecessor; one in an earlier call has
    for first, halves in ((0, 3), (7, 4)):
        csa = workloads.compress([8], 4, 512, True, first)
        bias = 4 * 1024 * 4 + 512 * 4
        assert csa.unavoidable_bytes == 2 * halves * 4 * 1024 + bias + 2 * (1024 + 256)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "tools/roofline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_compiler
def test_the_tool_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "roofline.png"
    assert tool().main(["--quick", "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "simulated" in report["label"] and "predicted" in report["label"]
    assert report["device"] == "910B1" and report["vector_cores"] == 48
    assert set(report["rates"]) <= set(report["sources"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = {row["workload"]: row for row in report["rows"]}
    assert {row["operator"] for row in rows.values()} == set(twin.OPERATORS)
    for row in rows.values():
        assert row["traffic_ratio"] >= 1, row
        assert row["predicted_seconds"] >= row["predicted_floor_seconds"], row
        assert row["ub_high_water_bytes"] <= 192 * 1024
        if row["operator"].startswith("kv_cache"):
            assert row["traffic_ratio"] <= 1.05, row
    assert rows["quantize head, 1024"]["predicted_parts_seconds"]["launch"] > 50e-6


@needs_compiler
def test_the_tool_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool().main(["--quick", "--model", "qwen", "--device", "910B3"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen2.5-7B on 910B3 (simulated counters, predicted microseconds)" in shown
    assert "DeepSeek" not in shown and "store int8, prefill 1024" in shown


def test_the_tools_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool().main(["--device", "910B4"]) == 2
    assert "legal: 910B1, 910B2, 910B3" in capsys.readouterr().err
    monkeypatch.setattr(twin, "missing", lambda: "there is no C++ compiler")
    assert tool().main(["--quick"]) == 1
    assert "the CPU twin cannot run: there is no C++ compiler" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        tool().main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown and "simulated" in shown and "Exit codes" in shown
