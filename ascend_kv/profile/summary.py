"""A profile, read and attributed: what the command prints, compares and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ascend_kv.devices import Device, get_device
from ascend_kv.errors import UsageError
from ascend_kv.plan.roofline import floor_seconds
from ascend_kv.profile.attribution import PARTS, Attribution, Step, attribute
from ascend_kv.profile.categories import CATEGORIES, category_of, label_of
from ascend_kv.profile.inputs import (
    KERNELS,
    STATISTIC,
    TRACE,
    WORKLOAD,
    Input,
    find_inputs,
    read_workload,
)
from ascend_kv.profile.spool import Spool
from ascend_kv.profile.tables_csv import read_kernels, read_statistic
from ascend_kv.profile.tasks import MOST_STEPS, Lane, Remarks, Steps, Task
from ascend_kv.profile.trace import HOST, read_trace
from ascend_kv.profile.traffic import moved_bytes

_MOST_OPERATORS = 5_000
_LARGE_MEGABYTES = 50
_REST = "(all further operators)"


@dataclass
class Operator:
    """All calls of one kind of operator, of all lanes.

    Attributes:
        name, category: what it is counted under.
        calls: how many.
        total_ns: their own times added up, those within one another and at once too.
        time_ns: what of the lanes' time belongs to it (``attribution``).
        longest_ns: the longest call; 0 where only sums are known.
        moved_bytes, moved_ns, moved_calls: of the calls whose traffic the profile tells.
    """

    name: str
    category: str
    calls: int = 0
    total_ns: int = 0
    time_ns: int = 0
    longest_ns: int = 0
    moved_bytes: int = 0
    moved_ns: int = 0
    moved_calls: int = 0

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved; None where the profile does not tell."""
        if not self.moved_bytes or not self.moved_ns:
            return None
        return 1e9 * self.moved_bytes / self.moved_ns

    def roofline_seconds(self, device: Device) -> float:
        """What these calls take at best: a launch each, and their bytes at the memory's peak."""
        mean = round(self.moved_bytes / self.moved_calls)
        return self.moved_calls * floor_seconds(mean, device)


@dataclass
class LaneTime:
    """Where the time of one device went, or of one host process; parts by ``PARTS``."""

    lane: Lane
    span_ns: int
    parts_ns: dict[str, int]
    longest_gap_ns: int


@dataclass
class Profile:
    """What was read.

    Attributes:
        path: as it was named.
        files: that were read.
        on_host: the tasks are operators on a CPU, not kernels of a device.
        lanes: one for each device; ``parts_ns`` without gaps where no times of day are known.
        operators: the most time first.
        steps: of the first lane that has any: name, start since the first step, parts.
        workload: what ``--profile`` wrote beside the profile.
        device: whose peaks to compare with; None where it is not known.
        remarks: what was missing and what that cost.
    """

    path: str
    files: list[str]
    on_host: bool
    lanes: list[LaneTime]
    operators: list[Operator]
    steps: list[StepTime]
    workload: dict[str, Any] | None
    device: Device | None
    remarks: list[str] = field(default_factory=list)

    @property
    def span_ns(self) -> float:
        """A lane's time from its first task to its last, mean over the lanes."""
        return sum(lane.span_ns for lane in self.lanes) / len(self.lanes)

    def part_ns(self, part: str) -> float:
        """Mean over the lanes."""
        return sum(lane.parts_ns.get(part, 0) for lane in self.lanes) / len(self.lanes)

    @property
    def has_gaps(self) -> bool:
        return all(PARTS[-1] in lane.parts_ns for lane in self.lanes)


@dataclass
class StepTime:
    """One step: nanoseconds since the first one began, and its parts by ``PARTS``."""

    name: str
    start_ns: int
    span_ns: int
    parts_ns: dict[str, int]


