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
        features: what it did, by the name of the parameter that says what such a thing costs.
        roofline_seconds: the least time its bytes and operations take at published peaks.
        tokens_per_rate: the published figure is this over the step's seconds; 0 where the seconds
            themselves were published.
        extra_seconds: what the model adds without fitting, such as collectives.
    """

    name: str
    seconds: float
    features: Mapping[str, float]
    roofline_seconds: float
    tokens_per_rate: float = 0.0
    extra_seconds: float = 0.0

    def published(self, seconds: float | None = None) -> float:
        """The published figure, or what it would be for a step of ``seconds``."""
        seconds = self.seconds if seconds is None else seconds
        return self.tokens_per_rate / seconds if self.tokens_per_rate else seconds

    @property
    def efficiency(self) -> float:
        """Roofline over measured: 1 is as fast as the card can be."""
        return self.roofline_seconds / self.seconds


_UNFITTED = {"roofline_factor": 1.0, "stack": 1.0}
"""What a parameter is where it is not fitted; others are 0."""


def dense_step(
    name: str,
    seconds: float,
    layers: int,
    tokens: float,
    roofline_seconds: float,
    tokens_per_rate: float = 0.0,
    extra_seconds: float = 0.0,
) -> Step:
    """A decode step of a model whose attention is not sparse.

    Its features: "layer_seconds", the layers; "token_seconds", decoded tokens on one card; and
    "roofline_factor", which is 1 / memory_efficiency.
    """
    features = {
        "layer_seconds": float(layers),
        "token_seconds": tokens,
        "roofline_factor": roofline_seconds,
    }
    return Step(name, seconds, features, roofline_seconds, tokens_per_rate, extra_seconds)


def fit(steps: Sequence[Step], free: Sequence[str]) -> dict[str, float]:
    """Values of all parameters: those named fitted, the others 0, or 1 where they are factors.

    Args:
        steps: at least as many as there are free parameters.
        free: features of the steps, those that matter most first: from the last one on they are
            left out as long as the rows cannot tell them apart.
    """
    assert len(steps) >= len(free), "more parameters than rows"
    rows = []
    for step in steps:
        known = step.extra_seconds + sum(
            _UNFITTED.get(name, 0.0) * value
            for name, value in step.features.items()
            if name not in free
        )
        rows.append(({name: step.features.get(name, 0.0) for name in free}, step.seconds, known))
    every = {name for step in steps for name in step.features}
    unfitted = {name: _UNFITTED.get(name, 0.0) for name in every}
    return unfitted | least_relative_squares(rows, free)


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
    return step.extra_seconds + sum(
        values[name] * value for name, value in step.features.items() if name in values
    )


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


def leave_one_out(
    steps: Sequence[Step], free: Sequence[str], more: Sequence[Step] = ()
) -> list[Held]:
    """Every row from all others, and from ``more``, which the mean does not see."""
    return [
        hold_out(step, [other for other in steps if other is not step], free, more)
        for step in steps
    ]


def hold_out(
    step: Step, others: Sequence[Step], free: Sequence[str], more: Sequence[Step] = ()
) -> Held:
    """One row from ``others`` and ``more``."""
    values = fit([*others, *more], free)
    constant = sum(other.published() for other in others) / len(others)
    predicted = step.published(predict_seconds(step, values))
    return Held(step.name, step.published(), predicted, constant, step.efficiency)
