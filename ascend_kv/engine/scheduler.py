"""Chooses what runs in a step: continuous batching with chunked prefill and preemption.

Every step has a budget of tokens. Running requests come first, decodes before prefill chunks;
what is left admits waiting requests, first come first served, while blocks are free. When a
running request cannot grow, the one admitted last gives its blocks back and will recompute
them later (Kwon et al., SOSP 2023, section 4.5: preemption by recomputation).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.request import Request, Status
from ascend_kv.errors import UsageError

_ADMISSION_HEADROOM = 0.01
"""Share of the blocks that admission leaves free, so that running requests can grow at once."""


class Work(NamedTuple):
    """The tokens of one request that run in this step."""

    request: Request
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token, so that a new one is sampled."""
        return self.stop == self.request.num_tokens


class Schedule(NamedTuple):
    """One step: its work, decodes first, and the requests that lost their blocks for it."""

    work: list[Work]
    preempted: list[Request]


class Scheduler:
    """Owns the queues; asks the tables for blocks."""

    def __init__(self, config: SchedulerConfig, tables: SequenceTables) -> None:
        self.config = config
        self.tables = tables
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._headroom_blocks = int(_ADMISSION_HEADROOM * tables.num_blocks)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt and output together that the model and the cache allow."""
        return min(self.config.max_model_len, self.tables.max_sequence_tokens)

    def check(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            UsageError: it is empty, or longer than the model or the cache allows.
        """
        length, longest = len(request.prompt_token_ids), self.max_sequence_tokens
        if length == 0:
            raise UsageError("prompt", "an empty prompt", "a prompt of 1 token or more")
        if length >= longest:
            raise UsageError(
                "prompt",
                f"{length} tokens",
                f"at most {longest - 1} tokens, so that one more fits into max_model_len "
                f"({self.config.max_model_len}) and the cache ({self.tables.max_sequence_tokens})",
            )

    def add(self, request: Request) -> None:
        """Queue a request that ``check`` has passed."""
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Pick this step's work and reserve its blocks."""
        preempted: list[Request] = []
        work = self._grow_running(preempted)
        budget = self.config.max_num_batched_tokens - sum(item.num_tokens for item in work)
        if not preempted:
            work += self._admit(budget)
        work.sort(key=lambda item: item.num_tokens != 1)  # stable: decodes first
        return Schedule(work, preempted)

    def remove(self, request: Request) -> None:
        """Take a request out of its queue and give back its blocks."""
        if self.tables.holds(request.key):
            self.running.remove(request)
            self.tables.release(request.key)
        else:
            self.waiting.remove(request)

    def _grow_running(self, preempted: list[Request]) -> list[Work]:
        budget = self.config.max_num_batched_tokens
        work: list[Work] = []
        decoding_first = sorted(self.running, key=lambda r: r.num_tokens - r.num_computed != 1)
        for request in decoding_first:
            if request.status is not Status.RUNNING:  # preempted for one before it
                continue
            tokens = min(request.num_tokens - request.num_computed, budget)
            if tokens == 0:
                break
            stop = request.num_computed + tokens
            if self._reserve(request, stop, preempted):
                work.append(Work(request, request.num_computed, stop))
                budget -= tokens
        return work

    def _reserve(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Make room for ``request``, preempting from the end; False if it preempted itself.

        Only decodes can fail to grow (a prefill was reserved whole), and they are visited in
        order of admission, so a victim is never one whose work is already in the step.
        """
        while not self.tables.reserve(request.key, num_tokens):
            victim = self.running.pop()
            self.tables.release(victim.key)
            victim.status = Status.WAITING
            victim.num_computed = 0
            self.waiting.appendleft(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: int) -> list[Work]:
        work: list[Work] = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            tokens = min(request.num_tokens, budget)
            if tokens < request.num_tokens and not self.config.enable_chunked_prefill:
                break
            # With nothing running no headroom is needed, and waiting for it would never end.
            headroom = self._headroom_blocks if self.running else 0
            if not self.tables.can_admit(request.num_tokens, headroom):
                break
            # The whole known sequence is reserved, so that no half-done prefill is preempted
            # by the next one.
            reserved = self.tables.reserve(request.key, request.num_tokens)
            assert reserved, "can_admit() promised room"
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            work.append(Work(request, 0, tokens))
            budget -= tokens
        return work
