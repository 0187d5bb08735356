"""The main job on a tiny model: what is measured adds up, and what is wrong is said early."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fixture import RECIPE, make_model_with_tokenizer, write_recipe
from npu_stand_in import StandIn
from rich.console import Console
from safetensors.torch import save_file

from ascend_kv.cache import paged
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate import default_model, main_job, model_choice, speed_probe
from ascend_kv.evaluate import schemes as schemes_module
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.factors import find_factors
from ascend_kv.evaluate.main_job import run_main_job
from ascend_kv.evaluate.recipe import (
    BenchRecipe,
    load_recipe,
)
from ascend_kv.evaluate.results import BenchResult, SchemeResult, check_speed
from ascend_kv.evaluate.schemes import predict, run_scheme, simulate_scheme
from ascend_kv.evaluate.speed_probe import SpeedProbe
from ascend_kv.evaluate.text import load_text
from ascend_kv.integrations.loading import load_model
from ascend_kv.ops import fused_execute
from ascend_kv.ops.fused_execute import Route
from ascend_kv.plan.calibration import BATCHES, StepCosts

REPOSITORY = Path(__file__).parents[1]
ELEMENTS = 3 * 2 * 8  # layers, KV heads and head_dim of the tiny model


class Run:
    """One run of the main job and how its result looked after every part."""

    def __init__(self, model: Path, recipe: BenchRecipe) -> None:
        self.saved: list[tuple[int, bool, int, int, int, bool]] = []
        self.said = io.StringIO()
        self.recipe = replace(recipe, model=str(model), device="cpu")
        log = Log(Console(file=self.said, width=200))
        self.result = run_main_job(self.recipe, None, False, log, self.note)

    def note(self, result: BenchResult) -> None:
        quality = len(result.perplexity.formats) if result.perplexity else 0
        self.saved.append(
            (
                len(result.schemes),
                result.sweep is not None,
                quality,
                len(result.planted_bias),
                len(result.samples),
                result.complete,
            )
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = write_recipe(tmp_path_factory.mktemp("recipe") / "recipe.yaml")
    return Run(model, load_recipe(path))


@pytest.fixture(scope="module")
def schemes(run: Run) -> dict[str, SchemeResult]:
    return {scheme.name: scheme for scheme in run.result.schemes}


def test_the_budget_holds_exactly_the_sequences_it_is_named_after(
    run: Run, schemes: dict[str, SchemeResult]
) -> None:
    assert run.result.budget.bytes == 3 * 64 * 2 * ELEMENTS * 2
    assert schemes["one"].predicted.max_num_seqs == 3
    assert schemes["one"].measured.batch_peak == 3
    assert schemes["one"].measured.kv_allocated_bytes == run.result.budget.bytes


def test_allocated_bytes_are_those_of_the_geometry(schemes: dict[str, SchemeResult]) -> None:
    int8_token = 2 * ELEMENTS + 2 * 3 * 2 * 4  # a scale for each layer and KV head, twice
    for name, token_bytes in (("three", 4 * ELEMENTS), ("four", int8_token)):
        scheme = schemes[name]
        assert scheme.predicted.token_bytes == token_bytes
        assert scheme.measured.kv_allocated_bytes == scheme.measured.kv_geometry_bytes
        assert scheme.measured.kv_allocated_bytes == scheme.predicted.kv_bytes
        assert scheme.measured.kv_allocated_bytes == scheme.predicted.num_blocks * 4 * token_bytes


def test_speed_is_predicted_before_it_is_measured(run: Run) -> None:
    speeds = [scheme.predicted.tokens_per_second for scheme in run.result.schemes]
    assert all(speed is not None and speed > 0 for speed in speeds)
    assert run.result.calibration is not None
    for scheme in run.result.schemes:
        assert scheme.speed_check == check_speed(
            scheme.predicted, scheme.measured, run.result.calibration
        )
    (line,) = [line for line in run.said.getvalue().splitlines() if line.startswith("one:")]
    assert "tokens/s" in line  # of the run; the prediction is in the report, beside it


def test_the_steps_that_are_simulated_are_those_that_run(run: Run, model: Path) -> None:
    """So that only how long they take can be predicted wrong."""
    loaded = load_model(model)
    job = main_job._MainJob(run.recipe, load_text(None), False, Log(Console(file=io.StringIO())))
    costs = StepCosts((1.0,) * len(BATCHES), 0.0, 0.0, 0.0, 0.0)  # every step takes a second
    for scheme, result in zip(job.recipe.schemes, run.result.schemes, strict=True):
        plan = predict(job.recipe, scheme, loaded.geometry, loaded.dtype, job.budget, job.requests)
        simulated = simulate_scheme(job.recipe, scheme, plan, job.budget, job.requests, costs)
        assert simulated.seconds == simulated.steps == result.measured.steps
        assert simulated.output_tokens == result.measured.generated_tokens
        assert simulated.preemptions == result.measured.preemptions
        assert simulated.recomputed_tokens == result.measured.recomputed_tokens
        assert simulated.batch_peak == result.measured.batch_peak


def test_what_the_probes_take_is_not_measured(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes a second, and a probe a hundred."""
    job = main_job._MainJob(run.recipe, load_text(None), False, Log(Console(file=io.StringIO())))
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(schemes_module, "time", clock)
    monkeypatch.setattr(speed_probe, "time", clock)
    monkeypatch.setattr(SpeedProbe, "_run", lambda probe: spend(100))
    measured = run_scheme(
        job.recipe, job.recipe.schemes[0], job.plans[0], job.loaded, job.budget, job.requests,
        job.probe, lambda tokens: spend(1),
    )  # fmt: skip
    assert measured.wall_seconds == measured.steps
    assert measured.speed_probe_seconds == 100
    assert measured.speed_probes == measured.steps + 2  # one before, one after each, one at last


