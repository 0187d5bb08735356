"""What every reader makes of its file: tasks with a place in time, steps, and remarks.

Times are whole nanoseconds. Profiles give microseconds since 1970 with three digits behind the
point, which do not fit a float: at that size its steps are a quarter of a microsecond.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

MOST_STEPS = 100_000
"""Steps beyond this are left out of the timeline: what is kept must not grow with the file."""


class Lane(NamedTuple):
    """What runs one thing at a time, more or less: a device of one run, or a host process."""

    source: str
    """The folder or file it was read from."""
    device: str


class Task(NamedTuple):
    """One kernel, copy, collective, or, where nothing but a CPU was profiled, one operator.

    Attributes:
        lane: where it ran.
        name, type: as the profiler calls it; ``type`` is "" where the file has none.
        core: what ran it, such as ``AI_CORE``, ``COMMUNICATION`` or "" for a CPU.
        start_ns: None for a file without times of day.
        duration_ns: its own time.
        shapes, dtypes: of its inputs, in the file's own notation; "" where there are none.
        lengths: lists of whole numbers among its arguments, as text by their position.
        counted_bytes: moved to and from memory as the device counted it; None if it did not.
    """

    lane: Lane
    name: str
    type: str
    core: str
    start_ns: int | None
    duration_ns: int
    shapes: Shapes = ()
    dtypes: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    counted_bytes: int | None = None


Shapes = tuple[tuple[int, ...], ...]
"""One shape an input; () for scalars and for what is not given."""


@dataclass
class Steps:
    """Where steps begin and end, by lane and name; the lane None holds for all of them."""

    spans: dict[tuple[Lane | None, str], tuple[int, int]] = field(default_factory=dict)
    left_out: int = 0

    def add(self, lane: Lane | None, name: str, start_ns: int, end_ns: int) -> None:
        """Widen the step of that name so that it holds this span."""
        key = (lane, name)
        known = self.spans.get(key)
        if known is not None:
            self.spans[key] = (min(known[0], start_ns), max(known[1], end_ns))
        elif len(self.spans) < MOST_STEPS:
            self.spans[key] = (start_ns, end_ns)
        else:
            self.left_out += 1

    def of(self, lane: Lane) -> list[tuple[int, int, str]]:
        """The steps of a lane in order: start, end, name; each lasts until the next begins."""
        spans = sorted(
            (start, end, name) for (of, name), (start, end) in self.spans.items()
            if of is None or of == lane
        )  # fmt: skip
        return [
            (start, following[0] if following else end, name)
            for (start, end, name), following in zip(spans, [*spans[1:], None])
        ]


@dataclass
class Remarks:
    """What a reader has to say: each remark once, with how often it applied."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, remark: str) -> None:
        """Once more."""
        self.counts[remark] += 1

    def lines(self) -> list[str]:
        """The remarks; those about lines of a file with their number."""
        return [
            text.replace("{n}", f"{count:,}") if "{n}" in text else text
            for text, count in self.counts.items()
        ]


_MOST_MICROSECONDS = 2**63 // 1000


def to_nanoseconds(microseconds: str | int | float) -> int | None:
    """Exact; None for ``N/A``, an empty cell and what is no number or no time, 292 years and more.

    Args:
        microseconds: text such as "1714123456789012.345", perhaps with a tab or quotes, as msprof
            writes it for spreadsheets.
    """
    text = str(microseconds).strip(" \t\"'")
    whole, _, rest = text.partition(".")
    if whole.isdecimal() and len(whole) <= 16 and (not rest or rest.isdecimal()):  # the usual
        exact = int(whole) * 1000 + (int((rest + "00")[:3]) if rest else 0)
        return exact if exact < 2**63 else None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    is_time = number.is_finite() and number.copy_abs() < _MOST_MICROSECONDS
    return round(number * 1000) if is_time else None
