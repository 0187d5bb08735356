"""Tables and JSON of a profile and of two profiles compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ascend_kv.profile.attribution import PARTS
from ascend_kv.profile.categories import ATTENTION, KV
from ascend_kv.profile.compare import Comparison, Row
from ascend_kv.profile.summary import Operator, Profile, StepTime
from ascend_kv.text_table import TextTable

SCHEMA = "ascend_kv.profile/1"
MOST_OPERATORS = 20
"""Rows of the tables; the JSON has all of them."""
MOST_STEPS = 20

_SHORT = {"KV operators": "KV", "other operators": "other", "communication": "comm."}


def profile_tables(profile: Profile) -> list[TextTable]:
    """Everything there is to say about one profile."""
    tables = [_parts_table(profile)]
    if len(profile.lanes) > 1:
        tables.append(_lanes_table(profile))
    tables.append(_operators_table(profile))
    if bandwidth := bandwidth_rows(profile):
        tables.append(_bandwidth_table(profile, bandwidth))
    if profile.steps:
        tables.append(_steps_table(profile))
    return tables


def comparison_tables(comparison: Comparison) -> list[TextTable]:
    """Both profiles beside each other."""
    header = ("", "before, ms", "after, ms", "change, ms", "after/before")
    note = comparison.remark
    parts = [_comparison_row(row) for row in comparison.parts]
    ran = [row for row in comparison.operators if row.before_ns or row.after_ns]
    changed = sorted(ran, key=lambda row: -abs(row.change_ns))[:MOST_OPERATORS]
    operators = [_comparison_row(row) for row in changed]
    return [
        TextTable(f"Before and after, {comparison.unit}", ("part", *header[1:]), parts, [note]),
        TextTable(
            f"Operators that changed most, {comparison.unit}",
            ("operator", *header[1:]),
            operators,
            [],
        ),
    ]


def _comparison_row(row: Row) -> tuple[str, ...]:
    before, after = _ms(row.before_ns), _ms(row.after_ns)
    return (row.name, before, after, _signed_ms(row.change_ns), row.ratio_text)


def step_table(profiles: Sequence[tuple[str, Profile]]) -> TextTable:
    """The parts of a mean step of several profiles beside each other; the first is the baseline."""
    times = [
        [sum(step.parts_ns[part] for step in x.steps) / (len(x.steps) or 1) for part in PARTS]
        for _, x in profiles
    ]
    rows = [(part, *(_ms(column[place]) for column in times)) for place, part in enumerate(PARTS)]
    rows.append(("together", *(_ms(sum(column)) for column in times)))
    notes = [f"{name}: {_described(x)}" for name, x in profiles]
    notes.append("A profiler slows what it watches: compare these with each other only.")
    return TextTable(
        "Where a decode step's time went, ms (measured under the profiler)",
        ("part", *(name for name, _ in profiles)),
        rows,
        notes,
    )


def _described(profile: Profile) -> str:
    ran = profile.workload or {}
    return (
        f"{len(profile.steps)} steps of {ran.get('batch')} sequences at "
        f"{ran.get('context_tokens'):,.0f} tokens on {ran.get('device')}."
    )


def as_json(profile: Profile) -> dict[str, Any]:
    """The profile for a machine: seconds and bytes. The keys are explained in profile.md."""
    return {
        "schema": SCHEMA,
        "path": profile.path,
        "files": profile.files,
        "tasks_on": "host" if profile.on_host else "device",
        "device": profile.device.name if profile.device else None,
        "workload": profile.workload,
        "span_seconds": profile.span_ns / 1e9 if profile.has_gaps else None,
        "parts_seconds": {part: profile.part_ns(part) / 1e9 for part in _parts(profile)},
        "lanes": [
            {
                "source": lane.lane.source,
                "device": lane.lane.device,
                "span_seconds": lane.span_ns / 1e9,
                "longest_gap_seconds": lane.longest_gap_ns / 1e9,
                "parts_seconds": {part: time / 1e9 for part, time in lane.parts_ns.items()},
            }
            for lane in profile.lanes
        ],
        "operators": [_operator_json(operator) for operator in profile.operators],
        "bandwidth": [row._asdict() for row in bandwidth_rows(profile)],
        "steps": [
            {
                "name": step.name,
                "start_seconds": step.start_ns / 1e9,
                "span_seconds": step.span_ns / 1e9,
                "parts_seconds": {part: time / 1e9 for part, time in step.parts_ns.items()},
            }
            for step in profile.steps
        ],
        "remarks": profile.remarks,
    }


class Bandwidth(NamedTuple):
    """What an operator, or a part of the steps, moved, and how fast.

    Attributes:
        name: the operator or part.
        source: where the bytes are from: the profile's shapes or counters, or the workload.
        calls: whose bytes are known; 0 for a part.
        moved_bytes, seconds: of these calls together.
        bytes_per_second: achieved.
        peak_share: of the device's documented memory bandwidth; None where it is not known.
        roofline_seconds: what the calls take at best; None as above, and for parts.
    """

    name: str
    source: str
    calls: int
    moved_bytes: int
    seconds: float
    bytes_per_second: float
    peak_share: float | None
    roofline_seconds: float | None


def bandwidth_rows(profile: Profile) -> list[Bandwidth]:
    """Of the attention and KV operators whose traffic the profile tells, then of whole parts."""
    device = profile.device
    peak = device.rates.hbm_bytes_per_second if device and device.rates else None
    rows, told = [], set()
    for operator in profile.operators:
        achieved = operator.bytes_per_second
        if operator.category not in (ATTENTION, KV) or achieved is None:
            continue
        told.add(operator.category)
        rows.append(
            Bandwidth(
                operator.name,
                "profile",
                operator.moved_calls,
                operator.moved_bytes,
                operator.moved_ns / 1e9,
                achieved,
                achieved / peak if peak else None,
                operator.roofline_seconds(device) if device and peak else None,
            )
        )
    for part, moved in _workload_bytes(profile).items():
        seconds = sum(step.parts_ns[part] for step in profile.steps) / 1e9
        if part not in told and moved and seconds:
            share = moved / seconds / peak if peak else None
            rows.append(
                Bandwidth(part, "workload", 0, moved, seconds, moved / seconds, share, None)
            )
    return rows


def _workload_bytes(profile: Profile) -> dict[str, int]:
    """What ``--profile`` knows of the steps it ran: bytes of a part in all of them."""
    a_step = (profile.workload or {}).get("bytes_per_step")
    if not isinstance(a_step, dict):
        return {}
    count = len(profile.steps)
    return {part: count * int(moved) for part, moved in a_step.items() if part in PARTS}


def _operator_json(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "category": operator.category,
        "calls": operator.calls,
        "seconds": operator.time_ns / 1e9,
        "calls_seconds": operator.total_ns / 1e9,
        "longest_seconds": operator.longest_ns / 1e9,
    }


def _parts(profile: Profile) -> Sequence[str]:
    return PARTS if profile.has_gaps else PARTS[:-1]


def _parts_table(profile: Profile) -> TextTable:
    whole = sum(profile.part_ns(part) for part in _parts(profile)) or 1
    rows: list[tuple[str, ...]] = [
        (part, _ms(profile.part_ns(part)), f"{profile.part_ns(part) / whole:.1%}")
        for part in _parts(profile)
    ]
    rows.append(("together", _ms(whole), "100.0%"))
    what = "host" if profile.on_host else "device"
    several = f", mean of {len(profile.lanes)} devices" if len(profile.lanes) > 1 else ""
    count = len(profile.files)
    notes = [f"Read: {profile.path}" + (f", {count} files." if count > 1 else "")]
    if profile.has_gaps:
        longest = max(lane.longest_gap_ns for lane in profile.lanes)
        notes.append(
            "Each moment counts once: computing hides communication, communication hides copies. "
            f"In host gaps nothing ran; the longest took {_ms(longest)} ms."
        )
    title = f"Where the {what}'s time went{several}"
    return TextTable(title, ("part", "ms", "share"), rows, [*notes, *profile.remarks])


def _lanes_table(profile: Profile) -> TextTable:
    parts = _parts(profile)
    return TextTable(
        "By device, ms",
        ("device", "together", *(_SHORT.get(part, part) for part in parts)),
        [
            (
                f"{lane.lane.source}, {lane.lane.device}",
                _ms(lane.span_ns),
                *(_ms(lane.parts_ns.get(part, 0)) for part in parts),
            )
            for lane in profile.lanes
        ],
        [],
    )


def _operators_table(profile: Profile) -> TextTable:
    whole = sum(lane.span_ns for lane in profile.lanes) or 1
    shown = [operator for operator in profile.operators if operator.time_ns][:MOST_OPERATORS]
    left = len(profile.operators) - len(shown)
    return TextTable(
        "Operators by the time that is theirs",
        ("operator", "part", "calls", "ms", "share", "mean call, us", "longest, us"),
        [
            (
                operator.name,
                operator.category,
                f"{operator.calls:,}",
                _ms(operator.time_ns),
                f"{operator.time_ns / whole:.1%}",
                f"{operator.total_ns / 1e3 / operator.calls:,.1f}" if operator.calls else "-",
                f"{operator.longest_ns / 1e3:,.1f}" if operator.longest_ns else "-",
            )
            for operator in shown
        ],
        [f"{left} more have {_ms(sum(x.time_ns for x in profile.operators[len(shown) :]))} ms."]
        if left
        else [],
    )


def _bandwidth_table(profile: Profile, rows: list[Bandwidth]) -> TextTable:
    device = profile.device
    known = device is not None and device.rates is not None
    notes = [
        "Bytes that have to move, each once, over the time of the calls that moved them; "
        "from the profile's shapes or counters, or, for parts, from the workload."
    ]
    if known:
        assert device is not None and device.rates is not None
        notes.append(
            f"Peak: {device.rates.hbm_bytes_per_second / 1e12:.2f} TB/s of the {device.name}, from "
            "its documents. Roofline: a launch and these bytes at the peak, predicted."
        )
    else:
        named = f"The {device.name} has" if device else "Without --device there are"
        notes.append(f"{named} no documented peak to compare with.")
    if profile.on_host and known:
        notes.append("These operators ran on a CPU: the peak is that of another device.")
    return TextTable(
        "Bandwidth of the KV and attention operators",
        ("operator", "bytes from", "calls", "MB moved", "ms", "GB/s", "of peak", "roofline, ms"),
        [
            (
                row.name,
                row.source,
                f"{row.calls:,}" if row.calls else "-",
                f"{row.moved_bytes / 1e6:,.3f}",
                f"{1e3 * row.seconds:,.3f}",
                f"{row.bytes_per_second / 1e9:,.2f}",
                "-" if row.peak_share is None else f"{row.peak_share:.1%}",
                "-" if row.roofline_seconds is None else f"{1e3 * row.roofline_seconds:,.3f}",
            )
            for row in rows
        ],
        notes,
    )


def _steps_table(profile: Profile) -> TextTable:
    steps = profile.steps
    spans = sorted(step.span_ns for step in steps)
    middle, last = spans[len(spans) // 2], spans[-1]
    return TextTable(
        f"Steps as they ran, ms ({min(len(steps), MOST_STEPS)} of {len(steps)})",
        ("step", "begins", "takes", *(_SHORT.get(part, part) for part in PARTS)),
        [_step_row(step) for step in steps[:MOST_STEPS]],
        [f"Median {_ms(middle)} ms, longest {_ms(last)} ms."],
    )


def _step_row(step: StepTime) -> tuple[str, ...]:
    parts = (_ms(step.parts_ns[part]) for part in PARTS)
    return (step.name, _ms(step.start_ns), _ms(step.span_ns), *parts)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.3f}"


def _signed_ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:+,.3f}"