def test_all_schemes_do_the_same_work(run: Run) -> None:
    drawn = run.result.workload
    assert drawn.requests == 16
    for scheme in run.result.schemes:
        measured = scheme.measured
        assert measured.generated_tokens == drawn.generated_tokens
        assert measured.tokens_per_second == pytest.approx(
            drawn.generated_tokens / measured.wall_seconds
        )
        assert 0 < measured.model_seconds < measured.wall_seconds
        assert measured.engine_step_seconds * measured.steps < measured.wall_seconds


def test_batches_stay_within_the_plan(schemes: dict[str, SchemeResult]) -> None:
    limits = [scheme.predicted.max_num_seqs for scheme in schemes.values()]
    assert limits == sorted(limits) and limits[-1] == 16 and limits[2] > limits[0]
    for scheme in schemes.values():
        measured = scheme.measured
        assert 0 < measured.batch_mean <= measured.batch_peak <= scheme.predicted.max_num_seqs
        assert measured.batch_mean_busy <= measured.batch_peak
    for name in ("one", "two"):  # a contiguous cache is full until the queue is empty
        measured = schemes[name].measured
        assert measured.batch_mean_busy == pytest.approx(measured.batch_peak, rel=0.05)


def test_only_the_batch_that_is_too_large_preempts(schemes: dict[str, SchemeResult]) -> None:
    for name in ("one", "two", "three", "four"):
        assert schemes[name].measured.preemptions == 0
        assert schemes[name].measured.recomputed_tokens == 0
    assert schemes["five"].measured.preemptions > 0
    assert schemes["five"].measured.recomputed_tokens > schemes["five"].measured.preemptions


def test_utilisation_is_that_of_the_allocator(schemes: dict[str, SchemeResult]) -> None:
    for name, scheme in schemes.items():
        measured = scheme.measured
        assert 0 < measured.kv_token_bytes_mean <= measured.kv_held_bytes_mean
        assert measured.kv_held_bytes_mean <= measured.kv_allocated_bytes
        if scheme.allocator == "contiguous":
            # 10 to 30 of 64 tokens
            assert 0.15 < measured.utilisation < 0.45, name
        else:
            # blocks of 4: one and a half slots of about 20 wasted
            assert 0.88 < measured.utilisation < 1, name
        assert measured.utilisation == pytest.approx(
            measured.kv_token_bytes_mean / measured.kv_held_bytes_mean, abs=0.05
        )
        timeline = measured.timeline
        assert len(timeline.seconds) == len(timeline.running) == len(timeline.utilisation)
        assert timeline.seconds == sorted(timeline.seconds)
        assert timeline.seconds[0] == 0 and timeline.seconds[-1] < measured.wall_seconds


