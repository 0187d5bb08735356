"""Fits the model's parameters to measured steps, and says how well it predicts what it did not see.

Few rows and few parameters: linear least squares of relative errors, negative solutions pinned to
zero. Every set of rows is also predicted row by row from the others (leave one out), beside a
predictor that knows no model at all and gives the mean of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One measured step, ready to be fitted.

    Attributes:
        name: what was run.
        seconds: of the step.
        layers: of the model.
        tokens: decoded tokens of the step on one card.
        roofline_seconds: the least time its bytes and operations take at published peaks.
        tokens_per_rate: the published figure is this over the step's seconds; 0 where the seconds
            themselves were published.
        extra_seconds: what the model adds without fitting, such as collectives.
        drafts: tokens that a draft layer proposes one after the other before the step.
    """

    name: str
    seconds: float
    layers: int
    tokens: float
    roofline_seconds: float
    tokens_per_rate: float = 0.0
    extra_seconds: float = 0.0
    drafts: int = 0

    def published(self, seconds: float | None = None) -> float:
        """The published figure, or what it would be for a step of ``seconds``."""
        seconds = self.seconds if seconds is None else seconds
        return self.tokens_per_rate / seconds if self.tokens_per_rate else seconds

    @property
    def efficiency(self) -> float:
        """Roofline over measured: 1 is as fast as the card can be."""
        return self.roofline_seconds / self.seconds


FREE = ("layer_seconds", "token_seconds", "roofline_factor", "draft_seconds")
"""What can be fitted; ``roofline_factor`` is 1 / memory_efficiency."""
_UNFITTED = {name: float(name == "roofline_factor") for name in FREE}


def _feature(step: Step, name: str) -> float:
    return {
        "layer_seconds": float(step.layers),
        "token_seconds": step.tokens,
        "roofline_factor": step.roofline_seconds,
        "draft_seconds": float(step.drafts),
    }[name]


def fit(steps: Sequence[Step], free: Sequence[str]) -> dict[str, float]:
    """Values of all of ``FREE``: those named fitted, the others 0, or 1 for the roofline.

    Args:
        steps: at least as many as there are free parameters.
        free: some of ``FREE``, those that matter most first: from the last one on they are left
            out as long as the rows cannot tell them apart.
    """
    assert len(steps) >= len(free), "more parameters than rows"
    values = dict(_UNFITTED)
    fixed = [name for name in FREE if name not in free]
    rows = []
    for step in steps:
        known = step.extra_seconds + sum(values[name] * _feature(step, name) for name in fixed)
        rows.append(({name: _feature(step, name) for name in free}, step.seconds, known))
    return values | least_relative_squares(rows, free)


Row = tuple[Mapping[str, float], float, float]
"""Features by name, what was measured, and how much of that is known already."""


def least_relative_squares(rows: Sequence[Row], free: Sequence[str]) -> dict[str, float]:
    """Factors, none negative, that make features match what was measured.

    The sum of squares of (known + sum of factors x features - measured) / measured is smallest.
    A factor that would be negative is 0; from the last name on, factors that the rows cannot tell
    apart are 0 too.

    Args:
        rows: measurements.
        free: the features' names, those that matter most first.
    """
    values = dict.fromkeys(free, 0.0)
    left = [name for name in free if any(features[name] for features, _, _ in rows)]
    while left:
        solution = _solve(rows, left)
        if solution is None:
            left.pop()
            continue
        negative = [name for name, value in solution.items() if value < 0]
        if not negative:
            return values | solution
        left.remove(min(negative, key=solution.__getitem__))
    return values


def _solve(measured: Sequence[Row], free: Sequence[str]) -> dict[str, float] | None:
    """Normal equations by Gaussian elimination; None where they are singular."""
    rows = [
        ([features[name] / seconds for name in free], (seconds - known) / seconds)
        for features, seconds, known in measured
    ]
    # Columns of one length each, so that a singular system shows as a pivot near 0.
    lengths = [sum(row[i] ** 2 for row, _ in rows) ** 0.5 for i in range(len(free))]
    scaled = [([x / n for x, n in zip(row, lengths, strict=True)], y) for row, y in rows]
    size = len(free)
    matrix = [
        [sum(row[i] * row[j] for row, _ in scaled) for j in range(size)]
        + [sum(row[i] * target for row, target in scaled)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=[abs(line[column]) for line in matrix].__getitem__)
        if abs(matrix[pivot][column]) < 1e-9:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [
                    a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)
                ]
    return {name: matrix[i][size] / matrix[i][i] / lengths[i] for i, name in enumerate(free)}


def predict_seconds(step: Step, values: Mapping[str, float]) -> float:
    """The step's time by fitted values."""
    return step.extra_seconds + sum(values[name] * _feature(step, name) for name in FREE)


class Held(NamedTuple):
    """One row predicted from others.

    Attributes:
        name: of the row.
        published: figure.
        predicted: from the other rows.
        constant: their mean, which is what one would say without a model.
        efficiency: roofline over measured time.
    """

    name: str
    published: float
    predicted: float
    constant: float
    efficiency: float

    @property
    def error(self) -> float:
        """Of the prediction, relative, with its sign."""
        return self.predicted / self.published - 1

    @property
    def constant_error(self) -> float:
        return self.constant / self.published - 1


def leave_one_out(steps: Sequence[Step], free: Sequence[str]) -> list[Held]:
    """Every row from all others."""
    return [hold_out(step, [other for other in steps if other is not step], free) for step in steps]


def hold_out(step: Step, others: Sequence[Step], free: Sequence[str]) -> Held:
    """One row from ``others``."""
    predicted = step.published(predict_seconds(step, fit(others, free)))
    constant = sum(other.published() for other in others) / len(others)
    return Held(step.name, step.published(), predicted, constant, step.efficiency)
