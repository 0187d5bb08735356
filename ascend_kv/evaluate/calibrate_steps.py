"""Measures how long the engine's steps take on this machine, for a plan's ``StepCosts``.

The engine itself runs: prompts in chunks, and decode steps of few and many sequences with short and
long contexts; a fit to its steps gives the costs. Nothing is measured outside the engine, so
scheduling, sampling and the cache's own operators are in it. Long contexts are not computed, which
would take minutes: their blocks are handed out as if they were, and attention reads zeros.

All formats take turns, in rounds, so that a machine whose speed drifts is not met in one mood by
one format and in another by the next.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.config import CacheConfig
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.request import Status
from ascend_kv.errors import RunError
from ascend_kv.evaluate.console import Log, table_console
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.llm import LLM
from ascend_kv.plan.calibration import Calibration, MeasuredStep, StepCosts, fit_steps
from ascend_kv.plan.capacity import describe_formats
from ascend_kv.plan.performance import Load, load_of
from ascend_kv.resolved_cache import resolve_formats

PROMPTS = (330, 150, 60, 24, 9)
"""Tokens of the prompts that are really computed, side by side, in chunks of ``CHUNK``."""
CHUNK = 128
DECODES = ((1, 16), (1, 320), (4, 160), (8, 16), (8, 320), (16, 160), (32, 16), (32, 320))
"""Sequences, and tokens of context of each."""
STEPS = 4
"""Decode steps of each of them in a round; the first is not counted."""
ROUNDS = 2
"""How often every format has its turn."""
_LONGEST = 384


def calibrate(model: str | Path, described: str, caches: Sequence[CacheConfig]) -> Calibration:
    """Load a model and measure a cache of each kind.

    Args:
        model: as ``LLM`` takes it.
        described: the model and its weights in words, as ``PlannedModel.describe`` has them.
        caches: the policies to measure, without static scales.

    Raises:
        UsageError: the model cannot be served, or not with such a cache.
    """
    loaded = load_model(model)
    options: dict[str, dict[str, Any]] = {}
    for cache in caches:
        names = resolve_formats(loaded.geometry, cache, loaded.dtype)
        assert not any(spec.static for spec in names), "the plan refuses them: no scales are given"
        named = options[describe_formats(names)] = {
            "kv_cache_dtype": cache.kv_cache_dtype,
            "block_size": cache.block_size,
        }
        if any(spec.quantized for spec in names):
            named |= {
                "granularity": cache.granularity,
                "symmetric": cache.symmetric,
                "group_size": cache.group_size,
                "kv_cache_dtype_skip_layers": cache.kv_cache_dtype_skip_layers,
            }
    machine = this_machine("cpu", torch.get_num_threads())
    log = Log(table_console(stderr=True))
    with log.bar("calibration", num_parts(len(options)), "parts") as advance:
        costs = measure_costs(loaded, options, advance=lambda: advance(1))
    return Calibration(machine.label, described, costs)


def measure_costs(
    loaded: LoadedModel,
    caches: Mapping[str, dict[str, Any]],
    max_model_len: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, StepCosts]:
    """Run the engine with several kinds of cache and fit the costs of each.

    Args:
        loaded: the weights.
        caches: arguments of ``LLM`` about each cache, by the name its costs get.
        max_model_len: of the caches, where static scales depend on it.
        advance: called ``num_parts(len(caches))`` times, between steps.
    """
    steps: dict[str, list[MeasuredStep]] = {name: [] for name in caches}
    for _ in range(ROUNDS):
        for name, options in caches.items():
            steps[name] += _measure_steps(loaded, options, max_model_len, advance)
    return {name: fit_steps(measured) for name, measured in steps.items()}


def num_parts(num_caches: int) -> int:
    """How often ``measure_costs`` calls ``advance``."""
    return ROUNDS * num_caches * (1 + len(DECODES))


def _measure_steps(
    loaded: LoadedModel,
    cache_options: dict[str, Any],
    max_model_len: int | None,
    advance: Callable[[], None],
) -> list[MeasuredStep]:
    """One kind of cache in one round."""
    max_model_len = max_model_len or min(_LONGEST, loaded.geometry.max_position_tokens)
    longest = min(_LONGEST, max_model_len)
    sequences = max(batch for batch, _ in DECODES)
    llm = LLM(
        str(loaded.path),
        **cache_options,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=_roomy_bytes(loaded.geometry, sequences, longest, max_model_len),
        max_num_seqs=sequences,
        max_num_batched_tokens=CHUNK,
        skip_tokenizer_init=True,
        device=str(next(loaded.hf_model.parameters()).device),
        weights=loaded,
    )
    bench = _Bench(llm, longest)
    bench.prompts(PROMPTS[-1:])  # warms up
    steps = bench.prompts(PROMPTS)
    advance()
    for batch, context in DECODES:
        steps += bench.decodes(batch, context)[1:]
        advance()
    return steps


def _roomy_bytes(geometry: ModelGeometry, sequences: int, longest: int, max_model_len: int) -> int:
    """What so many longest sequences take in float32 with scales, and a block more for each.

    And room for one of ``max_model_len``, with static scales of every position.
    """
    token = 2 * geometry.num_layers * geometry.num_kv_heads * (geometry.head_dim + 2) * 4
    return token * (sequences * (longest + 128) + 2 * max_model_len)


class _Watched:
    """A model that notes what each step does."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.load = Load(0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> torch.Tensor:
        lengths = zip(batch.query_lengths, batch.kv_lengths, strict=True)
        self.load = load_of((length - query, length) for query, length in lengths)
        logits: torch.Tensor = self._model.forward(batch)
        return logits