def test_a_bfloat16_model_is_compared_with_a_bfloat16_cache(model: Path, tmp_path: Path) -> None:
    changes = {"dtype": "bfloat16", "planted_bias": {"texts": 0}, "samples": {}}
    result = Run(model, load_recipe(write_recipe(tmp_path / "recipe.yaml", **changes))).result
    shown = [scheme.kv_cache_dtype for scheme in result.schemes]
    assert shown == ["bfloat16", "int8", "bfloat16", "int8", "int8"]
    assert result.budget.kv_cache_dtype == "bfloat16"
    assert result.recipe["schemes"][0]["kv_cache_dtype"] == "bfloat16"
    assert result.perplexity is not None
    assert [x.kv_cache_dtype for x in result.perplexity.formats] == ["bfloat16", "int8"]


def test_ratios_and_factors(run: Run, schemes: dict[str, SchemeResult]) -> None:
    speed = {name: scheme.measured.tokens_per_second for name, scheme in schemes.items()}
    for name, scheme in schemes.items():
        assert scheme.ratio_to_first == pytest.approx(speed[name] / speed["one"])
    assert [(f.name, f.scheme, f.baseline) for f in run.result.factors] == [
        ("format alone", "two", "one"),
        ("paging alone", "three", "one"),
        ("together", "four", "one"),
        ("batch too large", "five", "four"),
    ]
    for factor in run.result.factors:
        assert factor.ratio == pytest.approx(speed[factor.scheme] / speed[factor.baseline])


def test_factors_without_a_partner_are_left_out(schemes: dict[str, SchemeResult]) -> None:
    found = find_factors([schemes["one"], schemes["three"], schemes["five"]])
    assert [factor.name for factor in found] == ["paging alone"]


def test_perplexity_by_format(run: Run) -> None:
    quality = run.result.perplexity
    assert quality is not None
    assert (quality.windows, quality.scored_tokens, quality.clusters) == (2, 78, 10)
    reference, half, int8 = quality.formats
    assert [entry.kv_cache_dtype for entry in quality.formats] == ["float32", "float16", "int8"]
    assert (reference.ratio, reference.ratio_low, reference.ratio_high) == (1, 1, 1)
    for entry in (half, int8):
        assert entry.ratio == pytest.approx(entry.perplexity / reference.perplexity)
        assert entry.ratio_low < entry.ratio < entry.ratio_high
    # two windows of random text: which of the two is nearer is chance
    assert 0 < abs(half.ratio - 1) < 0.01 and 0 < abs(int8.ratio - 1) < 0.05


def test_key_conditioning_is_said_where_keys_are_quantized(run: Run) -> None:
    assert run.result.perplexity is not None
    for entry in (
        *((s.kv_cache_dtype, s.measured.key_conditioning) for s in run.result.schemes),
        *((f.kv_cache_dtype, f.key_conditioning) for f in run.result.perplexity.formats),
    ):
        done = "pair scales" if entry[0] == "int8" else "keys as the model makes them"
        assert entry[1].startswith(done), entry


def test_key_conditioning_can_be_switched_off(model: Path, tmp_path: Path) -> None:
    schemes = [{"name": "only", "kv_cache_dtype": "int8"}]
    left_out = {"perplexity": RECIPE["perplexity"] | {"formats": ["int8"]}, "schemes": schemes}
    path = write_recipe(
        tmp_path / "recipe.yaml", **left_out, pair_scaling=False, planted_bias={"texts": 0}
    )
    result = Run(model, load_recipe(path)).result
    assert result.perplexity is not None and not result.planted_bias
    for done in (
        result.schemes[0].measured.key_conditioning,
        result.perplexity.formats[1].key_conditioning,
    ):
        assert done == "keys as the model makes them"


def test_the_planted_bias_shows_what_conditioning_is_for(run: Run) -> None:
    unquantized, bare, *_, both = run.result.planted_bias
    assert unquantized.perplexity_ratio == unquantized.same_choices == 1
    assert bare.perplexity_ratio > 2
    assert abs(both.perplexity_ratio - 1) < 0.05


