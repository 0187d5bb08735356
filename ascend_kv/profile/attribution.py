"""To whom each nanosecond belongs: one pass over the tasks in order of time.

At every moment the time goes to the running task whose category comes first in ``CATEGORIES``,
and among those to the one that began first: on a device that settles what several streams do at
once, on a CPU an operator gets what it calls (``aten::linear`` what ``aten::addmm`` takes, and
``kv_cache_store`` all of its reference). Where nothing runs, the gap is the host's. So the parts
add up to the whole, and nothing counts twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ascend_kv.profile.categories import CATEGORIES, GAPS

GAP = len(CATEGORIES)
PARTS = (*CATEGORIES, GAPS)


@dataclass
class Step:
    """One step of one lane: from its beginning to that of the next; the last one to its end."""

    name: str
    start_ns: int
    end_ns: int
    parts_ns: list[int] = field(default_factory=lambda: [0] * len(PARTS))


@dataclass
class Attribution:
    """What one lane did.

    Attributes:
        start_ns, end_ns: from the first task's begin to the last one's end.
        parts_ns: by ``PARTS``; their sum is all of that time.
        operators_ns: operator -> the part of it that it got.
        longest_gap_ns: without a task.
        steps: in order; empty where the profile knows none.
    """

    start_ns: int
    end_ns: int
    parts_ns: list[int]
    operators_ns: dict[int, int]
    longest_gap_ns: int
    steps: list[Step]


def attribute(
    tasks: Iterable[tuple[int, int, int]],
    categories: Sequence[int],
    steps: Sequence[tuple[int, int, str]] = (),
) -> Attribution:
    """Attribute the time of one lane.

    Args:
        tasks: start and end in nanoseconds and operator, in order of start; one or more.
        categories: operator -> index in ``CATEGORIES``.
        steps: start, end and name, in order, without overlap.
    """
    sweep = _Sweep(categories, steps)
    for start, end, operator in tasks:
        sweep.start(start, end, operator)
    return sweep.finish()


class _Sweep:
    """A clock that moves over the tasks, and those that still run."""

    def __init__(self, categories: Sequence[int], steps: Sequence[tuple[int, int, str]]) -> None:
        self.categories = categories
        self.parts = [0] * len(PARTS)
        self.operators: dict[int, int] = {}
        self.running: list[tuple[int, int, int, int]] = []  # category, number, end, operator
        self.number = 0
        self.first: int | None = None
        self.clock = 0
        self.last_end = 0
        self.longest_gap = 0
        self.steps = [Step(name, start, end) for start, end, name in steps]
        self.step = 0

    def start(self, start: int, end: int, operator: int) -> None:
        if self.first is None:
            self.first = self.clock = self.last_end = start
        self.advance(start)
        self.last_end = max(self.last_end, end)
        self.number += 1
        task = (self.categories[operator], self.number, end, operator)
        heapq.heappush(self.running, task)

    def advance(self, until: int) -> None:
        """Give away the time up to there."""
        while self.clock < until:
            while self.running and self.running[0][2] <= self.clock:
                heapq.heappop(self.running)
            if not self.running:
                self.longest_gap = max(self.longest_gap, until - self.clock)
                self.give(GAP, until)
                return
            category, _, end, operator = self.running[0]
            stop = min(end, until)
            self.operators[operator] = self.operators.get(operator, 0) + stop - self.clock
            self.give(category, stop)

    def give(self, part: int, until: int) -> None:
        """The time up to there to a part, cut where steps begin and end."""
        self.parts[part] += until - self.clock
        at = self.clock
        self.clock = until
        while self.step < len(self.steps):
            step = self.steps[self.step]
            inside = min(until, step.end_ns) - max(at, step.start_ns)
            if inside > 0:
                step.parts_ns[part] += inside
            if step.end_ns > until:
                return
            self.step += 1

    def finish(self) -> Attribution:
        assert self.first is not None, "a lane without a task"
        self.advance(self.last_end)
        return Attribution(
            self.first, self.last_end, self.parts, self.operators, self.longest_gap, self.steps
        )
