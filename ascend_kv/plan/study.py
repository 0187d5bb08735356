"""A set of published rows that were measured in one way, and what a fit to them says."""

from __future__ import annotations

from typing import NamedTuple

from ascend_kv.plan.fitting import Held, Step, fit, leave_one_out
from ascend_kv.plan.performance import Costs

FAR = 0.25
"""A claim whose step takes more than four times its roofline is called far from it."""


class Study(NamedTuple):
    """Rows that were measured in one way, and how they are fitted.

    Attributes:
        name: short.
        source: where they were read.
        unit: of the published figure.
        steps: the rows.
        free: parameters that these rows can tell apart.
        remark: what a reader has to know.
        more: steps of other sets of rows that the same parameters are fitted to.
    """

    name: str
    source: str
    unit: str
    steps: tuple[Step, ...]
    free: tuple[str, ...]
    remark: str
    more: tuple[Step, ...] = ()

    def values(self) -> dict[str, float]:
        """The parameters fitted to all rows."""
        return fit([*self.steps, *self.more], self.free)

    def costs(self, cube_efficiency: float) -> Costs:
        """What the values are to a model whose attention is not sparse."""
        values = self.values()
        return Costs(
            values["layer_seconds"],
            values["token_seconds"],
            1 / values["roofline_factor"],
            cube_efficiency,
        )

    def held_out(self) -> list[Held]:
        """Every row predicted from all others."""
        return leave_one_out(self.steps, self.free, self.more)
