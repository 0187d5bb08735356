"""Calibration: the fit, its file, the steps it runs, and what a plan makes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk
from refusals import refused
from tiny_models import make_model

from ascend_kv import cli
from ascend_kv.errors import RunError, UsageError
from ascend_kv.plan import calibration
from ascend_kv.plan.calibration import (
    BATCHES,
    Calibration,
    MeasuredStep,
    StepCosts,
    fit_steps,
    read_calibration,
)
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.performance import Load

COSTS = StepCosts((1.0, 2.0, 3.0, 5.0, 6.0, 8.0), 0.1, 0.01, 0.001, 0.25)


@pytest.mark.parametrize(
    ("decodes", "seconds"), [(0, 1.0), (1, 2.0), (2, 2 + 1 / 3), (4, 3.0), (24, 7.0), (64, 15.0)]
)
def test_the_curve_is_straight_between_its_corners_and_goes_on(
    decodes: int, seconds: float
) -> None:
    assert COSTS.step_time(Load(decodes, 0)).seconds == pytest.approx(seconds)


def test_noise_does_not_make_large_batches_free() -> None:
    falling = StepCosts((1.0, 2.0, 3.0, 5.0, 9.0, 0.5), 0.1, 0.01, 0.001, 0.25)
    assert falling.step_time(Load(1000, 0)).seconds == 0.5


def test_a_step_by_hand() -> None:
    step = COSTS.step_time(Load(4, 100, 7, 30))
    assert step.seconds == pytest.approx(3.0 + 0.7 + 1.0 + 0.03)
    assert step.bound == "tokens"
    assert COSTS.step_time(Load(0, 0, 70), 0.5).bound == "prompt"
    assert COSTS.step_time(Load(0, 0, 70), 0.5).seconds == pytest.approx(4.0)


def make_steps(noise: float = 0.0) -> list[MeasuredStep]:
    generator = random.Random(1)
    loads = [Load(n, n * context) for n in BATCHES[1:] for context in (10, 300)]
    loads += [Load(0, 0, tokens, pairs) for tokens, pairs in ((64, 100), (64, 9000), (128, 8000))]
    return [
        MeasuredStep(load, COSTS.step_time(load).seconds * generator.uniform(1 - noise, 1 + noise))
        for load in loads
    ]


def test_a_fit_finds_the_costs_that_made_the_steps() -> None:
    found = fit_steps(make_steps())
    assert found.curve_seconds == pytest.approx(COSTS.curve_seconds)
    assert found.prefill_token_seconds == pytest.approx(0.1)
    assert found.context_seconds == pytest.approx(0.01)
    assert found.pair_seconds == pytest.approx(0.001)
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert 0 < fit_steps(make_steps(0.1)).spread < 0.1


def test_steps_that_were_held_up_count_in_full() -> None:
    """Every third step takes three times as long: the mean step does 5 / 3 of what most do."""
    steps = [
        MeasuredStep(step.load, step.seconds * (3.0 if number == 2 else 1.0))
        for step in make_steps()
        for number in range(3)
    ]
    found = fit_steps(steps)
    for step in make_steps():
        assert found.step_time(step.load).seconds == pytest.approx(step.seconds * 5 / 3)
    total = sum(step.seconds for step in steps)
    assert sum(found.step_time(step.load).seconds for step in steps) == pytest.approx(total)


def test_a_step_that_a_fit_gives_no_time_keeps_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is divided by zero: noise can pin all costs that a step has to 0."""
    seen: list[list[float]] = []

    def fit(steps: list[MeasuredStep], scales: list[float]) -> StepCosts:
        seen.append(scales)
        return StepCosts((0.0,) * len(BATCHES), 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(calibration, "_fit", fit)
    fit_steps([MeasuredStep(Load(1, 10), 0.25)])
    assert seen == [[0.25]] * len(seen) and len(seen) > 1


def test_a_calibration_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    calibration = Calibration("a processor", "a model", {"int8/token_head": COSTS})
    calibration.write(path)
    assert read_calibration(path) == calibration
    clocks = calibration.clocks("int8/token_head")
    low, best, high = (clocks[name](Load(1, 0)).seconds for name in ("low", "best", "high"))
    assert (low, best, high) == pytest.approx((1.5, 2.0, 2.5))
    error = refused(UsageError, calibration.clocks, "float16")
    assert error.field == "--formats" and "--calibrate --formats float16" in error.hint


def test_an_older_calibration_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    fill_disk(monkeypatch, path)
    with pytest.raises(RunError, match="No space left"):
        Calibration("a processor", "a model", {}).write(path)
    assert path.read_text() == "old"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "x"}', '{"schema": 1}'])
