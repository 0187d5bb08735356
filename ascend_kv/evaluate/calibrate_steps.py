"""Measures how long the engine's steps take on this machine, for a plan's ``StepCosts``.

The engine itself runs three small sets of requests, from one sequence to many, with and without
prompts in the step; a fit to its steps gives the costs. Nothing is measured outside the engine, so
scheduling, sampling and the cache's own operators are in it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ascend_kv.config import CacheConfig, resolve_formats
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.params import SamplingParams
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.llm import LLM
from ascend_kv.plan.calibration import Calibration, MeasuredStep, StepCosts, fit_steps
from ascend_kv.plan.capacity import describe_formats
from ascend_kv.plan.performance import Load

MAX_TOKENS = 384
"""Longest sequence that calibration runs."""


class _Set(NamedTuple):
    """Requests that start together: their prompts, and how many tokens each brings."""

    prompts: tuple[int, ...]
    outputs: int


_SETS = (
    _Set((48,), 6),
    _Set((330, 160, 64, 24), 8),
    _Set(tuple(range(12, 60, 4)), 8),
    _Set((6,) * 32, 6),
)
"""One sequence; a few of unlike length with long prompts; a dozen; many short ones."""
_CHUNK = 128
_REPEATS = 2


def calibrate(model: str | Path, caches: Sequence[CacheConfig]) -> Calibration:
    """Load a model and measure a cache of each kind.

    Args:
        model: as ``LLM`` takes it.
        caches: the policies to measure.

    Raises:
        UsageError: the model cannot be served, or not with such a cache.
    """
    loaded = load_model(model)
    formats: dict[str, StepCosts] = {}
    for cache in caches:
        options: dict[str, Any] = {
            "kv_cache_dtype": cache.kv_cache_dtype,
            "block_size": cache.block_size,
        }
        names = resolve_formats(loaded.geometry, cache, loaded.dtype)
        if any(spec.quantized for spec in names):
            options |= {
                "granularity": cache.granularity,
                "symmetric": cache.symmetric,
                "group_size": cache.group_size,
                "kv_cache_dtype_skip_layers": cache.kv_cache_dtype_skip_layers,
            }
        formats[describe_formats(names)] = measure_costs(loaded, options)
    machine = this_machine("cpu", torch.get_num_threads())
    return Calibration(machine.label, str(model), formats)


def measure_costs(
    loaded: LoadedModel,
    cache_options: dict[str, Any],
    advance: Callable[[int], None] = lambda steps: None,
) -> StepCosts:
    """Run the sets with one kind of cache and fit its costs.

    Args:
        loaded: the weights.
        cache_options: arguments of ``LLM`` about the cache.
        advance: called with 1 after every set.
    """
    longest = min(MAX_TOKENS, loaded.geometry.max_position_tokens)
    llm = LLM(
        str(loaded.path),
        **cache_options,
        max_model_len=longest,
        kv_cache_memory_bytes=_roomy_bytes(loaded.geometry, longest),
        max_num_seqs=max(len(each.prompts) for each in _SETS),
        max_num_batched_tokens=_CHUNK,
        skip_tokenizer_init=True,
        device=str(next(loaded.hf_model.parameters()).device),
        weights=loaded,
    )
    watched = _Watched(llm.engine.model)
    llm.engine.model = watched
    generator = random.Random(0)
    _run(llm, watched, _SETS[0], generator, longest)  # warms up
    steps: list[MeasuredStep] = []
    for _ in range(_REPEATS):
        for each in _SETS:
            steps += _run(llm, watched, each, generator, longest)
            advance(1)
    return fit_steps(steps)


NUM_SETS = _REPEATS * len(_SETS)
"""How often ``measure_costs`` calls ``advance``."""


def _roomy_bytes(geometry: ModelGeometry, longest: int) -> int:
    """More than any set's tokens take in float32 with scales, blocks half empty included."""
    sequences = max(len(each.prompts) for each in _SETS)
    most = max(sum(each.prompts) + len(each.prompts) * each.outputs for each in _SETS)
    token = 2 * geometry.num_layers * geometry.num_kv_heads * (geometry.head_dim + 2) * 4
    return token * (max(most, longest) + 256 * sequences)


class _Watched:
    """A model that notes what each step does."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.load = Load(0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.load = load_of(batch)
        logits: torch.Tensor = self._model.forward(batch)
        return logits


def load_of(batch: Batch) -> Load:
    """What a batch does, as the performance model counts it."""
    decodes = context = tokens = pairs = 0
    for query, length in zip(batch.query_lengths, batch.kv_lengths, strict=True):
        if query == 1:
            decodes += 1
            context += length
        else:
            tokens += query
            start = length - query
            pairs += (length * (length + 1) - start * (start + 1)) // 2
    return Load(decodes, context, tokens, pairs)


def _run(
    llm: LLM, watched: _Watched, requests: _Set, generator: random.Random, longest: int
) -> list[MeasuredStep]:
    vocabulary = llm.geometry.vocab_size
    for number, length in enumerate(requests.prompts):
        length = min(length, longest - requests.outputs)
        prompt = [generator.randrange(vocabulary) for _ in range(length)]
        params = SamplingParams(max_tokens=requests.outputs, temperature=0, ignore_eos=True)
        llm.engine.add_request(str(number), prompt, params)
    steps = []
    while llm.engine.has_unfinished_requests():
        started = time.perf_counter()
        llm.engine.step()
        steps.append(MeasuredStep(watched.load, time.perf_counter() - started))
    return steps