def test_sweep_and_samples(run: Run) -> None:
    assert run.result.sweep is not None
    for point, batch in zip(run.result.sweep.points, (1, 4), strict=True):
        assert point.batch == batch
        assert point.tokens_per_second == pytest.approx(batch / point.step_seconds)
    assert [sample.prompt for sample in run.result.samples] == ["def f(x):", "import"]
    for sample in run.result.samples:
        assert 0 <= sample.equal_tokens <= sample.tokens <= 6
        if sample.equal_tokens == sample.tokens:
            assert sample.reference_text == sample.quantized_text


def test_every_part_is_saved_as_soon_as_it_is_there(run: Run) -> None:
    assert run.saved == [
        *((number, False, 0, 0, 0, False) for number in range(6)),  # calibration, then schemes
        *((5, True, quality, 0, 0, False) for quality in range(4)),
        (5, True, 3, 5, 0, False),
        (5, True, 3, 5, 2, False),
    ]
    assert run.result.complete
    assert "no NPU" not in run.said.getvalue()  # the device was named, nothing was searched


def test_operators_and_machine_are_named(run: Run) -> None:
    assert {"kv_cache_store", "paged_attention"} <= run.result.operators.keys()
    assert run.result.attention_routes == []
    machine = run.result.machine
    assert machine.device == "cpu" and machine.processor and machine.threads >= 1
    assert machine.versions.keys() >= {"python", "torch", "transformers", "ascend_kv"}


def test_ways_of_attention_are_told_by_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator is replaced by one that goes through the fused attention's plan."""
    library = StandIn()
    attend = partial(fused_execute.attend, library)
    monkeypatch.setattr(fused_execute, "routes_taken", taken := {"decode: paged": Route("", 7)})
    monkeypatch.setattr(main_job.platform, "routes_taken", taken)
    monkeypatch.setattr(paged.ops, "paged_attention", attend)
    schemes = [{"name": name, "kv_cache_dtype": name} for name in ("float16", "float32")]
    changes = {"schemes": schemes, "planted_bias": {"texts": 0}, "samples": {}}
    left_out = {"sweep": {"batches": []}, "perplexity": RECIPE["perplexity"] | {"formats": []}}
    path = write_recipe(tmp_path / "recipe.yaml", **changes, **left_out)
    result = Run(model, load_recipe(path)).result
    assert not library.calls  # the tiny model computes in float32
    told = [(x.part, x.route) for x in result.attention_routes]
    rules = "query type, head_dim"
    for part in ("float16", "float32"):
        assert (part, f"prefill: reference ({rules})") in told
        assert (part, f"decode: reference ({rules})") in told
    assert told[-1] == ("perplexity, float32", f"prefill: reference ({rules})")
    assert ("float16", "decode: paged") not in told  # of an earlier run
    chunks, layers, windows = 3, 3, 2  # 40 tokens, 16 at a time
    assert result.attention_routes[-1].calls == chunks * layers * windows
    assert "got torch.float32; legal: float16 or bfloat16" in result.attention_routes[0].reason


def test_a_text_of_ones_own(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a" * 79)
    recipe = replace(load_recipe(write_recipe(tmp_path / "r.yaml")), model=str(model), device="cpu")
    log = Log(Console(file=io.StringIO()))
    with pytest.raises(UsageError, match="text: got '79 tokens'; legal: at least 80"):
        run_main_job(recipe, short, False, log, lambda result: None)
    for content, legal in ((b" \n", "not empty"), (b"\xff\xfe\x00", "UTF-8")):
        short.write_bytes(content)
        with pytest.raises(UsageError, match=legal):
            run_main_job(recipe, short, False, log, lambda result: None)
    with pytest.raises(UsageError, match="No such file"):
        run_main_job(recipe, tmp_path / "none", False, log, lambda result: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 512}, "max_model_len: got 512; legal: at most 256"),
        (
            {"perplexity": {"windows": 2, "window_tokens": 257, "cluster_tokens": 8}},
            "perplexity.window_tokens: got 257; legal: at most 256",
        ),
        (
            {"sweep": {"batches": [1], "context_tokens": 250, "steps": 5}},
            r"sweep: got 'context_tokens \+ 2 \+ steps = 257'; legal: at most 256",
        ),
        (
            {"samples": {"prompts": ["a", "four"], "max_tokens": 253}},
            r"samples: got '4 tokens of prompts\[1\] \+ max_tokens = 257'; legal: at most 256",
        ),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens: got 8; legal: "),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    said = io.StringIO()
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", **changes))
    recipe = replace(recipe, model=str(model), device="cpu")
    log = Log(Console(file=said))
    with pytest.raises(UsageError, match=message):
        run_main_job(recipe, None, False, log, lambda result: pytest.fail("too late"))
    assert "tokens/s" not in said.getvalue()


