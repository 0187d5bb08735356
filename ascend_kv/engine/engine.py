"""The loop: schedule, run the model, sample, give blocks back."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.batch import Batch, Model
from ascend_kv.engine.choice import token_logprobs
from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.request import Request, Status
from ascend_kv.engine.sampler import Sampler
from ascend_kv.engine.scheduler import Scheduler, Work
from ascend_kv.engine.stats import EngineStats, StepRecord
from ascend_kv.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass
class _Group:
    """The n continuations of one prompt, as the user knows them."""

    request_id: str
    prompt: str | None
    requests: list[Request]

    @property
    def asks_logprobs(self) -> bool:
        params = self.requests[0].params
        return params.logprobs is not None or params.prompt_logprobs is not None

    def output(self) -> RequestOutput:
        first = self.requests[0]
        asked = first.params.prompt_logprobs is not None
        finished, error = True, None
        for request in self.requests:
            finished &= request.status is Status.FINISHED
            error = error or request.error
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.prompt_token_ids,
            [request.completion() for request in self.requests],
            finished,
            error,
            list(first.prompt_logprobs) if asked else None,
        )


class Engine:
    """Serves requests of token ids with one model and one cache.

    Not thread-safe: one thread adds requests and calls ``step``.
    """

    def __init__(
        self,
        model: Model,
        tables: SequenceTables,
        config: SchedulerConfig,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        seed: int = 0,
        tokenizer: Any = None,
    ) -> None:
        """Join a model with the tables of its cache.

        Args:
            model: runs batches; its cache has the blocks that ``tables`` hands out.
            tables: block tables of the cache.
            config: limits of a step.
            eos_token_ids: tokens that end a sequence unless a request ignores them.
            vocab_size: prompts with a token at or above it are refused; None checks nothing.
            seed: for requests that bring no seed of their own.
            tokenizer: has ``decode(ids, skip_special_tokens=)``; without one no text is made
                and stop strings are refused.
        """
        self.model = model
        self.scheduler = Scheduler(config, tables)
        self.stats = EngineStats()
        self.last_failure: str | None = None  # what ended the newest of the steps that failed
        self._tables = tables
        self._sampler = Sampler(seed)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        # Continuations have keys of their own, so that any text is free to be a request's id.
        self._keys = itertools.count()
        self._group_of: dict[str, _Group] = {}  # by the key of each continuation

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: any text that no unfinished request has.
            prompt_token_ids: the prompt.
            params: how to choose tokens and when to stop.
            prompt: its text, handed through to the outputs.

        Raises:
            UsageError: the id is no text or in use, the prompt is empty or too long, a token is
                not in the vocabulary, or a stop string without a tokenizer; nothing has changed
                then.
        """
        if not isinstance(request_id, str) or request_id in self._groups:
            raise UsageError("request_id", request_id, "a text that no unfinished request has")
        if not isinstance(params, SamplingParams):
            raise UsageError("sampling_params", params, "SamplingParams")
        if params.stop_strings and self._tokenizer is None:
            legal = "stop_token_ids where there is no tokenizer (skip_tokenizer_init)"
            raise UsageError("stop", params.stop, legal)
        self._check_tokens("prompt_token_ids", prompt_token_ids)
        self._check_tokens("stop_token_ids", params.stop_tokens)
        # Prompt log probabilities are the same for every continuation: the first computes them.
        without = replace(params, prompt_logprobs=None)
        requests = [
            Request(
                str(next(self._keys)),
                list(prompt_token_ids),
                params if index == 0 else without,
                self._eos_token_ids,
                index,
                self._tokenizer,
            )
            for index in range(params.n)
        ]
        self.scheduler.check(requests[0])
        group = self._groups[request_id] = _Group(request_id, prompt, requests)
        for request in requests:
            self.scheduler.add(request)
            self._group_of[request.key] = group

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End an unfinished request and free its blocks.

        Returns:
            What it has so far, finish_reason "abort"; None for an unknown or finished id.
        """
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        for request in group.requests:
            if request.status is not Status.FINISHED:
                self.scheduler.remove(request)
                self._forget(request)
                request.abort()
        return group.output()

    def has_request(self, request_id: str) -> bool:
        """Whether an unfinished request has that id."""
        return request_id in self._groups

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return bool(self._groups)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one batch.

        Returns:
            Every request that got a new token in this step, finished ones among them.

        Raises:
            Exception: what the model raised. The requests of this step are given up, named in
                the log, and their blocks are free: the next step goes on with the others.
        """
        started = time.perf_counter()
        cached = {id(request): request.num_computed for request in self.scheduler.running}
        schedule = self.scheduler.schedule()
        if not schedule.work:
            assert not self._groups, "requests are left, but none could be scheduled"
            return []
        wanted = [_wanted_rows(item) for item in schedule.work]
        try:
            batch = self._batch(schedule.work, wanted)
            cache = self._tables.stats()
            model_started = time.perf_counter()
            logits = self.model.forward(batch)
            model_seconds = time.perf_counter() - model_started
            sampled = self._advance(schedule.work, wanted, logits)
            outputs = self._collect(sampled)
        except Exception as error:
            self._give_up(schedule.work)
            self.last_failure = f"{type(error).__name__}: {error}"
            raise
        self.stats.record(
            StepRecord(
                num_decodes=batch.num_decodes,
                prefill_tokens=sum(w.num_tokens for w in schedule.work if w.num_tokens > 1),
                running=cache.num_sequences,
                waiting=len(self.scheduler.waiting),
                preempted=len(schedule.preempted),
                model_seconds=model_seconds,
                step_seconds=time.perf_counter() - started,
                cache=cache,
            ),
            generated=sum(request.error is None for request in sampled),
            recomputed=sum(cached[id(request)] for request in schedule.preempted),
        )
        return outputs

    def _batch(self, work: list[Work], wanted: list[int]) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        logits_indices: list[int] = []
        for (request, start, stop), rows in zip(work, wanted, strict=True):
            token_ids += request.token_ids[start:stop]
            positions += range(start, stop)
            slot_mapping += self._tables.write(request.key, start, stop)
            logits_indices += range(len(token_ids) - rows, len(token_ids))
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=[self._tables.table(request.key) for request, _, _ in work],
            query_lengths=[stop - start for _, start, stop in work],
            kv_lengths=[stop for _, _, stop in work],
            logits_indices=logits_indices,
            group_tables=[self._tables.group_tables(item.request.key) for item in work],
        )

    def _advance(self, work: list[Work], wanted: list[int], logits: torch.Tensor) -> list[Request]:
        """Take the step's results; returns the requests that got a token or an error."""
        sampled: list[Request] = []
        rows: list[int] = []
        done = 0
        for item, count in zip(work, wanted, strict=True):
            if item.request.wants_prompt_logprobs:
                _take_prompt_logprobs(item, logits[done : done + count])
            done += count
            item.request.num_computed = item.stop
            if item.samples:
                sampled.append(item.request)
                rows.append(done - 1)
        if len(rows) < len(logits):
            logits = logits[rows]
        for request, choice in zip(sampled, self._sampler.sample(logits, sampled), strict=True):
            if choice.token is None:
                request.fail(
                    "the model's logits are not finite: its weights, or keys and values in its "
                    "cache, hold a NaN or an infinity"
                )
            else:
                if choice.logprobs is not None:
                    request.logprobs.append(choice.logprobs)
                request.append(choice.token, self.scheduler.max_sequence_tokens)
            if request.status is Status.FINISHED:
                self.scheduler.remove(request)
        return sampled

    def _collect(self, sampled: list[Request]) -> list[RequestOutput]:
        """One output for every group that has news."""
        groups = {group.request_id: group for group in (self._group_of[r.key] for r in sampled)}
        for request in sampled:
            if request.status is Status.FINISHED:
                self._forget(request)
        outputs: list[RequestOutput] = []
        for group in groups.values():
            output = group.output()
            if group.asks_logprobs:
                self._decode_logprobs(output)
            if output.finished:
                del self._groups[output.request_id]
            outputs.append(output)
        return outputs

    def _decode_logprobs(self, output: RequestOutput) -> None:
        """Give log probabilities the texts of their tokens."""
        places = list(output.prompt_logprobs or [])
        for completion in output.outputs:
            places += completion.logprobs or []
        if self._tokenizer is not None:
            for place in places:
                for token, entry in (place or {}).items():
                    if place is not None and entry.decoded_token is None:
                        place[token] = replace(entry, decoded_token=self._tokenizer.decode([token]))

    def _give_up(self, work: list[Work]) -> None:
        """Drop the requests of a step that failed, wherever it stopped."""
        keys = [item.request.key for item in work]
        groups = {id(group): group for key in keys if (group := self._group_of.get(key))}
        for group in groups.values():
            self._groups.pop(group.request_id, None)
            for request in group.requests:
                if request.status is not Status.FINISHED:
                    self.scheduler.remove(request)
                self._sampler.forget(request)
                self._group_of.pop(request.key, None)
        ids = ", ".join(group.request_id for group in groups.values())
        logger.error("a step failed; its requests are given up: %s", ids)

    def _forget(self, request: Request) -> None:
        self._sampler.forget(request)
        del self._group_of[request.key]

    def _check_tokens(self, field: str, token_ids: Iterable[int]) -> None:
        if self._vocab_size is not None:
            for token in token_ids:
                if not 0 <= token < self._vocab_size:
                    raise UsageError(field, token, f"0 to {self._vocab_size - 1} (the vocabulary)")


def _wanted_rows(item: Work) -> int:
    """For how many of the work's tokens, the last ones, logits are needed."""
    return item.num_tokens if item.request.wants_prompt_logprobs else int(item.samples)


def _take_prompt_logprobs(item: Work, logits: torch.Tensor) -> None:
    """Note what the prompt's tokens after this chunk's are worth."""
    request, count = item.request, item.request.params.prompt_logprobs
    assert count is not None
    rows = logits.to(device="cpu", dtype=torch.float32).numpy()
    prompt = request.prompt_token_ids
    for position, row in enumerate(rows, start=item.start + 1):
        # After a preemption some are known already.
        if len(request.prompt_logprobs) == position < len(prompt):
            request.prompt_logprobs.append(token_logprobs(row, prompt[position], count))
