"""What comes back for a request. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """The log probability of one token at one place, from the model's own logits."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str | None = None
    """Its text; None without a tokenizer."""


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``stop``, ``length`` (max_tokens, or the longest sequence), ``abort`` or ``error``; None
    before the end."""
    stop_reason: int | str | None = None
    """The stop token or string that was met; None for the end-of-sequence token."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dictionary a generated token, by token id; None unless asked for."""


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, None for the first; None unless asked for."""
