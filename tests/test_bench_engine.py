"""The bench of the engine's own time: what it prints, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_engine", ROOT / "tools/bench_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "POOL_SIZES", (4, 100))
    return module


@pytest.mark.parametrize("steps", [1, 3])
def test_as_many_steps_as_were_asked_for(
    bench: ModuleType, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch", "1", "4", "--context", "32", "--vocab", "100", "--steps", str(steps)]
    assert bench.main([*sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in report["engine"]] == [1, 4, 1, 4]
    for row in report["engine"]:
        assert row["steps"] == steps and row["median_ms"] > 0
    assert [row["num_blocks"] for row in report["pool"]] == [4, 100]
    assert bench.main(sizes) == 0
    assert "Block pool" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--batch", "--context", "--vocab", "--steps"])
def test_mistakes_name_the_flag(
    bench: ModuleType, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("0", "-1"):
        assert bench.main([flag, value]) == 2
        assert f"{flag}: got {value}" in capsys.readouterr().err