def test_files_of_another_kind(content: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    assert refused(UsageError, read_calibration, path).field == "--calibration"
    assert refused(UsageError, read_calibration, tmp_path / "none").field == "--calibration"


def write_qwen(path: Path) -> None:
    described = find_planned_model("qwen2.5-0.5b").describe("bfloat16")
    Calibration("a processor", described, {"int8/token_head": COSTS}).write(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["qwen2.5-1.5b"], "This one is of qwen2, 24 layers of 896"),
        (["qwen2.5-0.5b", "--weights", "w8a8"], "weights in bfloat16."),
        (["qwen2.5-0.5b", "--tensor-parallel", "2"], "--tensor-parallel: got 2; legal: 1 with"),
    ],
)
def test_a_calibration_is_of_one_model(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    write_qwen(path)
    options = ["--memory", "1GiB", "--formats", "int8", "--calibration", str(path)]
    assert cli.main(["plan", *arguments, *options]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats", "int8", "--granularity", "head", "--scale-type", "static"],
         "--formats: got 'int8/head/static'; legal: dynamic scales with --calibrate"),
        (["--formats", "auto,fp8/head/static"], "dynamic scales with --calibrate"),
        (["--formats", "int8", "--weights", "w8a8"], "--weights: got 'w8a8'; legal: auto or bf"),
    ],
)  # fmt: skip
def test_what_is_not_run_is_not_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is loaded: this one is not even there."""
    options = ["plan", "qwen2.5-0.5b", "--memory", "1GiB", "--calibrate"]
    assert cli.main([*options, *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_saved_calibration_plans_speed_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    write_qwen(path)
    arguments = ["plan", "qwen2.5-0.5b", "--memory", "1GiB", "--formats", "int8", "--json"]
    assert cli.main([*arguments, "--calibration", str(path), "--simulate", "--requests", "9"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (policy,) = plan["policies"]
    # 64 sequences of 100 + 80 tokens on the average: 15 + 0.01 x 64 x 180 seconds
    assert policy["speed"]["best"]["tpot_seconds"] == pytest.approx(15 + 0.01 * 64 * 180)
    assert policy["speed"]["best"]["bound"] == "cache"
    assert plan["simulations"][0]["requests"] == 9


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")

    model = tmp_path / "model"
    make_model(model)
    path = tmp_path / "machine.json"
    arguments = ["plan", str(model), "--memory", "1MB", "--max-model-len", "64", "--prompt", "20",
                 "--output", "12", "--formats", "auto,int8", "--skip-layers", "0"]  # fmt: skip
    assert cli.main([*arguments, "--calibrate", "--save-calibration", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = read_calibration(path)
    assert found.model == find_planned_model(model).describe("float32")
    assert list(found.formats) == ["float32", "1 x float32, 2 x int8/token_head"]
    assert all(costs.curve_seconds[1] > 0 for costs in found.formats.values())
    assert all(policy["speed"]["best"]["tpot_seconds"] > 0 for policy in plan["policies"])


def test_the_steps_that_are_timed_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches and contexts as listed, prompts computed whole, and the cache's blocks all free.

    Formats take turns, twice.
    """
    pytest.importorskip("torch")
    from ascend_kv.evaluate import calibrate_steps
    from ascend_kv.integrations.loading import load_model

    make_model(tmp_path)
    seen: list[list[MeasuredStep]] = []
    parts: list[str] = []
    benches: list[calibrate_steps._Bench] = []
    created = calibrate_steps._Bench.__init__

    def watch(bench: calibrate_steps._Bench, llm: Any, longest: int) -> None:
        for layer in llm.cache.layers:  # as memory that was used before may be
            for tensor in layer.block_tensors:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        created(bench, llm, longest)
        for tensor in bench._slot_tensors:
            tensor.fill_(float("nan"))
        benches.append(bench)
        parts.append(str(llm.formats[0]))

    def keep(steps: list[MeasuredStep]) -> StepCosts:
        seen.append(steps)
        return COSTS

    monkeypatch.setattr(calibrate_steps._Bench, "__init__", watch)
    monkeypatch.setattr(calibrate_steps, "fit_steps", keep)
    caches: dict[str, dict[str, Any]] = {
        "auto": {},
        "int8": {"kv_cache_dtype": "int8"},
        "kivi": {"kv_cache_dtype": "int4/kivi", "block_size": 64},
    }
    model = load_model(tmp_path)
    found = calibrate_steps.measure_costs(model, caches, advance=lambda: parts.append("part"))
    assert found == dict.fromkeys(caches, COSTS)
    order = [name.split("/")[0] for name in parts if name != "part"]
    assert order == ["float32", "int8", "k:int4"] * 2
    assert parts.count("part") == calibrate_steps.num_parts(3) == 2 * 3 * 9
    longest = 256  # the model's
    contexts = [min(context, longest - calibrate_steps.STEPS) for _, context in
                calibrate_steps.DECODES]  # fmt: skip
    expected = [
        Load(batch, batch * (context + step))
        for (batch, _), context in zip(calibrate_steps.DECODES, contexts, strict=True)
        for step in range(1, calibrate_steps.STEPS)
    ]
    assert len(seen[0]) == len(seen[1])
    each = len(seen[1]) // 2  # a round
    assert [step.load for step in seen[1][-len(expected) :]] == expected
    assert [step.load for step in seen[1][:each]] == [step.load for step in seen[1][each:]]
    prompts = seen[1][: each - len(expected)]
    lengths = [min(length, longest - 2) for length in calibrate_steps.PROMPTS]
    # a prompt's last chunk, or one that fits the step's rest, may be of one token: a decode then
    computed = sum(step.load.tokens for step in prompts)
    assert computed == sum(lengths) + len(lengths)
    for bench in benches:
        assert bench._engine.scheduler.tables.stats().used_blocks == 0
