"""A request inside the engine: its tokens, how far they are computed, and when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ascend_kv.engine.detokenizer import Detokenizer
from ascend_kv.engine.outputs import CompletionOutput, Logprob
from ascend_kv.engine.params import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One continuation of one prompt.

    ``key`` names it inside the engine: tables and random streams are kept under it.
    ``num_computed`` counts the tokens whose keys and values are in the cache. It is behind
    ``num_tokens`` by one while decoding, by more in prefill, and goes to 0 at a preemption.
    """

    key: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    index: int = 0
    tokenizer: Any = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        # Prompt and output tokens known so far; only append() may change the list.
        self.token_ids = list(self.prompt_token_ids)
        params = self.params
        self.takes_best = params.greedy and not params.changes_logits and params.logprobs is None
        own_stops = frozenset(self.params.stop_tokens)
        self.stop_ids = own_stops if self.params.ignore_eos else own_stops | self.eos_token_ids
        self._detokenizer: Detokenizer | None = None
        if self.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self.tokenizer,
                self.params.skip_special_tokens,
                self.params.stop_strings,
                self.params.include_stop_str_in_output,
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be the last one by the user's wish."""
        return len(self.output_token_ids) >= self.params.min_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are left whose log probabilities were asked for."""
        return self.params.prompt_logprobs is not None and (
            len(self.prompt_logprobs) < len(self.prompt_token_ids)
        )

    def append(self, token_id: int, max_sequence_tokens: int) -> None:
        """Take a sampled token and decide whether the request is finished."""
        may_stop = self.may_stop
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        stopped = self._append_text(token_id)
        if may_stop and token_id in self.stop_ids:
            self._finish("stop", None if token_id in self.eos_token_ids else token_id)
        elif stopped is not None:
            self._finish("stop", stopped)
        elif self.num_tokens >= max_sequence_tokens or (
            len(self.output_token_ids) == self.params.max_tokens
        ):
            self._finish("length")

    def fail(self, error: str) -> None:
        """Finish without a further token."""
        self.error = error
        self._finish("error")

    def abort(self) -> None:
        """Finish because nobody wants the rest."""
        self._finish("abort")

    def completion(self) -> CompletionOutput:
        """A snapshot for the user; its lists are copies."""
        text = ""
        if self._detokenizer is not None:
            done = self.status is Status.FINISHED
            text = self._detokenizer.text if done else self._detokenizer.settled_text()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
        )

    def _append_text(self, token_id: int) -> str | None:
        """The stop string that this token completes."""
        if self._detokenizer is None:
            return None
        # Like a stop token, a stop string counts once min_tokens are there, this one included.
        counts = len(self.output_token_ids) >= self.params.min_tokens
        stop = self._detokenizer.append(token_id, counts)
        if stop is None:
            return None
        self._detokenizer.truncate(stop)
        return stop.string

    def _finish(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        if self._detokenizer is not None and not isinstance(stop_reason, str):
            self._detokenizer.finish()
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.status = Status.FINISHED
