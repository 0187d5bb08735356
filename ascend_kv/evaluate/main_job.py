"""The main job: schemes side by side under one KV budget, then what they cost in quality.

Order of a run: plan, calibration (steps of the engine, so that speed can be predicted), schemes as
the recipe lists them (each warmed up before it is timed), decode sweep, perplexity, planted key
bias (on a model of its own), samples. The rest shares one set of weights. ``report.json`` is
written after every part, so that a run that breaks off has lost nothing but the part
it was in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from ascend_kv.config import SchedulerConfig
from ascend_kv.devices import get_device
from ascend_kv.evaluate.calibrate_steps import measure_costs, num_parts
from ascend_kv.evaluate.console import Log, print_table
from ascend_kv.evaluate.factors import find_factors
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.model_choice import choose_model, load_text_tokenizer
from ascend_kv.evaluate.perplexity import compare, cut_windows, perplexity, window_losses
from ascend_kv.evaluate.planted_bias import CACHES, measure_planted_bias
from ascend_kv.evaluate.profiling import formats_of, record_profiles
from ascend_kv.evaluate.recipe import (
    BenchRecipe,
    SchemeRecipe,
    name_format,
    with_real_formats,
)
from ascend_kv.evaluate.results import (
    AttentionRoute,
    BenchResult,
    CalibrationRun,
    FormatPerplexity,
    Perplexity,
    Predicted,
    SchemeResult,
    TextInfo,
    check_speed,
)
from ascend_kv.evaluate.samples import generate_samples, sample_prompts
from ascend_kv.evaluate.schemes import (
    cache_options,
    layer_formats,
    make_budget,
    predict,
    roomy_llm,
    run_scheme,
    simulate_scheme,
)
from ascend_kv.evaluate.speed_probe import SpeedProbe
from ascend_kv.evaluate.sweep import run_sweep
from ascend_kv.evaluate.tables import plan_table
from ascend_kv.evaluate.text import Text, load_text
from ascend_kv.evaluate.workload import draw_requests, summarize
from ascend_kv.ops import platform
from ascend_kv.plan.calibration import StepCosts
from ascend_kv.resolved_cache import check_block_size

Save = Callable[[BenchResult], None]


def run_main_job(
    recipe: BenchRecipe,
    text_path: Path | None,
    quick: bool,
    log: Log,
    save: Save,
    profiles: Path | None = None,
) -> BenchResult:
    """Run everything.

    Args:
        recipe: what to run.
        text_path: the user's text, or None for Python's documentation.
        quick: noted in the result; the recipe has been shortened already.
        log: says what is going on.
        save: called with the unfinished result after every part.
        profiles: where profiles of decode steps go; None: none are made.

    Raises:
        UsageError: a value that is not legal, as early as it can be known.
        RunError: a part failed.
    """
    started = time.perf_counter()
    text = load_text(text_path)
    job = _MainJob(recipe, text, quick, log)
    for part in (
        job.run_calibration,
        job.run_schemes,
        job.run_sweep,
        job.run_perplexity,
        job.run_planted_bias,
        job.run_samples,
    ):
        for name in part():
            job.note_routes(name)
            job.result.operators = platform.implementations(job.device)
            job.result.wall_seconds = time.perf_counter() - started
            save(job.result)
    job.result.complete = True
    if profiles is not None:
        job.record_profiles(profiles)
    return job.result


class _MainJob:
    """What the parts share: weights, tokens, requests, and the result they fill in."""

    def __init__(self, recipe: BenchRecipe, text: Text, quick: bool, log: Log) -> None:
        self.recipe, self.log = recipe, log
        self.routes = platform.attention_routes()  # of earlier runs in this process
        self.loaded, info, self.device = choose_model(
            recipe.model, recipe.dtype, recipe.device, log
        )
        self.recipe = recipe = with_real_formats(recipe, self.loaded.dtype)
        self.tokenizer = load_text_tokenizer(self.loaded)
        # A long text may exceed the model's longest sequence: it is cut up below, never run whole.
        self.token_ids = list(self.tokenizer(text.content, verbose=False)["input_ids"])
        self.prompts = sample_prompts(self.tokenizer, recipe.samples.prompts)
        recipe.check_lengths(self.loaded.geometry.max_position_tokens, self.prompts)
        self.windows = cut_windows(recipe.perplexity, self.token_ids)
        self.requests = draw_requests(recipe.workload, self.token_ids)
        self.block_size = self._block_size()
        self.budget = make_budget(recipe, self.loaded.geometry, self.block_size)
        self.plans = self._plan()
        self.probe = SpeedProbe(self.device)
        names = [scheme.name for scheme in recipe.schemes]
        print_table(plan_table(names, self.plans), log.console)
        self.result = BenchResult(
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            quick=quick,
            machine=this_machine(self.device, torch.get_num_threads()),
            operators=platform.implementations(self.device),
            model=info,
            text=TextInfo(text.source, text.sha256, len(self.token_ids)),
            budget=self.budget,
            workload=summarize(self.requests),
            recipe=asdict(recipe),
        )

    def _block_size(self) -> int:
        """Tokens a block; refused now, not after a scheme, if a later one cannot have it."""
        kind = get_device(platform.device_name(self.device))
        block_size = self.recipe.block_size or kind.default_block_size
        for key, kv_cache_dtype in self.recipe.formats():
            with name_format(key):
                loaded = self.loaded
                formats = layer_formats(self.recipe, kv_cache_dtype, loaded.geometry, loaded.dtype)
                check_block_size(kind, block_size, formats)
        return block_size

    def _plan(self) -> list[Predicted]:
        recipe, loaded = self.recipe, self.loaded
        plans = [
            predict(recipe, scheme, loaded.geometry, loaded.dtype, self.budget, self.requests)
            for scheme in recipe.schemes
        ]
        for plan in plans:  # refused now, not when a later scheme's turn has come
            SchedulerConfig(recipe.max_model_len, plan.max_num_seqs, recipe.max_num_batched_tokens)
        return plans

    def note_routes(self, part: str) -> None:
        """Add how attention went on the NPU since this was last called."""
        before, self.routes = self.routes, platform.attention_routes()
        for words, route in self.routes.items():
            calls = route.calls - (before[words].calls if words in before else 0)
            if calls:
                self.result.attention_routes.append(
                    AttentionRoute(part, words, calls, route.reason)
                )

    def run_calibration(self) -> Iterator[str]:
        """Time steps of the engine with every format, so that each scheme's speed is predicted.

        As all parts it yields the name of what is done.
        """
        recipe, watch, started = self.recipe, self.probe.watch(), time.perf_counter()
        caches = {
            scheme.kv_cache_dtype: cache_options(recipe, scheme.kv_cache_dtype)
            | {"block_size": self.block_size}
            for scheme in recipe.schemes
        }
        with self.log.bar("calibration", num_parts(len(caches)), "parts") as advance:

            def part_done() -> None:
                watch.look(always=True)
                advance(1)

            costs = measure_costs(self.loaded, caches, recipe.max_model_len, part_done)
        self.result.calibration = CalibrationRun(
            time.perf_counter() - started, len(watch.samples), watch.typical_seconds
        )
        self.plans = [
            replace(plan, tokens_per_second=self._predict_speed(scheme, plan, costs))
            for scheme, plan in zip(recipe.schemes, self.plans, strict=True)
        ]
        yield "calibration"

    def _predict_speed(
        self, scheme: SchemeRecipe, plan: Predicted, costs: Mapping[str, StepCosts]
    ) -> float:
        own = costs[scheme.kv_cache_dtype]
        simulated = simulate_scheme(self.recipe, scheme, plan, self.budget, self.requests, own)
        return simulated.tokens_per_second

    def run_schemes(self) -> Iterator[str]:
        """Serve the requests with every scheme."""
        schemes, calibration = self.result.schemes, self.result.calibration
        assert calibration is not None, "the part before"
        for scheme, plan in zip(self.recipe.schemes, self.plans, strict=True):
            tokens = self.result.workload.generated_tokens
            with self.log.bar(scheme.name, tokens, "tokens") as advance:
                measured = run_scheme(
                    self.recipe,
                    scheme,
                    plan,
                    self.loaded,
                    self.budget,
                    self.requests,
                    self.probe,
                    advance,
                )
            first = schemes[0].measured if schemes else measured
            ratio = measured.tokens_per_second / first.tokens_per_second
            schemes.append(
                SchemeResult(
                    scheme.name,
                    scheme.allocator,
                    scheme.kv_cache_dtype,
                    scheme.batch,
                    plan,
                    measured,
                    check_speed(plan, measured, calibration),
                    ratio,
                )
            )
            self.result.factors = find_factors(schemes)
            self.log.say(
                f"{scheme.name}: {measured.tokens_per_second:.1f} tokens/s, "
                f"{measured.batch_mean_busy:.1f} sequences at once, {measured.wall_seconds:.0f} s"
            )
            yield scheme.name

    def run_sweep(self) -> Iterator[str]:
        """Decode throughput against batch."""
        batches = self.recipe.sweep.batches
        if not batches:
            return
        with self.log.bar("decode sweep", len(batches), "batch sizes") as advance:
            self.result.sweep = run_sweep(
                self.recipe, self.loaded, self.block_size, self.token_ids, advance
            )
        yield "decode sweep"

    def run_perplexity(self) -> Iterator[str]:
        """Score the same windows of text with every format."""
        settings = self.recipe.perplexity
        # "auto" is the model's own type: the unquantized reference.
        others = [name for name in settings.formats if name not in ("auto", self.loaded.dtype)]
        losses: dict[str, list[list[float]]] = {}
        formats: list[FormatPerplexity] = []
        for kv_cache_dtype in ("auto", *others):
            started = time.perf_counter()
            shown = self.loaded.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
            losses[kv_cache_dtype], key_conditioning = self._score(kv_cache_dtype)
            interval = compare(losses[kv_cache_dtype], losses["auto"], settings.cluster_tokens)
            formats.append(
                FormatPerplexity(
                    kv_cache_dtype=shown,
                    perplexity=perplexity(losses[kv_cache_dtype]),
                    ratio=math.exp(interval.mean),
                    ratio_low=math.exp(interval.low),
                    ratio_high=math.exp(interval.high),
                    key_conditioning=key_conditioning,
                    wall_seconds=time.perf_counter() - started,
                )
            )
            self.result.perplexity = Perplexity(
                method=settings.method,
                windows=len(self.windows),
                window_tokens=settings.window_tokens,
                scored_tokens=sum(len(window) for window in losses["auto"]),
                clusters=interval.clusters,
                prefill_reads=self.recipe.prefill_reads,
                formats=formats,
            )
            self.log.say(f"perplexity with a {shown} cache: {formats[-1].perplexity:.4f}")
            yield f"perplexity, {shown}"

    def _score(self, kv_cache_dtype: str) -> tuple[list[list[float]], str]:
        """Losses of every window, and what was done to the keys."""
        settings = self.recipe.perplexity
        length = settings.window_tokens
        llm = roomy_llm(self.recipe, self.loaded, kv_cache_dtype, self.block_size, 1, length)
        tokens = length * len(self.windows)
        with self.log.bar(f"perplexity, {kv_cache_dtype}", tokens, "tokens") as advance:
            losses = window_losses(
                llm.model, self.windows, self.block_size, settings.chunk_tokens, advance
            )
        return losses, str(llm.conditioning)

    def run_planted_bias(self) -> Iterator[str]:
        """Score a small model with a large key bias, with and without key conditioning."""
        texts = self.recipe.planted_bias.texts
        if not texts:
            return
        with self.log.bar("planted key bias", len(CACHES), "caches") as advance:
            self.result.planted_bias = measure_planted_bias(texts, advance)
        yield "planted key bias"

    def run_samples(self) -> Iterator[str]:
        """Generate with an unquantized and a quantized cache."""
        with self.log.bar("samples", 2, "formats") as advance:
            self.result.samples = generate_samples(
                self.recipe, self.loaded, self.tokenizer, self.prompts, self.block_size, advance
            )
        yield "samples"

    def record_profiles(self, directory: Path) -> None:
        """Decode steps under the profiler; nothing of them is part of the result."""
        with self.log.bar("profiles", len(formats_of(self.recipe)), "formats") as advance:
            record_profiles(
                self.recipe, self.loaded, self.block_size, self.token_ids, directory, advance
            )
