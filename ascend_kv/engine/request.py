"""What a user asks for, what comes back, and a request's state in between.

Argument and result names are vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ascend_kv.errors import UsageError

_LEAST_TEMPERATURE = 1e-5
"""Below it float32 logits divided by the temperature lose their meaning."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: most tokens to generate, 1 or more.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_p: sample from the smallest set of tokens whose probability reaches this, (0, 1].
        seed: makes this request's tokens repeatable, whatever else is in the batch.
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: further tokens that end the generation.

    Raises:
        UsageError: a value out of its range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise UsageError("max_tokens", self.max_tokens, "an integer, 1 or more")
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UsageError(
                "temperature", self.temperature, f"0 (greedy), or {_LEAST_TEMPERATURE} and more"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p", self.top_p, "above 0 and up to 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError("seed", self.seed, "None or 0 to 2**63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature == 0


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``stop`` (a stop token), ``length`` (max_tokens or max_model_len), ``error``; None before."""


@dataclass
class RequestOutput:
    """A request's state as the user sees it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    """Why the request was refused or given up; None when it was served."""


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request inside the engine.

    ``num_computed`` counts the tokens whose keys and values are in the cache. It is behind
    ``num_tokens`` by one while decoding, by more in prefill, and goes to 0 at a preemption.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self._token_ids = list(self.prompt_token_ids)
        self._stop_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._stop_ids |= self.eos_token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output tokens; the caller must not change the list."""
        return self._token_ids

    def append(self, token_id: int, max_sequence_tokens: int) -> None:
        """Take a sampled token and decide whether the request is finished."""
        self.output_token_ids.append(token_id)
        self._token_ids.append(token_id)
        if token_id in self._stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.params.max_tokens or (
            self.num_tokens >= max_sequence_tokens
        ):
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.status = Status.FINISHED

    def fail(self, error: str) -> None:
        """Finish without a further token."""
        self.error = error
        self.finish_reason = "error"
        self.status = Status.FINISHED

    def output(self) -> RequestOutput:
        """A snapshot for the user; its list of generated tokens is a copy."""
        completion = CompletionOutput(0, "", list(self.output_token_ids), self.finish_reason)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=self.status is Status.FINISHED,
            error=self.error,
        )
