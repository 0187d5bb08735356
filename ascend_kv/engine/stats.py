"""What the engine did, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ascend_kv.cache.stats import CacheStats

STEPS_KEPT = 100_000
"""Newest steps whose records are kept; totals count all of them."""


class StepRecord(NamedTuple):
    """One step of the engine."""

    num_decodes: int
    """Sequences that brought one token."""
    prefill_tokens: int
    """Tokens of prefill chunks, recomputed ones included."""
    running: int
    """Requests that hold blocks."""
    waiting: int
    """Requests in the queue."""
    preempted: int
    """Requests that lost their blocks in this step."""
    model_seconds: float
    """The model's forward, operators included."""
    step_seconds: float
    """The whole step."""
    cache: CacheStats
    """The cache while the model ran."""


@dataclass
class EngineStats:
    """Totals since the engine was made, and the newest steps."""

    num_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens whose keys and values were lost at preemptions and had to be computed again."""
    preemptions: int = 0
    model_seconds: float = 0.0
    step_seconds: float = 0.0
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    @property
    def engine_seconds(self) -> float:
        """Time spent outside the model's forward."""
        return self.step_seconds - self.model_seconds

    def record(self, step: StepRecord, generated: int, recomputed: int) -> None:
        """Add a step that sampled ``generated`` tokens and lost ``recomputed`` cached ones."""
        self.num_steps += 1
        self.generated_tokens += generated
        self.prefill_tokens += step.prefill_tokens
        self.recomputed_tokens += recomputed
        self.preemptions += step.preempted
        self.model_seconds += step.model_seconds
        self.step_seconds += step.step_seconds
        self.steps.append(step)
