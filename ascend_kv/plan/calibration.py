"""How long the engine's steps take on one machine, measured there: the performance model of a CPU.

    step = step_seconds + decodes * decode_seconds + prefill_tokens * prefill_token_seconds
         + decode_context * context_seconds + prefill_pairs * pair_seconds

The five are fitted to steps that the engine really ran (``evaluate.calibrate_steps``), one set for
each cache format, since reading the cache costs what the format costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.plan.fitting import least_relative_squares
from ascend_kv.plan.performance import Clock, Load, StepTime

SCHEMA = "ascend_kv.calibration/1"
_FEATURES = {
    "step_seconds": "step",
    "decode_seconds": "tokens",
    "prefill_token_seconds": "prompt",
    "context_seconds": "cache",
    "pair_seconds": "prompt's attention",
}
"""Parameter -> what it is called where it bounds a step."""


class MeasuredStep(NamedTuple):
    """One step of the engine: what it did and how long it took."""

    load: Load
    seconds: float


@dataclass(frozen=True)
class StepCosts:
    """Of one cache format on one machine, in seconds.

    Attributes:
        step_seconds: of a step, whatever it does.
        decode_seconds: of each sequence that brings one token.
        prefill_token_seconds: of each token of a prompt.
        context_seconds: of each token that a decoding sequence attends to.
        pair_seconds: of each pair of a prompt's token and one it attends to.
        spread: half of the steps were this share or less away from the fit.
    """

    step_seconds: float
    decode_seconds: float
    prefill_token_seconds: float
    context_seconds: float
    pair_seconds: float
    spread: float

    def step_time(self, load: Load, factor: float = 1.0) -> StepTime:
        """The time of a step; ``factor`` for the ends of the range."""
        parts = {
            _FEATURES[name]: factor * value * getattr(self, name)
            for name, value in _features(load).items()
        }
        return StepTime(sum(parts.values()), parts, max(parts, key=parts.__getitem__))


def _features(load: Load) -> dict[str, float]:
    return {
        "step_seconds": 1.0,
        "decode_seconds": float(load.decodes),
        "prefill_token_seconds": float(load.prefill_tokens),
        "context_seconds": float(load.decode_context),
        "pair_seconds": float(load.prefill_pairs),
    }


def fit_steps(steps: Sequence[MeasuredStep]) -> StepCosts:
    """The costs that explain measured steps best, in relative error.

    Args:
        steps: with and without prompts, of several batches and contexts.
    """
    rows = [(_features(step.load), step.seconds, 0.0) for step in steps]
    costs = StepCosts(**least_relative_squares(rows, list(_FEATURES)), spread=0.0)
    errors = sorted(abs(costs.step_time(step.load).seconds / step.seconds - 1) for step in steps)
    return StepCosts(**{**asdict(costs), "spread": errors[len(errors) // 2]})


@dataclass(frozen=True)
class Calibration:
    """A machine, as the engine finds it.

    Attributes:
        machine: in words.
        model: what ran.
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
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> Calibration:
    """What ``Calibration.write`` wrote.

    Raises:
        UsageError: no such file, or another kind of file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}")
        formats = {name: StepCosts(**costs) for name, costs in content["formats"].items()}
        return Calibration(content["machine"], content["model"], formats)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        legal = f"a file that --save-calibration wrote ({SCHEMA})"
        raise UsageError("--calibration", str(path), legal, f"{error}.") from None
