"""How long the engine's steps take on one machine, measured there: the performance model of a CPU.

    step = curve(decodes) + prefill_tokens * prefill_token_seconds
         + decode_context * context_seconds + prefill_pairs * pair_seconds

The curve goes through a few batches and is straight between them: a processor's matrix products of
few rows cost anything but a constant for each row. All values are fitted to steps that the engine
really ran (``evaluate.calibrate_steps``), one set for each cache format, since reading the cache
costs what the format costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.plan.fitting import least_relative_squares
from ascend_kv.plan.performance import Clock, Load, StepTime
from ascend_kv.whole_files import write_whole

SCHEMA = "ascend_kv.calibration/1"
BATCHES = (0, 1, 4, 8, 16, 32)
"""Decoding sequences at which the curve has its corners."""


_FITS = 8
"""Each with the scales of the one before; after a few nothing changes any more."""


class MeasuredStep(NamedTuple):
    """One step of the engine: what it did and how long it took."""

    load: Load
    seconds: float


@dataclass(frozen=True)
class StepCosts:
    """Of one cache format on one machine, in seconds.

    Attributes:
        curve_seconds: of a step without prompts at each of ``BATCHES``; beyond the last it goes on
            with the mean slope of the whole curve.
        prefill_token_seconds: of each token of a prompt.
        context_seconds: of each token that a decoding sequence attends to.
        pair_seconds: of each pair of a prompt's token and one it attends to.
        spread: half of the steps were this share or less away from the fit.
    """

    curve_seconds: tuple[float, ...]
    prefill_token_seconds: float
    context_seconds: float
    pair_seconds: float
    spread: float

    def step_time(self, load: Load, factor: float = 1.0) -> StepTime:
        """The time of a step; ``factor`` for the ends of the range."""
        shares = _curve_shares(min(load.decodes, BATCHES[-1]))
        slope = max(0.0, self.curve_seconds[-1] - self.curve_seconds[0]) / BATCHES[-1]
        beyond = max(0, load.decodes - BATCHES[-1]) * slope
        parts = {
            "step": shares[0] * self.curve_seconds[0],
            "tokens": beyond
            + sum(
                share * seconds
                for share, seconds in zip(shares[1:], self.curve_seconds[1:], strict=True)
            ),
            "prompt": load.prefill_tokens * self.prefill_token_seconds,
            "cache": load.decode_context * self.context_seconds,
            "prompt's attention": load.prefill_pairs * self.pair_seconds,
        }
        parts = {name: factor * seconds for name, seconds in parts.items()}
        return StepTime(sum(parts.values()), parts, max(parts, key=parts.__getitem__))


def _curve_shares(decodes: int) -> list[float]:
    """How much each corner of the curve has to do with a step of so many sequences."""
    shares = [0.0] * len(BATCHES)
    above = next((i for i, batch in enumerate(BATCHES) if batch > decodes), len(BATCHES) - 1)
    left, right = BATCHES[above - 1], BATCHES[above]
    shares[above] = (decodes - left) / (right - left)
    shares[above - 1] = 1 - shares[above]
    return shares


def _features(load: Load) -> dict[str, float]:
    corners = {f"at {n}": x for n, x in zip(BATCHES, _curve_shares(load.decodes), strict=True)}
    return corners | {
        "prefill_token_seconds": float(load.prefill_tokens),
        "context_seconds": float(load.decode_context),
        "pair_seconds": float(load.prefill_pairs),
    }


def fit_steps(steps: Sequence[MeasuredStep]) -> StepCosts:
    """The costs that explain measured steps best, in relative error, and their sum without bias.

    An error is taken relative to what the fit before gave for the step. Relative to what was
    measured, a step that something held up would count for less than one that went well, and the
    sum of many steps, which is what throughput is made of, would come out too small (by 2 to 9 %
    in ten runs of the main job's schemes).

    Args:
        steps: with and without prompts, of several batches and contexts.
    """
    scales = [step.seconds for step in steps]
    for _ in range(_FITS):
        costs = _fit(steps, scales)
        fitted = [costs.step_time(step.load).seconds for step in steps]
        scales = [new or old for new, old in zip(fitted, scales, strict=True)]
    errors = sorted(abs(costs.step_time(step.load).seconds / step.seconds - 1) for step in steps)
    return replace(costs, spread=errors[len(errors) // 2])


def _fit(steps: Sequence[MeasuredStep], scales: Sequence[float]) -> StepCosts:
    """Least squares of (fitted - measured) / scale."""
    rows = [
        (_features(step.load), scale, scale - step.seconds)
        for step, scale in zip(steps, scales, strict=True)
    ]
    found = least_relative_squares(rows, list(rows[0][0]))
    curve = tuple(found.pop(f"at {batch}") for batch in BATCHES)
    return StepCosts(curve, **found, spread=0.0)


@dataclass(frozen=True)
class Calibration:
    """A machine, as the engine finds it.

    Attributes:
        machine: in words.
        model: what ran, as ``PlannedModel.describe`` has it.
        formats: cache format -> its costs.
    """

    machine: str
    model: str
    formats: Mapping[str, StepCosts]

    def clocks(self, format_name: str) -> dict[str, Clock]:
        """ "low", "best" and "high" for one format.

        Raises:
            UsageError: a format that was not measured.
        """
        costs = self.formats.get(format_name)
        if costs is None:
            hint = f"Measure it: --calibrate --formats {format_name.partition('/')[0]}."
            raise UsageError("--formats", format_name, self.formats, hint)

        def clock(factor: float) -> Clock:
            return lambda load: costs.step_time(load, factor)

        return {
            "low": clock(1 - costs.spread), "best": clock(1.0), "high": clock(1 + costs.spread)
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """As JSON, for ``read_calibration``."""
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "model": self.model,
            "formats": {name: asdict(costs) for name, costs in self.formats.items()},
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")


def read_calibration(path: Path) -> Calibration:
    """What ``Calibration.write`` wrote.

    Raises:
        UsageError: no such file, or another kind of file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}")
        formats = {
            name: StepCosts(**{**costs, "curve_seconds": tuple(costs["curve_seconds"])})
            for name, costs in content["formats"].items()
        }
        return Calibration(content["machine"], content["model"], formats)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        legal = f"a file that --save-calibration wrote ({SCHEMA})"
        raise UsageError("--calibration", str(path), legal, f"{error}.") from None
