"""How the tokens of a request are chosen, and when it stops. Names and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_kv.errors import UsageError

LEAST_TEMPERATURE = 1e-5
"""Below it float32 logits divided by the temperature lose their meaning."""

MOST_LOGPROBS = 1024
_PENALTIES = ("frequency_penalty", "presence_penalty")
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", *_PENALTIES)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The order in which they act: min_tokens, the three penalties, then the likeliest token
    (temperature 0) or temperature, min_p, top_k, top_p and a draw from what is left.

    Attributes:
        n: continuations of one prompt, each with a random stream of its own.
        max_tokens: most tokens to generate, 1 or more; None: as many as ``max_model_len`` allows.
        min_tokens: no stop token is chosen and no stop string counts before so many.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_p: keep the smallest set of tokens whose probability reaches this, (0, 1].
        top_k: keep the likeliest so many; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest, [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and output less likely: positive
            logits are divided by it, negative ones multiplied.
        frequency_penalty: taken off a token's logit for every time it was generated, -2 to 2.
        presence_penalty: taken off once if it was generated at all, -2 to 2.
        seed: makes this request's tokens repeatable, whatever else is in the batch.
        ignore_eos: go on after an end-of-sequence token.
        stop: strings that end the generation wherever they appear, across tokens too; None as ().
        stop_token_ids: further tokens that end the generation; None as ().
        include_stop_str_in_output: whether ``text`` keeps the stop string.
        skip_special_tokens: whether ``text`` leaves special tokens out.
        logprobs: log probabilities of the chosen token and of the likeliest so many, computed
            from the model's logits before any of the above; None for none.
        prompt_logprobs: the same for every token of the prompt but the first.

    Raises:
        UsageError: a value out of its range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_whole("n", self.n, 1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_whole("top_k", self.top_k, -1)
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UsageError(name, value, "a number")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            legal = f"0 (greedy), or {LEAST_TEMPERATURE} and more"
            raise UsageError("temperature", self.temperature, legal)
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p", self.top_p, "above 0 and up to 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError("min_p", self.min_p, "0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError("repetition_penalty", self.repetition_penalty, "above 0, finite")
        for name in _PENALTIES:
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(name, getattr(self, name), "-2 to 2")
        if self.seed is not None:
            check_whole("seed", self.seed, 0, 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MOST_LOGPROBS)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(name, getattr(self, name), "True, False")
        self._check_stops()

    def _check_stops(self) -> None:
        strings, tokens = self.stop, self.stop_token_ids
        if isinstance(strings, str):
            strings = (strings,)
        if not _all(strings, lambda text: isinstance(text, str) and text != ""):
            raise UsageError("stop", self.stop, "a text, or a list of texts, none of them empty")
        if not _all(tokens, lambda token: type(token) is int):
            raise UsageError("stop_token_ids", tokens, "a list of integers")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether the likeliest token may not be the largest logit as the model gave it."""
        return (
            self.min_tokens > 0
            or self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


def _all(items: object, fits: Callable[[object], bool]) -> bool:
    """Whether ``items`` is None or a list of nothing but what fits."""
    return items is None or (
        isinstance(items, Sequence) and not isinstance(items, str) and all(map(fits, items))
    )


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse, under ``name``, what is not an integer in the range.

    Raises:
        UsageError: see above.
    """
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        legal = f"an integer, {least} or more" if most is None else f"an integer, {least} to {most}"
        raise UsageError(name, value, legal)
