"""The self-test's result as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_kv.devices import get_device
from ascend_kv.evaluate import rooflines
from ascend_kv.evaluate.selftest import LABELS, TIMED_CALLS, TWIN_DEVICE, SelfTest, Speed
from ascend_kv.text_table import TextTable


def tables(test: SelfTest) -> list[TextTable]:
    """Verdicts, then speeds or rooflines."""
    rows: list[tuple[str, ...]] = [
        (
            verdict.operator,
            verdict.implementation,
            str(verdict.cases),
            str(verdict.difference.codes),
            f"{verdict.difference.ulps:.3g}",
            "pass" if verdict.passed else f"WRONG in {len(verdict.failures)}",
        )
        for verdict in test.verdicts
    ]
    notes = [
        *(LABELS[name] for name in test.implementations),
        "Largest difference from the operator's reference: in codes of INT8, in steps of the "
        "result's type (ulps; hca_compress: of its entry's largest channel).",
        *(f"{verdict.operator}: {text}" for verdict in test.verdicts for text in verdict.failures),
        *(f"{name}: no kernel is built here, the reference serves it" for name in test.not_built),
        *(f"{name}: {how}" for name, how in test.partly.items()),
    ]
    header = ("kernel", "implementation", "calls", "codes", "ulps", "verdict")
    found = [TextTable("Kernels against their references", header, rows, notes)]
    if test.speeds:
        found.append(_speed_table(test.speeds))
    if test.rooflines:
        found += rooflines.tables(test.rooflines, get_device(TWIN_DEVICE))
    return found


def _speed_table(speeds: Sequence[Speed]) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for speed in speeds:
        floor = speed.floor_seconds
        rows.append(
            (
                f"{speed.workload.model}: {speed.workload.name}",
                f"{speed.unavoidable_bytes / 1e6:.3f}",
                f"{speed.seconds * 1e6:.1f}",
                f"{speed.unavoidable_bytes / speed.seconds / 1e9:.1f}",
                "-" if floor is None else f"{floor * 1e6:.1f}",
                "-" if floor is None else f"{floor / speed.seconds:.0%}",
            )
        )
    title = "Bandwidth (measured on this NPU; the floor is predicted)"
    header = ("workload", "MB needed", "us measured", "GB/s", "floor us", "floor / measured")
    notes = [
        f"Mean of {TIMED_CALLS} calls in a row by the wall clock, the host's work included.",
        "The floor is one launch and the needed bytes at HBM's documented peak.",
    ]
    return TextTable(title, header, rows, notes)


def as_json(test: SelfTest) -> dict[str, Any]:
    """The self-test for a machine."""
    verdicts = [
        {
            "operator": verdict.operator,
            "implementation": verdict.implementation,
            "passed": verdict.passed,
            "calls": verdict.cases,
            "max_code_difference": verdict.difference.codes,
            "max_ulps": verdict.difference.ulps,
            "failures": verdict.failures,
        }
        for verdict in test.verdicts
    ]
    speeds = [
        {
            "model": speed.workload.model,
            "workload": speed.workload.name,
            "operator": speed.workload.operator,
            "unavoidable_bytes": speed.unavoidable_bytes,
            "measured_seconds": speed.seconds,
            "predicted_floor_seconds": speed.floor_seconds,
        }
        for speed in test.speeds
    ]
    simulated = rooflines.as_json(test.rooflines, get_device(TWIN_DEVICE))
    return {
        "labels": [LABELS[name] for name in test.implementations],
        "passed": not test.wrong,
        "kernels": verdicts,
        "not_built": test.not_built,
        "partly_reference": test.partly,
        "measured": speeds,
        "simulated": simulated if test.rooflines else None,
    }
