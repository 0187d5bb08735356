"""What an evaluation finds, as plain records; ``report.json`` is these records written down."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ascend_kv.evaluate.machine import Machine
from ascend_kv.evaluate.results import ModelInfo, TextInfo

SCHEMA = "ascend_kv.eval/1"
"""Name and version of the layout of ``report.json``; a key that changes its meaning raises it."""


@dataclass(frozen=True)
class Interval:
    """A value with its two-sided 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """What a policy's cache takes."""

    formats: str
    """Of the layers, in few words."""
    block_size: int
    """Tokens a block; 0 where the cache is not paged."""
    bytes_per_token: float
    """Keys and values of one token in all layers, scales and zero points included."""
    bits_per_value: float
    """The same over the numbers in them."""
    tokens: int
    """Length of the sequence for which these hold: of ours, which the static scales may follow, the
    model's longest; of transformers', the one that was measured."""
    residual: str
    """What is read in full precision, which the two figures above leave out."""
    static_bytes: int
    """Once a model, not for every token: static scales, the key offset."""
    key_conditioning: str


@dataclass(frozen=True)
class PolicyRow:
    """One policy, as it ran."""

    name: str
    settings: dict[str, Any]
    cost: Cost


@dataclass(frozen=True)
class Skipped:
    """A policy, or one task of it, that was left out."""

    policy: str
    task: str
    """Empty where it is all of them."""
    reason: str


@dataclass(frozen=True)
class PerplexityRow:
    """One policy on the windows of text that it and the reference have scored."""

    policy: str
    windows: int
    tokens: int
    clusters: int
    not_finite: int
    """Tokens whose loss or divergence is not a finite number; there are no figures then."""
    perplexity: float | None
    change: Interval | None
    """Perplexity over the reference's; None for the reference itself."""
    divergence: Interval | None
    """KL(reference || policy) in nats a token."""
    agreement: Interval | None
    """Share of tokens at which the likeliest next token is the reference's."""
    seconds: float


@dataclass(frozen=True)
class GenerationRow:
    """Greedy continuations against the reference's."""

    policy: str
    prompts: int
    tokens: int
    """Tokens of each continuation."""
    identical: float
    """Share of continuations without a difference."""
    agreeing_tokens: float
    """Tokens before the first difference, mean."""
    interval: Interval | None
    """Of ``agreeing_tokens`` over ``tokens``; None where there are too few prompts."""


@dataclass(frozen=True)
class AnswerRow:
    """One policy on the questions of one task."""

    policy: str
    task: str
    questions: int
    clusters: int
    """Of them that count as independent: the depths of one needle are one."""
    exact: float
    """Share of answers that greedy decoding gives exactly."""
    token_accuracy: float
    """Share of the answers' tokens that are the likeliest, given those before."""
    log_probability: float | None
    """Nats a token of the answers, mean; None where a logit was not finite."""
    differing: int
    """Answers that are exact with one of policy and reference and not with the other."""
    exact_change: Interval | None
    """``exact`` less the reference's; None for the reference, or where too few to say."""
    log_probability_change: Interval | None


@dataclass(frozen=True)
class NeedlePoint:
    """One length and depth of the needle task."""

    policy: str
    length: int
    depth: float
    """Percent of the text that come before the needle."""
    exact: float
    log_probability: float | None


@dataclass(frozen=True)
class HarnessRow:
    """One figure of an lm-evaluation-harness task."""

    policy: str
    task: str
    metric: str
    value: float
    error: float | None
    """Standard error as the library gives it."""
    cut: str
    """What did not fit into the longest sequence, with counts, in all that was asked for at once;
    empty where everything fitted."""


@dataclass
class EvalResult:
    """Everything, made anew from the cells whenever it is written."""

    started: str
    """ISO 8601, UTC; of the latest run where it was resumed."""
    quick: bool
    machine: Machine
    operators: dict[str, str]
    """Which implementation serves each operator on this device, called or not."""
    whole_number_bits: int | None
    """Bits to which compiled attention rounds what codes are multiplied with; None: float32's."""
    model: ModelInfo
    text: TextInfo
    recipe: dict[str, Any]
    """Tasks and their settings as they ran."""
    cells: int = 0
    """(policy, task, item) cells there are to be."""
    cells_done: int = 0
    policies: list[PolicyRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    perplexity: list[PerplexityRow] = field(default_factory=list)
    generation: list[GenerationRow] = field(default_factory=list)
    answers: list[AnswerRow] = field(default_factory=list)
    needles: list[NeedlePoint] = field(default_factory=list)
    harness: list[HarnessRow] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Of the latest run."""

    @property
    def complete(self) -> bool:
        """Whether no cell is missing."""
        return self.cells_done == self.cells

    def as_json(self) -> dict[str, Any]:
        """The content of ``report.json``."""
        content = asdict(self)
        content["machine"] = self.machine._asdict()
        return {"schema": SCHEMA, "complete": self.complete} | content