def test_a_model_without_a_tokenizer_gets_advice_that_can_be_followed(
    model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    with pytest.raises(UsageError, match="model: got .*bare.*tokenizer.json") as caught:
        Run(bare, load_recipe(write_recipe(tmp_path / "recipe.yaml")))
    assert "skip_tokenizer_init" not in str(caught.value)


def test_a_model_in_the_working_directory_has_a_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml"), quick=True)
    short = replace(
        recipe,
        schemes=recipe.schemes[:1],
        sweep=replace(recipe.sweep, batches=()),
        planted_bias=replace(recipe.planted_bias, texts=0),
    )
    assert Run(Path("."), short).result.model.name == model.name


def test_a_block_size_that_a_later_scheme_cannot_have_is_refused_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a 910B half precision takes blocks of 16, INT8 does not: known before anything runs."""
    monkeypatch.setattr(main_job.platform, "device_name", lambda device: "910B3")
    said = io.StringIO()
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", block_size=16))
    recipe = replace(recipe, model=str(model), device="cpu")
    with pytest.raises(UsageError, match="block_size: got 16; legal: 32"):
        run_main_job(recipe, None, False, Log(Console(file=said)), lambda result: None)
    assert "tokens/s" not in said.getvalue()


@pytest.mark.parametrize(("device", "expected"), [("cpu", "kept.gguf"), ("npu", "Qwen/Qwen2.5-7B")])
def test_the_model_when_none_is_named(
    device: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def load(model: str, *_: Any) -> None:
        asked.append(model)
        raise RunError("far enough")

    monkeypatch.setattr(main_job.platform, "find_device", lambda: device)
    monkeypatch.setattr(main_job.platform, "check_device", lambda device: None)
    monkeypatch.setattr(default_model, "fetch_default_model", lambda: Path("kept.gguf"))
    monkeypatch.setattr(model_choice, "load_model", load)
    said = io.StringIO()
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml"))
    with pytest.raises(RunError, match="far enough"):
        run_main_job(recipe, None, False, Log(Console(file=said)), lambda result: None)
    assert asked[0].startswith(expected)
    assert ("no NPU, so this runs on the CPU" in said.getvalue()) == (device == "cpu")


@pytest.mark.parametrize("granularity", ["channel", "token_head"])
def test_static_scales_go_all_the_way(model: Path, tmp_path: Path, granularity: str) -> None:
    path = tmp_path / "scales.safetensors"
    shape = (1, 2, 1, 8) if granularity == "channel" else (1, 2, 120, 1)
    scales = {
        f"layers.{layer}.{side}_scale": torch.full(shape, 0.1)
        for layer in range(3)
        for side in ("key", "value")
    }
    save_file(scales, path)
    recipe = load_recipe(
        write_recipe(
            tmp_path / "recipe.yaml",
            granularity=granularity,
            scale_type="static",
            kv_cache_scales=str(path),
            pair_scaling=False,
            planted_bias={"texts": 0},
            perplexity={**RECIPE["perplexity"], "formats": ["float16", "int8"]},
        )
    )
    result = Run(model, recipe).result
    assert result.complete and result.sweep is not None and result.perplexity is not None
    per_token, once = (0, 16) if granularity == "channel" else (2, 2 * 64)  # scales a layer, side
    for scheme in (result.schemes[1], result.schemes[3]):
        assert scheme.predicted.token_bytes == 3 * 2 * (2 * 8 + 4 * per_token)
        assert scheme.measured.kv_allocated_bytes == scheme.measured.kv_geometry_bytes
        assert scheme.measured.kv_geometry_bytes - scheme.predicted.kv_bytes == 3 * 2 * 4 * once
    assert abs(result.perplexity.formats[-1].ratio - 1) < 0.1
