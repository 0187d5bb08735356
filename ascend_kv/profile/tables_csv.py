"""Tables of kernels and of operators: op_summary, kernel_details and op_statistic.

Columns are found by name, since every CANN release and every setting of the profiler has others:
names and their meaning are from msprof's documentation of its output and from torch_npu's list of
headers. A column that is missing costs what was to be said with it and a remark, no more.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.profile.tasks import Lane, Remarks, Shapes, Steps, Task, to_nanoseconds

# What a reader wants -> the names it goes by: op_summary's, then kernel_details', then older ones.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "device": ("device_id", "device id"),
    "name": ("op name", "name"),
    "type": ("op type", "type"),
    "core": ("task type", "accelerator core", "core type"),
    "start": ("task start time(us)", "start time(us)"),
    "duration": ("task duration(us)", "duration(us)"),
    "step": ("step id", "infer id"),
    "shapes": ("input shapes",),
    "dtypes": ("input data types",),
    "count": ("count",),
    "total": ("total time(us)",),
}
# What is lost without a column; those not named here are missed silently.
_LOST = {
    "type": "operators are told by their names",
    "core": "collectives are told by their names",
    "start": "no host gaps, no overlap, no timeline",
    "shapes": "no bandwidth from shapes",
}
_COUNTERS = ("read_main_memory_datas(kb)", "write_main_memory_datas(kb)")
"""Of ``--aic-metrics=MemoryAccess``: memory's own traffic, for each kind of core."""
_LONGEST_CELL = 16 << 20


class Statistic(NamedTuple):
    """One row of op_statistic: all calls of one kind of operator."""

    lane: Lane
    type: str
    core: str
    calls: int
    total_ns: int


def read_kernels(path: Path, source: str, steps: Steps, remarks: Remarks) -> Iterator[Task]:
    """Yield every task of an op_summary or a kernel_details.

    Args:
        path: the table.
        source: what its lanes are called by.
        steps: is told where each named step begins and ends.
        remarks: is told what is missing.

    Raises:
        UsageError: no table with names and durations.
        OSError: the file cannot be read.
    """
    rows = _rows(path)
    columns = _Columns(path, next(rows, []), ("duration",), remarks)
    if "name" not in columns and "type" not in columns:
        raise columns.lacking("name")
    for lost, consequence in _LOST.items():
        if lost not in columns:
            remarks.add(f"{path.name} has no column {_NAMES[lost][0]!r}: {consequence}.")
    counters = columns.ending(_COUNTERS)
    for row in rows:
        if columns.breaks_off(row, remarks):
            continue
        duration = to_nanoseconds(columns.cell(row, "duration"))
        if duration is None:
            remarks.add(f"{{n}} rows of {path.name} have no duration and were left out.")
            continue
        start = to_nanoseconds(columns.cell(row, "start")) if "start" in columns else None
        if start is None and "start" in columns:
            remarks.add(f"{{n}} rows of {path.name} have no start and were left out.")
            continue
        lane = Lane(source, columns.cell(row, "device") or "0")
        kind = columns.cell(row, "type")
        step = columns.cell(row, "step")
        if step and start is not None:
            steps.add(lane, step, start, start + duration)
        yield Task(
            lane,
            columns.cell(row, "name") or kind,
            kind,
            columns.cell(row, "core"),
            start,
            duration,
            parse_shapes(columns.cell(row, "shapes")),
            tuple(columns.cell(row, "dtypes").split(";")),
            (),
            _counted(row, counters),
        )


def read_statistic(path: Path, source: str, remarks: Remarks) -> Iterator[Statistic]:
    """Yield every row of an op_statistic; arguments and errors as ``read_kernels``."""
    rows = _rows(path)
    columns = _Columns(path, next(rows, []), ("type", "total"), remarks)
    for row in rows:
        if columns.breaks_off(row, remarks):
            continue
        total = to_nanoseconds(columns.cell(row, "total"))
        if total is None:
            remarks.add(f"{{n}} rows of {path.name} have no total time and were left out.")
            continue
        count = columns.cell(row, "count")
        yield Statistic(
            Lane(source, columns.cell(row, "device") or "0"),
            columns.cell(row, "type"),
            columns.cell(row, "core"),
            int(count) if count.isdecimal() else 0,
            total,
        )


@lru_cache(maxsize=1 << 12)
def parse_shapes(text: str) -> Shapes:
    """Shapes as msprof writes them: ``"32,28,1,128;1024,4,128,128;"``; () for a scalar."""
    if not text:
        return ()
    shapes = []
    for part in text.strip('"').split(";"):
        sizes = part.strip(" []\"'").split(",")
        whole = all(size.strip().isdecimal() for size in sizes)
        shapes.append(tuple(map(int, sizes)) if whole else ())
    return tuple(shapes)


def _counted(row: Sequence[str], counters: Sequence[int]) -> int | None:
    """Bytes of the memory counters; N/A for a core that did not run."""
    kilobytes = [row[at].strip() for at in counters if at < len(row)]
    numbers = [float(text) for text in kilobytes if re.fullmatch(r"\d+(\.\d*)?", text)]
    return round(1024 * sum(numbers)) if numbers else None


class _Columns:
    """Where the columns of one table are."""

    def __init__(
        self, path: Path, header: Sequence[str], needed: Sequence[str], remarks: Remarks
    ) -> None:
        self.path = path
        self.header = [_plain(name) for name in header]
        self.places: dict[str, int] = {}
        for wanted, names in _NAMES.items():
            place = next((self.header.index(name) for name in names if name in self.header), None)
            if place is not None:
                self.places[wanted] = place
        for wanted in needed:
            if wanted not in self.places:
                raise self.lacking(wanted)

    def __contains__(self, wanted: str) -> bool:
        return wanted in self.places

    def cell(self, row: Sequence[str], wanted: str) -> str:
        """The cell without blanks; "" where there is no such column, and for ``N/A``."""
        place = self.places.get(wanted)
        if place is None or place >= len(row):
            return ""
        text = row[place].strip(" \t")
        return "" if text in ("N/A", "NA", "null") else text

    def breaks_off(self, row: Sequence[str], remarks: Remarks) -> bool:
        """Whether cells are missing: the writer was stopped, and the last figure may be cut."""
        if len(row) >= len(self.header):
            return False
        remarks.add(f"{{n}} rows of {self.path.name} break off and were left out.")
        return True

    def ending(self, names: Sequence[str]) -> list[int]:
        """Places of the columns whose names end so: ``aic_`` or ``aiv_`` may stand before."""
        return [at for at, name in enumerate(self.header) if name.endswith(tuple(names))]

    def lacking(self, wanted: str) -> UsageError:
        names = " or ".join(repr(name) for name in _NAMES[wanted])
        shown = repr(", ".join(self.header[:12])[:200]) if self.header else "nothing"
        return UsageError(
            "profile", str(self.path), f"a table with a column {names}", f"Its first line: {shown}."
        )


def _plain(name: str) -> str:
    """A column's name without what differs between exporters: case, blanks, the micro sign."""
    name = name.strip(" \t\"'").lower().replace("µ", "u").replace("μ", "u")
    return re.sub(r"\s+\(", "(", name)


def _rows(path: Path) -> Iterator[list[str]]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(line.replace("\0", "") for line in file)
        try:
            for row in reader:
                if row:
                    yield row
        except csv.Error as error:
            legal = "a table of values with commas"
            raise UsageError(
                "profile", f"{path}, line {reader.line_num}", legal, f"{error}."
            ) from None
