"""The loop: schedule, run the model, sample, give blocks back."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.batch import Batch, Model
from ascend_kv.engine.request import Request, RequestOutput, SamplingParams, Status
from ascend_kv.engine.sampler import Sampler
from ascend_kv.engine.scheduler import Scheduler, Work
from ascend_kv.engine.stats import EngineStats, StepRecord
from ascend_kv.errors import UsageError


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
    ) -> None:
        """Join a model with the tables of its cache.

        Args:
            model: runs batches; its cache has the blocks that ``tables`` hands out.
            tables: block tables of the cache.
            config: limits of a step.
            eos_token_ids: tokens that end a sequence unless a request ignores them.
            vocab_size: prompts with a token at or above it are refused; None checks nothing.
            seed: for requests that bring no seed of their own.
        """
        self.model = model
        self.scheduler = Scheduler(config, tables)
        self.stats = EngineStats()
        self._tables = tables
        self._sampler = Sampler(seed)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._requests: dict[str, Request] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            UsageError: the id is in use, the prompt is empty or too long, or a token is not in
                the vocabulary; nothing has changed then.
        """
        if request_id in self._requests:
            raise UsageError("request_id", request_id, "an id that no unfinished request has")
        if self._vocab_size is not None:
            for token in prompt_token_ids:
                if not 0 <= token < self._vocab_size:
                    raise UsageError(
                        "prompt_token_ids", token, f"0 to {self._vocab_size - 1} (the vocabulary)"
                    )
        request = Request(request_id, list(prompt_token_ids), params, self._eos_token_ids, prompt)
        self.scheduler.add(request)
        self._requests[request_id] = request

    def abort_request(self, request_id: str) -> None:
        """Forget an unfinished request and free its blocks; unknown and finished ids are fine."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            self._sampler.forget(request)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return bool(self._requests)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one batch.

        Returns:
            Every request that got a new token in this step, finished ones among them.
        """
        started = time.perf_counter()
        cached = {id(r): r.num_computed for r in self.scheduler.running}
        schedule = self.scheduler.schedule()
        if not schedule.work:
            assert not self._requests, "requests are left, but none could be scheduled"
            return []
        batch = self._batch(schedule.work)
        cache = self._tables.stats()
        model_started = time.perf_counter()
        logits = self.model.forward(batch)
        model_stopped = time.perf_counter()
        outputs = self._advance(schedule.work, logits)
        prefill_tokens = sum(w.num_tokens for w in schedule.work if w.num_tokens > 1)
        self.stats.record(
            StepRecord(
                num_decodes=batch.num_decodes,
                prefill_tokens=prefill_tokens,
                running=cache.num_sequences,
                waiting=len(self.scheduler.waiting),
                preempted=len(schedule.preempted),
                model_seconds=model_stopped - model_started,
                step_seconds=time.perf_counter() - started,
                cache=cache,
            ),
            generated=sum(output.error is None for output in outputs),
            recomputed=sum(cached[id(request)] for request in schedule.preempted),
        )
        return outputs

    def _batch(self, work: list[Work]) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        logits_indices: list[int] = []
        for item in work:
            request, start, stop = item
            token_ids += request.token_ids[start:stop]
            positions += range(start, stop)
            slot_mapping += self._tables.write(request.request_id, start, stop)
            if item.samples:
                logits_indices.append(len(token_ids) - 1)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=[self._tables.table(item.request.request_id) for item in work],
            query_lengths=[item.num_tokens for item in work],
            kv_lengths=[item.stop for item in work],
            logits_indices=logits_indices,
        )

    def _advance(self, work: list[Work], logits: torch.Tensor) -> list[RequestOutput]:
        for item in work:
            item.request.num_computed = item.stop
        sampled = [item.request for item in work if item.samples]
        tokens = self._sampler.sample(logits, sampled)
        for request, token in zip(sampled, tokens, strict=True):
            if token is None:
                request.fail(
                    "the model's logits are not finite: its weights, or keys and values in its "
                    "cache, hold a NaN or an infinity"
                )
            else:
                request.append(token, self.scheduler.max_sequence_tokens)
            if request.status is Status.FINISHED:
                self.scheduler.finish(request)
                self._sampler.forget(request)
                del self._requests[request.request_id]
        return [request.output() for request in sampled]
