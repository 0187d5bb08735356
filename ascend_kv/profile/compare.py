"""Two profiles side by side: what a change made faster, and what slower."""

from __future__ import annotations

from typing import Any, NamedTuple

from ascend_kv.profile.attribution import PARTS
from ascend_kv.profile.summary import Profile


class Row(NamedTuple):
    """One part or operator in both; nanoseconds of a step, or of the whole."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def ratio(self) -> float | None:
        return self.after_ns / self.before_ns if self.before_ns else None

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return "new" if self.after_ns else "-"
        return "gone" if not self.after_ns else f"{self.ratio:.2f}"


class Comparison(NamedTuple):
    """What changed.

    Attributes:
        unit: "per step" where both profiles know their steps, else "whole profiles".
        remark: what to mind when reading it.
        parts: by ``PARTS``, and "together" last.
        operators: of both, by name.
    """

    unit: str
    remark: str
    parts: list[Row]
    operators: list[Row]

    def as_json(self) -> dict[str, Any]:
        """For a machine, in seconds."""
        return {
            "unit": self.unit,
            "remark": self.remark,
            **{
                name: [
                    {
                        "name": row.name,
                        "before_seconds": row.before_ns / 1e9,
                        "after_seconds": row.after_ns / 1e9,
                        "ratio": row.ratio,
                    }
                    for row in rows
                ]
                for name, rows in (("parts", self.parts), ("operators", self.operators))
            },
        }


def compare(before: Profile, after: Profile) -> Comparison:
    """Compare two profiles: by the step where both have steps, as wholes where not."""
    by_step = bool(before.steps and after.steps)
    remark = (
        f"Means of {len(before.steps)} and {len(after.steps)} steps; an operator's time outside "
        "of the steps is spread over them."
        if by_step
        else "Times of whole profiles, mean over the devices: they compare only if both ran the "
        "same work."
    )
    if before.on_host != after.on_host:
        remark += " One was profiled on a CPU and one on a device."
    parts = [Row(part, _part(before, part, by_step), _part(after, part, by_step)) for part in PARTS]
    together = Row(
        "together", sum(row.before_ns for row in parts), sum(row.after_ns for row in parts)
    )
    times = [_operators(profile, by_step) for profile in (before, after)]
    operators = [
        Row(name, times[0].get(name, 0.0), times[1].get(name, 0.0))
        for name in dict.fromkeys((*times[0], *times[1]))
    ]
    return Comparison(
        "per step" if by_step else "whole profiles", remark, [*parts, together], operators
    )


def _part(profile: Profile, part: str, by_step: bool) -> float:
    if by_step:
        return sum(step.parts_ns[part] for step in profile.steps) / len(profile.steps)
    return profile.part_ns(part)


def _operators(profile: Profile, by_step: bool) -> dict[str, float]:
    times: dict[str, float] = {}
    for operator in profile.operators:
        share = len(profile.lanes) * (len(profile.steps) if by_step else 1)
        times[operator.name] = times.get(operator.name, 0.0) + operator.time_ns / share
    return times
