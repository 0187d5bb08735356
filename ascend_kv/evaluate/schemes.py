"""One scheme of the main job: what the planner says of it, and what it does when it runs."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ascend_kv.cache.stats import CacheStats
from ascend_kv.cache.tables import make_tables
from ascend_kv.config import CacheConfig, SchedulerConfig
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.stats import EngineStats, StepRecord
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.recipe import BenchRecipe, SchemeRecipe
from ascend_kv.evaluate.results import Budget, Measured, Predicted, Timeline
from ascend_kv.evaluate.speed_probe import SpeedProbe, SpeedWatch
from ascend_kv.evaluate.workload import Request
from ascend_kv.geometry import LayerFormat, ModelGeometry, format_spec, layer_format
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM
from ascend_kv.plan.calibration import StepCosts
from ascend_kv.plan.capacity import Capacity, capacity
from ascend_kv.plan.simulation import Simulation, simulate
from ascend_kv.plan.traces import Arrival
from ascend_kv.resolved_cache import resolve_formats

WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 4
TIMELINE_POINTS = 240


def make_budget(recipe: BenchRecipe, geometry: ModelGeometry, block_size: int) -> Budget:
    """The bytes that hold ``budget.sequences`` contiguous sequences of the baseline's type."""
    spec = format_spec(recipe.budget.kv_cache_dtype)
    blocks = recipe.budget.sequences * -(-recipe.max_model_len // block_size)
    return Budget(
        bytes=blocks * geometry.block_bytes([spec] * geometry.num_layers, block_size),
        sequences=recipe.budget.sequences,
        max_model_len=recipe.max_model_len,
        kv_cache_dtype=spec.name,
        block_size=block_size,
    )


def cache_options(recipe: BenchRecipe, kv_cache_dtype: str) -> dict[str, Any]:
    """Keyword arguments of ``LLM`` for one format; what is about scales in quantized ones only."""
    options = {"kv_cache_dtype": kv_cache_dtype, "pair_scaling": recipe.pair_scaling}
    if kv_cache_dtype == "auto" or not layer_format(kv_cache_dtype).quantized:
        return options | {"key_offset_layers": "none"}
    return options | {
        "granularity": recipe.granularity,
        "symmetric": recipe.symmetric,
        "scale_type": recipe.scale_type,
        "group_size": recipe.group_size,
        "kv_cache_scales": recipe.kv_cache_scales,
        "kv_cache_dtype_skip_layers": recipe.kv_cache_dtype_skip_layers,
        "key_offset_layers": recipe.key_offset_layers,
    }


def layer_formats(
    recipe: BenchRecipe, kv_cache_dtype: str, geometry: ModelGeometry, model_dtype: str
) -> tuple[LayerFormat, ...]:
    """The format of every layer, as ``LLM`` will resolve it."""
    return resolve_formats(
        geometry, CacheConfig(**cache_options(recipe, kv_cache_dtype)), model_dtype
    )


def roomy_llm(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    kv_cache_dtype: str,
    block_size: int,
    sequences: int,
    length: int,
) -> LLM:
    """Shared weights with a cache that just holds ``sequences`` of ``length`` tokens at once."""
    formats = layer_formats(recipe, kv_cache_dtype, loaded.geometry, loaded.dtype)
    options = cache_options(recipe, kv_cache_dtype)
    return llm_with_room(loaded, formats, block_size, sequences, length, recipe.device, **options)


def llm_with_room(
    loaded: LoadedModel,
    formats: Sequence[LayerFormat],
    block_size: int,
    sequences: int,
    length: int,
    device: str,
    skip_tokenizer_init: bool = True,
    **options: Any,
) -> LLM:
    """Shared weights with a cache that just holds ``sequences`` of ``length`` tokens at once.

    ``options`` are ``LLM``'s about the cache, from which the layers' ``formats`` follow.
    """
    blocks = sequences * -(-length // block_size)
    if loaded.geometry.residual_bytes(formats, block_size):
        options["max_num_seqs"] = sequences  # each has a partly filled block beside the others
    return LLM(
        str(loaded.path),
        **options,
        max_model_len=length,
        kv_cache_memory_bytes=loaded.geometry.cache_bytes(
            formats, blocks, block_size, length, sequences
        ),
        block_size=block_size,
        skip_tokenizer_init=skip_tokenizer_init,
        device=device,
        weights=loaded,
    )


def plan_scheme(
    recipe: BenchRecipe,
    scheme: SchemeRecipe,
    geometry: ModelGeometry,
    model_dtype: str,
    budget: Budget,
    lengths: Sequence[tuple[int, int]],
    requests: int,
) -> tuple[int, Capacity]:
    """The batch limit of a scheme, and what the budget holds with it.

    Where a format keeps an open block for each sequence that may run at once, fewer of them leave
    more for blocks: a planned batch is the largest that the rest of the budget still holds.

    Args:
        recipe, scheme: what is to run.
        geometry, model_dtype: of the model.
        budget: of every scheme.
        lengths: prompt and output tokens, of each request or of typical ones.
        requests: how many there are.

    Raises:
        UsageError: the budget is too small for one sequence.
    """
    formats = layer_formats(recipe, scheme.kv_cache_dtype, geometry, model_dtype)

    def plan_for(batch: int) -> Capacity:
        return capacity(
            geometry,
            formats,
            budget.bytes,
            budget.block_size,
            scheme.allocator,
            recipe.max_model_len,
            lengths,
            batch,
        )

    def is_too_large(batch: int) -> bool:
        try:
            return batch > plan_for(batch).sequences_mean
        except UsageError:  # not even one sequence beside the open blocks
            return True

    batch = requests
    if scheme.batch == "planned":
        batch = max(1, bisect_left(range(1, requests + 1), True, key=is_too_large))
    return batch, plan_for(batch)


def predict(
    recipe: BenchRecipe,
    scheme: SchemeRecipe,
    geometry: ModelGeometry,
    model_dtype: str,
    budget: Budget,
    requests: Sequence[Request],
) -> Predicted:
    """Ask the planner; nothing has run yet.

    Raises:
        UsageError: as ``plan_scheme``.
    """
    lengths = [request.lengths for request in requests]
    batch, plan = plan_scheme(recipe, scheme, geometry, model_dtype, budget, lengths, len(requests))
    return Predicted(
        max_num_seqs=batch,
        token_bytes=plan.token_bytes,
        num_blocks=plan.num_blocks,
        kv_bytes=plan.kv_bytes,
        sequences_full_length=plan.sequences_full_length,
        sequences_mean=plan.sequences_mean,
        sequences_live=plan.sequences_live,
    )


def simulate_scheme(
    recipe: BenchRecipe,
    scheme: SchemeRecipe,
    plan: Predicted,
    budget: Budget,
    requests: Sequence[Request],
    costs: StepCosts,
) -> Simulation:
    """The steps that a scheme will run, each as long as ``costs`` say."""
    tables = make_tables(scheme.allocator, plan.num_blocks, budget.block_size, recipe.max_model_len)
    limits = SchedulerConfig(recipe.max_model_len, plan.max_num_seqs, recipe.max_num_batched_tokens)
    arrivals = [Arrival(0.0, *request.lengths) for request in requests]
    return simulate(arrivals, tables, limits, costs.step_time)


def run_scheme(
    recipe: BenchRecipe,
    scheme: SchemeRecipe,
    plan: Predicted,
    loaded: LoadedModel,
    budget: Budget,
    requests: Sequence[Request],
    probe: SpeedProbe,
    advance: Callable[[int], None],
) -> Measured:
    """Serve all requests with one scheme.

    Args:
        recipe, scheme, plan, budget: what to run and within which limits.
        loaded: weights that all schemes share.
        requests: the same for all schemes.
        probe: of the machine's speed, run between steps; its time does not count.
        advance: called with the number of tokens generated since the last call.

    Raises:
        RunError: a request failed.
    """
    llm = LLM(
        str(loaded.path),
        **cache_options(recipe, scheme.kv_cache_dtype),
        max_model_len=recipe.max_model_len,
        kv_cache_memory_bytes=budget.bytes,
        block_size=budget.block_size,
        kv_allocator=scheme.allocator,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=recipe.max_num_batched_tokens,
        skip_tokenizer_init=True,
        seed=recipe.seed,
        device=recipe.device,
        weights=loaded,
    )
    _serve(llm, requests[:WARM_UP_REQUESTS], lambda tokens: None, WARM_UP_TOKENS)
    llm.engine.stats = EngineStats()
    watch = probe.watch()

    def between_steps(tokens: int) -> None:
        advance(tokens)
        watch.look()

    started = time.perf_counter()
    watch.look(always=True)
    _serve(llm, requests, between_steps)
    watch.look(always=True)
    wall_seconds = time.perf_counter() - started - watch.total_seconds
    measured = _measure(llm, plan, wall_seconds, watch)
    llm.warn_of_clipping()
    # The next scheme's cache must not find this one's still in memory.
    del llm
    gc.collect()
    return measured


def _serve(
    llm: LLM,
    requests: Sequence[Request],
    advance: Callable[[int], None],
    most_tokens: int | None = None,
) -> None:
    for number, request in enumerate(requests):
        tokens = min(request.output_tokens, most_tokens or request.output_tokens)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.engine.add_request(str(number), request.prompt_token_ids, params)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RunError(f"request {output.request_id} failed: {output.error}")
        advance(len(outputs))


def _measure(llm: LLM, plan: Predicted, wall_seconds: float, watch: SpeedWatch) -> Measured:
    stats, steps = llm.engine.stats, list(llm.engine.stats.steps)
    block_bytes = llm.geometry.block_bytes(llm.formats, llm.block_size)
    token_bytes = block_bytes / llm.block_size
    busy = [step for step in steps if step.waiting] or steps
    return Measured(
        wall_seconds=wall_seconds,
        generated_tokens=stats.generated_tokens,
        tokens_per_second=stats.generated_tokens / wall_seconds,
        steps=stats.num_steps,
        model_seconds=stats.model_seconds,
        engine_step_seconds=stats.engine_seconds / stats.num_steps,
        batch_mean=_time_mean(steps, lambda cache: cache.num_sequences),
        batch_mean_busy=_time_mean(busy, lambda cache: cache.num_sequences),
        batch_peak=max(step.running for step in steps),
        kv_allocated_bytes=llm.cache.allocated_bytes,
        kv_geometry_bytes=llm.geometry.cache_bytes(
            llm.formats,
            llm.cache.num_blocks,
            llm.block_size,
            llm.max_model_len,
            plan.max_num_seqs,
        ),
        kv_token_bytes_mean=_time_mean(steps, lambda cache: cache.used_tokens * token_bytes),
        kv_held_bytes_mean=_time_mean(steps, lambda cache: cache.used_blocks * block_bytes),
        utilisation=_time_mean(steps, lambda cache: cache.utilisation),
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        key_conditioning=str(llm.conditioning),
        speed_probes=len(watch.samples),
        speed_probe_seconds=watch.typical_seconds,
        timeline=_timeline(steps),
    )


def _time_mean(steps: Iterable[StepRecord], value: Callable[[CacheStats], float]) -> float:
    """Mean of a count over the time of the steps, not over their number."""
    pairs = [(value(step.cache), step.step_seconds) for step in steps]
    return sum(count * seconds for count, seconds in pairs) / sum(seconds for _, seconds in pairs)


def _timeline(steps: Sequence[StepRecord]) -> Timeline:
    stride = max(1, -(-len(steps) // TIMELINE_POINTS))
    seconds, running, utilisation = [], [], []
    clock = 0.0
    for number, step in enumerate(steps):
        if number % stride == 0:
            seconds.append(round(clock, 3))
            running.append(step.running)
            utilisation.append(round(step.cache.utilisation, 4))
        clock += step.step_seconds
    return Timeline(seconds, running, utilisation)
