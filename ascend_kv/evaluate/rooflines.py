"""Rooflines of the kernels: their traffic on the CPU twin, and the times it allows on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.devices import Device
from ascend_kv.evaluate.kernel_workloads import Workload
from ascend_kv.evaluate.twin import require_twin
from ascend_kv.plan.roofline import Prediction, floor_seconds, predict, rates_of
from ascend_kv.plot_style import colour, new_figure, save, style
from ascend_kv.text_table import TextTable

LABEL = "counters simulated by the CPU twin, times predicted: nothing here ran on an NPU"
ASSUMPTIONS = (
    "Times are what the documented peaks allow when everything overlaps; latencies, short bursts "
    "and the L2 cache are not modelled.",
    "MB have to move; traffic is over them. Every 32-byte sector of inputs and results counts "
    "once, inputs twice for quantize head and channel, whose scales span cores.",
    "Position bias that several cores read counts each time, though L2 would serve that.",
    "Their decode steps are those in which every sequence has just filled a window.",
    "Balance: the busiest core's time over the mean of all cores, idle ones included.",
)


class Row(NamedTuple):
    """One workload: what it has to move, and what the twin counted."""

    workload: Workload
    unavoidable_bytes: int
    prediction: Prediction
    ub_high_water_bytes: int
    floor_seconds: float

    @property
    def traffic_ratio(self) -> float:
        """Moved over unavoidable."""
        return self.prediction.traffic_bytes / self.unavoidable_bytes

    def as_json(self) -> dict[str, Any]:
        """The row for a machine; seconds are predicted, bytes simulated."""
        prediction = self.prediction
        return {
            "model": self.workload.model,
            "workload": self.workload.name,
            "operator": self.workload.operator,
            "unavoidable_bytes": self.unavoidable_bytes,
            "simulated_traffic_bytes": prediction.traffic_bytes,
            "traffic_ratio": self.traffic_ratio,
            "balance": prediction.balance,
            "ub_high_water_bytes": self.ub_high_water_bytes,
            "predicted_seconds": prediction.seconds,
            "predicted_floor_seconds": self.floor_seconds,
            "predicted_parts_seconds": prediction.parts,
            "bound": prediction.bound,
        }


def simulate(
    workloads: Sequence[Workload], device: Device, advance: Callable[[int], None]
) -> list[Row]:
    """Run every workload whole on the twin, cut for the device's cores.

    Args:
        workloads: what to run.
        device: with published rates.
        advance: called after each, with the number of workloads done.

    Raises:
        UsageError: a device without rates.
        RunError: the twin cannot run here.
    """
    _, cores = rates_of(device)
    operators = require_twin()
    limits = operators.Limits(cores, device.ub_bytes)
    rows = []
    for workload in workloads:
        call = workload.build()
        run_operator = getattr(operators, workload.operator)
        _, run = run_operator(*call.args, **call.kwargs, limits=limits)
        prediction = predict([launch.cores for launch in run.launches], device)
        high_water = max(launch.total["ub_high_water"] for launch in run.launches)
        floor = floor_seconds(call.unavoidable_bytes, device)
        rows.append(Row(workload, call.unavoidable_bytes, prediction, high_water, floor))
        advance(1)
    return rows


def tables(rows: Sequence[Row], device: Device) -> list[TextTable]:
    """One table for each model; what they rest on is said below the last."""
    header = (
        "workload", "MB", "traffic", "balance", "UB KiB", "HBM", "MTE", "vector", "scalar",
        "launch", "together", "floor", "bound by",
    )  # fmt: skip
    found: list[TextTable] = []
    for model in dict.fromkeys(row.workload.model for row in rows):
        cells = [_cells(row) for row in rows if row.workload.model == model]
        title = f"{model} on {device.name} (simulated counters, predicted microseconds)"
        found.append(TextTable(title, header, cells))
    found[-1].notes.extend(ASSUMPTIONS)
    return found


def _cells(row: Row) -> tuple[str, ...]:
    prediction = row.prediction
    names = ("HBM", "one core's MTE", "vector", "scalar", "launch")
    return (
        row.workload.name,
        f"{row.unavoidable_bytes / 1e6:.3f}",
        f"{row.traffic_ratio:.3f}",
        f"{prediction.balance:.2f}",
        f"{row.ub_high_water_bytes / 1024:.0f}",
        *(f"{prediction.parts[name] * 1e6:.1f}" for name in names),
        f"{prediction.seconds * 1e6:.1f}",
        f"{row.floor_seconds * 1e6:.1f}",
        prediction.bound,
    )


def as_json(rows: Sequence[Row], device: Device) -> dict[str, Any]:
    """Everything, with the device's figures and where they were read."""
    rates, cores = rates_of(device)
    return {
        "label": LABEL,
        "device": device.name,
        "vector_cores": cores,
        "rates": vars(rates),
        "sources": dict(device.sources),
        "assumptions": list(ASSUMPTIONS),
        "rows": [row.as_json() for row in rows],
    }


def draw(rows: Sequence[Row], device: Device, path: Path) -> None:
    """A plot: predicted time over the bytes needed, with the roof that launch and HBM make.

    Raises:
        OSError: the file cannot be written.
    """
    title = f"Kernels on {device.name}: simulated counters, predicted time"
    with style():
        figure, axes = new_figure(title)
        _points(axes, rows, device)
        save(figure, path)


def _points(axes: Any, rows: Sequence[Row], device: Device) -> None:
    rates, _ = rates_of(device)
    sizes = sorted(row.unavoidable_bytes for row in rows)
    low, high = sizes[0] / 1.5, sizes[-1] * 1.5
    roof = [low * (high / low) ** (step / 60) for step in range(61)]
    times = [(rates.launch_seconds + size / rates.hbm_bytes_per_second) * 1e6 for size in roof]
    label = f"one launch + needed bytes at {rates.hbm_bytes_per_second / 1e12:g} TB/s"
    axes.plot(roof, times, color="0.6", label=label)
    markers = "osD^vP"
    operators = dict.fromkeys(row.workload.operator for row in rows)
    for number, (marker, operator) in enumerate(zip(markers, operators), 1):
        those = [row for row in rows if row.workload.operator == operator]
        axes.scatter(
            [row.unavoidable_bytes for row in those],
            [row.prediction.seconds * 1e6 for row in those],
            marker=marker,
            color=colour(number),
            label=operator,
            alpha=0.8,
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes that have to move")
    axes.set_ylabel("predicted microseconds")
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=9)