class _Bench:
    """Runs steps of an engine and notes what they did and how long they took."""

    def __init__(self, llm: LLM, longest: int) -> None:
        self._engine, self._longest = llm.engine, longest
        self._vocabulary = llm.geometry.vocab_size
        self._watched = _Watched(llm.engine.model)
        self._engine.model = self._watched
        self._generator = random.Random(0)
        assert isinstance(llm.cache, PagedKVCache), "a budget by tokens was planned for it"
        # Contexts that count as computed are read: what memory holds may not be a number.
        for layer in llm.cache.layers:
            for tensor in layer.block_tensors:
                tensor.zero_()
        self._slot_tensors = [x for layer in llm.cache.layers for x in layer.slot_tensors]

    def prompts(self, lengths: Sequence[int]) -> list[MeasuredStep]:
        """Compute prompts side by side and two tokens of each."""
        for number, length in enumerate(lengths):
            self._add(str(number), min(length, self._longest - 2), 2)
        steps = []
        while self._engine.has_unfinished_requests():
            steps.append(self._step())
        return steps

    def decodes(self, batch: int, context: int) -> list[MeasuredStep]:
        """Decode steps of ``batch`` sequences whose context counts as computed."""
        context = min(context, self._longest - STEPS)
        scheduler = self._engine.scheduler
        for tensor in self._slot_tensors:  # a prompt leaves anything behind its last token
            tensor.zero_()
        for number in range(batch):
            self._add(str(number), context, STEPS)
        while scheduler.waiting:
            request = scheduler.waiting.popleft()
            reserved = scheduler.tables.reserve(request.key, context)
            assert reserved, "the cache holds all sequences at their longest"
            scheduler.tables.write(request.key, 0, context - 1)
            request.num_computed, request.status = context - 1, Status.RUNNING
            scheduler.running.append(request)
        return [self._step() for _ in range(STEPS)]

    def _add(self, name: str, length: int, outputs: int) -> None:
        prompt = [self._generator.randrange(self._vocabulary) for _ in range(length)]
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        self._engine.add_request(name, prompt, params)

    def _step(self) -> MeasuredStep:
        started = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.error is not None:
                raise RunError(f"calibration: {output.error}")
        return MeasuredStep(self._watched.load, seconds)
