"""The probe of the machine's speed: when it runs, what it says, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench_fixture import make_scheme

torch = pytest.importorskip("torch")

from ascend_kv.evaluate import speed_probe  # noqa: E402
from ascend_kv.evaluate.results import CalibrationRun, check_speed  # noqa: E402
from ascend_kv.evaluate.speed_probe import SpeedProbe, SpeedWatch  # noqa: E402


class Clock:
    """Stands still until something takes time."""

    def __init__(self) -> None:
        self.now = 5.0

    def perf_counter(self) -> float:
        return self.now


class Scripted(SpeedProbe):
    """Takes as long as it is told to."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self._clock, self._seconds = clock, iter(seconds)

    def _run(self) -> None:
        self._clock.now += next(self._seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed_probe, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_a_probe_runs_when_the_last_is_a_second_ago(clock: Clock) -> None:
    watch = SpeedWatch(Scripted(clock, [0.25, 8.0, 0.5, 0.375]))
    watch.look()
    assert watch.samples == [0.25]  # the first at once
    for _ in range(3):
        clock.now += 0.25
        watch.look()
    assert watch.samples == [0.25]
    clock.now += 0.25
    watch.look()  # a second after the last one ended
    assert watch.samples == [0.25, 8.0]
    watch.look()
    watch.look(always=True)
    assert watch.samples == [0.25, 8.0, 0.5]
    clock.now += 1
    watch.look()
    assert watch.typical_seconds == (0.375 + 0.5) / 2  # whatever the one was that hung
    assert watch.total_seconds == 9.125


def test_all_of_the_work_is_done_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix as often as said, on the device, between two synchronizations."""
    happened: list[str] = []
    linear = torch.nn.functional.linear

    def watch(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.shape == (24, 16) and rows.shape == (speed_probe.ROWS, 16)
        happened.append(str(int(1e6 * float(matrix.sum()))))
        return linear(rows, matrix)

    def wait(device: str) -> None:
        happened.append(f"{device} waited for")

    monkeypatch.setattr(speed_probe, "MATRICES", (3, 24, 16))
    probe = SpeedProbe("cpu")
    monkeypatch.setattr(torch.nn.functional, "linear", watch)
    monkeypatch.setattr(speed_probe.platform, "synchronize", wait)
    assert probe.seconds() > 0
    first, *names, last = happened
    assert first == last == "cpu waited for"
    assert len(names) == 3 * speed_probe.PASSES and len(set(names)) == 3
    assert names[:3] == names[3:6]


def test_errors_as_they_are_and_at_equal_speed() -> None:
    """Predicted 60, measured 48, while the machine ran at 0.8 of its speed at calibration."""
    scheme = make_scheme("one", "paged", "int8", "planned", 48.0, 1.0)
    predicted = replace(scheme.predicted, tokens_per_second=60.0)
    measured = replace(scheme.measured, speed_probe_seconds=0.05)
    check = check_speed(predicted, measured, CalibrationRun(9.0, 7, 0.04))
    assert check.error == pytest.approx(0.25)
    assert check.machine_speed == pytest.approx(0.8)
    assert check.error_at_equal_speed == pytest.approx(0, abs=1e-12)