def read_profile(
    path: Path,
    device: str | None = None,
    step_operator: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Read a profile, whatever wrote it.

    Args:
        path: a file or a folder.
        device: name as ``devices.get_device`` takes it; None: what ``--profile`` noted.
        step_operator: an operator that every step runs once, as its last one. It cuts the
            timeline where the profile itself names no steps.
        say: is told of files that take a while.

    Raises:
        UsageError: nothing that can be read, an unknown device or operator.
        OSError: a file cannot be read.
    """
    found = get_device(device, "--device") if device else None  # refused before minutes of reading
    workload = read_workload(path)
    if found is None and workload and isinstance(workload.get("device"), str):
        found = get_device(workload["device"], f"{WORKLOAD}: device")
    reader = _Reader(step_operator)
    inputs = find_inputs(path)
    for given in inputs:
        megabytes = sum(file.stat().st_size for file in given.files) / 1e6
        if megabytes > _LARGE_MEGABYTES:
            say(f"Reading {megabytes:,.0f} MB of {given.source} ...")
        reader.read(given)
    files = [str(file) for given in inputs for file in given.files]
    return reader.finish(str(path), files, dict(workload) if workload else None, found)


class _Reader:
    """Takes tasks as they come: sums are kept, times go to the spool."""

    def __init__(self, step_operator: str | None) -> None:
        self.step_operator = step_operator
        self.steps, self.remarks, self.spool = Steps(), Remarks(), Spool()
        self.operators: dict[tuple[bool, str, str], int] = {}
        self.sums: list[Operator] = []
        self.lanes: dict[Lane, int] = {}
        self.untimed: dict[Lane, dict[str, int]] = {}
        self.cuts: dict[Lane, list[int]] = {}

    def read(self, given: Input) -> None:
        if given.kind == STATISTIC:
            self.remarks.add("op_statistic has sums only: no host gaps, no overlap, no timeline.")
            for file in given.files:
                self.add_sums(file, given.source)
            return
        reader = {KERNELS: read_kernels, TRACE: read_trace}[given.kind]
        for file in given.files:
            for task in reader(file, given.source, self.steps, self.remarks):
                self.add(task)

    def add(self, task: Task) -> None:
        name = label_of(task.name, task.type)
        category = category_of(task.name, task.type, task.core)
        operator = self.operator(task.lane.device == HOST, name, category)
        sums = self.sums[operator]
        sums.calls += 1
        sums.total_ns += task.duration_ns
        sums.longest_ns = max(sums.longest_ns, task.duration_ns)
        moved = moved_bytes(task, sums.name)
        if moved is not None:
            sums.moved_bytes += moved
            sums.moved_ns += task.duration_ns
            sums.moved_calls += 1
        if task.start_ns is None:
            self.add_untimed(task.lane, category, task.duration_ns)
            sums.time_ns += task.duration_ns
            return
        end = task.start_ns + task.duration_ns
        lane = self.lanes.setdefault(task.lane, len(self.lanes))
        self.spool.add((lane, task.start_ns, -end, operator))
        if sums.name == self.step_operator:
            cuts = self.cuts.setdefault(task.lane, [])
            if len(cuts) < MOST_STEPS:
                cuts.append(end)
            else:
                self.steps.left_out += 1

    def add_sums(self, file: Path, source: str) -> None:
        for row in read_statistic(file, source, self.remarks):
            category = category_of(row.type, row.type, row.core)
            sums = self.sums[self.operator(False, row.type, category)]
            sums.calls += row.calls
            sums.total_ns += row.total_ns
            sums.time_ns += row.total_ns
            self.add_untimed(row.lane, category, row.total_ns)

    def add_untimed(self, lane: Lane, category: str, duration_ns: int) -> None:
        parts = self.untimed.setdefault(lane, dict.fromkeys(CATEGORIES, 0))
        parts[category] += duration_ns

    def operator(self, on_host: bool, name: str, category: str) -> int:
        """The number that the operator's calls are counted under."""
        key = (on_host, name, category)
        if key not in self.operators:
            if len(self.operators) >= _MOST_OPERATORS:
                self.remarks.add("{n} calls are of operators beyond the first 5,000 kinds.")
                key = (on_host, _REST, category)
            if key not in self.operators:
                self.operators[key] = len(self.sums)
                self.sums.append(Operator(key[1], category))
        return self.operators[key]

    def finish(
        self, path: str, files: list[str], workload: dict[str, Any] | None, device: Device | None
    ) -> Profile:
        """Attribute what the spool holds."""
        lanes = [
            LaneTime(lane, sum(parts.values()), parts, 0) for lane, parts in self.untimed.items()
        ]
        on_host = all(lane.device == HOST for lane in self.lanes) and bool(self.lanes)
        timed = list(self.attribute(on_host))
        lanes += [_lane_time(lane, done) for lane, done in timed]
        if not lanes:
            raise UsageError("profile", path, "a profile with at least one task")
        with_steps = next((done for _, done in timed if any(map(_worked, done.steps))), None)
        if self.step_operator and not self.cuts:
            names = [sums.name for sums in sorted(self.sums, key=lambda x: -x.total_ns)[:20]]
            raise UsageError("--step-operator", self.step_operator, names)
        if self.steps.left_out:
            self.remarks.add(f"{self.steps.left_out:,} spans of further steps were left out.")
        kept = [sums for (host, _, _), sums in zip(self.operators, self.sums) if host <= on_host]
        return Profile(
            path,
            files,
            on_host,
            lanes,
            sorted(kept, key=lambda sums: (-sums.time_ns, sums.name)),
            _step_times(with_steps) if with_steps else [],
            workload,
            device,
            self.remarks.lines(),
        )

    def attribute(self, on_host: bool) -> Iterator[tuple[Lane, Attribution]]:
        """Lane by lane; a CPU's operators only where nothing else was profiled."""
        names = list(self.lanes)
        categories = [CATEGORIES.index(sums.category) for sums in self.sums]
        for number, records in groupby(self.spool.sorted(), key=lambda record: record[0]):
            lane = names[number]
            if lane.device == HOST and not on_host:
                for _ in records:
                    pass
                continue
            first = next(records)
            tasks = ((start, -minus, which) for _, start, minus, which in chain([first], records))
            done = attribute(tasks, categories, self.steps_of(lane, first[1]))
            for which, time_ns in done.operators_ns.items():
                self.sums[which].time_ns += time_ns
            yield lane, done

    def steps_of(self, lane: Lane, start_ns: int) -> list[tuple[int, int, str]]:
        """The profile's own steps, or those that the step operator ends."""
        if self.step_operator is None:
            return self.steps.of(lane)
        ends = sorted(self.cuts.get(lane, ()))
        return [
            (start, end, str(number))
            for number, (start, end) in enumerate(zip([start_ns, *ends], ends))
        ]


def _lane_time(lane: Lane, done: Attribution) -> LaneTime:
    parts = dict(zip(PARTS, done.parts_ns, strict=True))
    return LaneTime(lane, done.end_ns - done.start_ns, parts, done.longest_gap_ns)


def _worked(step: Step) -> bool:
    return any(step.parts_ns[:-1])


def _step_times(done: Attribution) -> list[StepTime]:
    """Steps in which something ran."""
    steps = [step for step in done.steps if _worked(step)]
    return [
        StepTime(
            step.name,
            step.start_ns - steps[0].start_ns,
            sum(step.parts_ns),
            dict(zip(PARTS, step.parts_ns, strict=True)),
        )
        for step in steps
    ]
