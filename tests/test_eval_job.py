"""The evaluation on a tiny model: every task, interruptions, what is wrong said early."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fixture import make_model_with_tokenizer
from deepseek_models import make_deepseek
from eval_fixture import POLICIES, make_evaluation, make_recipe
from PIL import Image

from ascend_kv import cli
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.console import table_console
from ascend_kv.evaluate.quality import evaluation, job, report
from ascend_kv.evaluate.quality.command import EXAMPLES
from ascend_kv.evaluate.quality.job import run_eval
from ascend_kv.evaluate.quality.policies import UNQUANTIZED, Policy, parse_policy
from ascend_kv.evaluate.quality.recipe import (
    CopyRecipe,
    EvalRecipe,
    NeedleRecipe,
    load_eval_recipe,
)
from ascend_kv.evaluate.quality.results import EvalResult
from ascend_kv.evaluate.quality.tables import tables
from ascend_kv.evaluate.recipe import WindowRecipe
from ascend_kv.ops import platform, registration

DOCUMENT = Path(__file__).parents[1] / "recipes" / "eval.md"
NAMES = [UNQUANTIZED, "int8", "mixed", "fp8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalResult:
    """A run that nothing disturbed."""
    evaluation = make_evaluation(make_recipe(model), tmp_path_factory.mktemp("whole"))
    return run_eval(evaluation, lambda result: None)


def comparable(result: EvalResult) -> dict[str, Any]:
    """What may not differ between two runs: all but times."""
    content = json.loads(json.dumps(result.as_json()))
    for row in content["perplexity"]:
        del row["seconds"]
    return {
        name: content[name]
        for name in ("cells", "perplexity", "generation", "answers", "needles", "policies")
    }


def test_everything_is_there(whole: EvalResult) -> None:
    assert whole.complete and whole.cells == 4 * (2 + 3 + 4 + 2 + 2)
    assert [row.policy for row in whole.perplexity] == NAMES
    assert [row.policy for row in whole.generation] == NAMES[1:]
    assert [(row.policy, row.task) for row in whole.answers] == [
        (name, task) for task in ("needle", "copy", "recall") for name in NAMES
    ]
    assert len(whole.needles) == 4 * 4
    for row in whole.perplexity:
        assert (row.windows, row.tokens, row.clusters) == (2, 80, 8)
        assert row.perplexity is not None and 1 < row.perplexity < 1e6
    reference, int8, mixed, fp8 = whole.perplexity
    assert reference.change is None and int8.change is not None and int8.divergence is not None
    assert mixed.divergence is not None and fp8.divergence is not None
    assert 0 < mixed.divergence.value < int8.divergence.value < fp8.divergence.value
    assert int8.agreement is not None and 0.5 < int8.agreement.value <= 1
    counts = {row.task: row.questions for row in whole.answers}
    assert counts == {"needle": 4, "copy": 2, "recall": 6}


def test_costs_are_those_of_the_formats(whole: EvalResult) -> None:
    costs = {row.name: row.cost for row in whole.policies}
    values = 3 * 2 * 2 * 8
    assert costs[UNQUANTIZED].bytes_per_token == 4 * values
    assert costs["int8"].bits_per_value == pytest.approx(8 * 12 / 8)
    assert costs["mixed"].bits_per_value == pytest.approx((32 + 2 * 12) / 3)
    assert costs["mixed"].formats == "1 x float32, 2 x int8/token_head"
    assert costs["mixed"].block_size == 8 and costs["int8"].block_size == 16
    assert 8 < costs["fp8"].bits_per_value < 9 and "first 8 tokens" in costs["fp8"].residual
    assert {cost.tokens for cost in costs.values()} == {256}  # the model's longest


def test_the_cost_of_transformers_cache_is_the_same_whatever_ran_first(
    model: Path, whole: EvalResult, tmp_path: Path
) -> None:
    """Scales count once a sequence here, so bytes a token fall with its length."""
    recipe = make_recipe(model, tasks=("copy",), policies=POLICIES[2:])
    result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert result.policies[1] == whole.policies[3]


def test_a_model_of_compressed_entries_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    deepseek = make_deepseek(tmp_path / "model")
    recipe = make_recipe(deepseek)
    with pytest.raises(UsageError, match="a key and a value of every token") as caught:
        make_evaluation(recipe, tmp_path / "out")
    assert caught.value.field == "model" and not (tmp_path / "out").exists()


class Interrupter:
    """Raises KeyboardInterrupt where the count of written cells reaches a number."""

    def __init__(self, evaluation: Any, after: int) -> None:
        self.left, self.put = after, evaluation.store.put
        evaluation.store.put = self

    def __call__(self, *arguments: Any) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.put(*arguments)


@pytest.mark.parametrize("after", [0, 5, 15, 40])
def test_an_interrupted_run_goes_on(
    model: Path, whole: EvalResult, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(model)
    evaluation = make_evaluation(recipe, tmp_path)
    Interrupter(evaluation, after)
    saved: list[EvalResult] = []
    with pytest.raises(KeyboardInterrupt):
        run_eval(evaluation, saved.append)
    assert saved and not saved[-1].complete
    report.write_report(saved[-1], tmp_path)
    assert "Unfinished" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(report, "draw_plots", lambda *_: [])
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("[0-9]*.json")}
    again = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert comparable(again) == comparable(whole)
    for path, time in kept.items():  # nothing was computed twice
        assert path.stat().st_mtime_ns == time
    monkeypatch.setattr(job, "score_window", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(job, "score_question", lambda *_: pytest.fail("computed again"))
    done = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert comparable(done) == comparable(whole)


def test_a_policy_may_come_later_and_gets_the_same_figures(
    model: Path, whole: EvalResult, tmp_path: Path
) -> None:
    for policies in (POLICIES[:1], POLICIES):
        recipe = make_recipe(model, policies=policies, tasks=("perplexity", "generation"))
        result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert comparable(result)["perplexity"] == comparable(whole)["perplexity"]
    assert comparable(result)["generation"] == comparable(whole)["generation"]


def begin(recipe: EvalRecipe, output: Path) -> None:
    """A run that comes as far as its first cell."""
    store = make_evaluation(recipe, output).store
    store.put("unquantized", "copy", 0, {"answer": 1})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 3}, "seed"),
        ({"block_size": 8}, "block_size"),
        ({"dtype": "bfloat16"}, "model.dtype"),
        ({"perplexity": WindowRecipe(2, 40, 10, 24)}, "tasks.perplexity.window_tokens"),
        ({"needle": NeedleRecipe((150,), (0.0,), 1)}, "tasks.needle.depths"),
        (
            {"policies": (Policy("int8", {"kv_cache_dtype": "int8", "symmetric": False}),)},
            "policies.int8.kv_cache_config.symmetric",
        ),
    ],
)
def test_going_on_with_other_settings_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    begin(make_recipe(model), tmp_path)
    with pytest.raises(UsageError) as caught:
        make_evaluation(make_recipe(model, **changes), tmp_path)
    assert caught.value.field == field


def test_going_on_with_other_arithmetic_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(make_recipe(model), tmp_path)
    calls = Counter({("paged_attention", "cpu", "lists of entries"): 3})
    monkeypatch.setattr(registration, "_handed_over", calls)
    make_evaluation(make_recipe(model), tmp_path)  # calls that went elsewhere matter to no cell
    monkeypatch.setattr(platform, "whole_number_bits", lambda device: 24)
    with pytest.raises(UsageError) as caught:
        make_evaluation(make_recipe(model), tmp_path)
    assert caught.value.field == "whole_number_bits"


@pytest.mark.parametrize("bits", [None, 24])
def test_the_report_says_the_arithmetic(
    model: Path, tmp_path: Path, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "whole_number_bits", lambda device: bits)
    evaluation = make_evaluation(make_recipe(model, tasks=("copy",)), tmp_path)
    result = run_eval(evaluation, lambda result: None)
    assert result.as_json()["whole_number_bits"] == bits
    told = "Attention over codes: whole numbers of 24 bits." in report.markdown(result, [])
    assert told == (bits is not None)


def test_another_checkpoint_of_the_same_name_and_size_is_refused(
    model: Path, tmp_path: Path
) -> None:
    begin(make_recipe(model, tasks=("copy",)), tmp_path / "out")
    other = tmp_path / model.name
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match="model_files"):
        make_evaluation(make_recipe(other, tasks=("copy",)), tmp_path / "out")


def test_intervals_may_be_made_anew(model: Path, tmp_path: Path) -> None:
    """Clusters belong to the summary: other ones need no cell again."""
    recipe = make_recipe(model, tasks=("perplexity",))
    run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    recipe = replace(recipe, perplexity=WindowRecipe(2, 41, 5, 24))
    result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert result.perplexity[1].clusters == 16


def test_caches_that_do_not_fit_together_run_in_groups(
    model: Path, whole: EvalResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    score = job.score_window

    def count(window: Any, reference: Any, policies: Any, *rest: Any) -> Any:
        seen.append(len(policies))
        return score(window, reference, policies, *rest)

    monkeypatch.setattr(job, "score_window", count)
    monkeypatch.setattr(job, "_CACHE_SHARE", 0.0)
    recipe = make_recipe(model, tasks=("perplexity",))
    result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert seen == [1] * 6
    assert comparable(result)["perplexity"] == comparable(whole)["perplexity"]


def test_logits_are_held_for_a_chunk_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = job.PagedScorer.forward

    def watch(scorer: Any, *arguments: Any) -> torch.Tensor:
        logits = forward(scorer, *arguments)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(job.PagedScorer, "forward", watch)
    run_eval(make_evaluation(make_recipe(model, tasks=("needle",)), tmp_path), lambda result: None)
    assert max(rows) <= 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perplexity": WindowRecipe(2, 300, 10, 24)}, "window_tokens: got 300; legal: at most"),
        ({"needle": NeedleRecipe((300,))}, "needle.lengths: got 'questions of 300 tokens'"),
        ({"copy": CopyRecipe((200,))}, "copy.lengths: got 'questions of 400 tokens'"),
        ({"text": "/no/such.txt"}, "text: got '/no/such.txt'"),
        ({"model": "/no/such/model"}, "model: got '/no/such/model'"),
        (
            {"policies": (Policy("p", {"kv_cache_dtype_skip_layers": [9]}),)},
            "policy 'p': kv_cache_dtype_skip_layers: got 9",
        ),
        (
            {"policies": (Policy("p", {"kv_cache_dtype": "int8", "granularity": "group",
                                       "group_size": 5}),)},
            "policy 'p': group_size: got 5",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_evaluation(replace(make_recipe(model), **changes), tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize(
    ("letters", "tasks", "legal"),
    [
        (40, ("perplexity",), "at least 82 tokens (2 windows of 41)"),
        (19, ("generation",), "at least 20 tokens"),
        (60, ("needle",), "for needle.lengths 150"),
    ],
)
def test_a_text_that_is_too_short(
    model: Path, tmp_path: Path, letters: int, tasks: tuple[str, ...], legal: str
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a" * letters)
    with pytest.raises(UsageError) as caught:
        make_evaluation(make_recipe(model, text=str(path), tasks=tasks), tmp_path / "out")
    assert caught.value.field == "text" and f"{letters} tokens" in str(caught.value)
    assert legal in str(caught.value)


def test_an_evaluation_without_a_policy_that_can_run_is_refused(
    model: Path, tmp_path: Path
) -> None:
    policy = next(p for p in EvalRecipe().policies if p.name == "HF quanto int4")
    recipe = make_recipe(model, tasks=("copy",), policies=(policy,))
    with pytest.raises(UsageError, match="policies.*HF quanto int4.*pip install optimum-quanto"):
        make_evaluation(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_leaves_its_row_out_and_says_so(model: Path, tmp_path: Path) -> None:
    policy = next(p for p in EvalRecipe().policies if p.name == "HF quanto int4")
    recipe = make_recipe(model, tasks=("copy",), policies=(*POLICIES[:1], policy))
    evaluation = make_evaluation(recipe, tmp_path)
    (skipped,) = evaluation.skipped
    assert skipped.policy == policy.name and "pip install optimum-quanto" in skipped.reason
    result = run_eval(evaluation, lambda result: None)
    assert result.complete and len(result.answers) == 2
    assert any("pip install optimum-quanto" in note for t in tables(result) for note in t.notes)


def test_built_in_policies_that_the_model_cannot_have_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of ten numbers, of which a rotation would mix two, and two layers."""
    odd = make_model_with_tokenizer(tmp_path / "odd", head_dim=10, num_hidden_layers=2)
    shipped = load_eval_recipe(DOCUMENT.with_suffix(".yaml"))
    evaluation = make_evaluation(
        make_recipe(odd, tasks=("copy",), policies=shipped.policies), tmp_path / "out"
    )
    reasons = {entry.policy: entry.reason for entry in evaluation.skipped}
    assert "head_dim" in reasons["int4/asymmetric/hadamard"]
    assert "skip_layers" in reasons["int8, keys as they are, first 4 layers kept"]
    assert "int8" in {runner.policy.name for runner in evaluation.runners}
    named = parse_policy("int4/asymmetric/hadamard")
    with pytest.raises(UsageError, match="policy 'int4/asymmetric/hadamard'"):
        make_evaluation(make_recipe(odd, tasks=("copy",), policies=(named,)), tmp_path / "out")


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all leaves; free-form mappings end in ``.*``."""
    if path in ("recipe", "operators", "machine.versions", "policies[].settings"):
        yield f"{path}.*"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from keys_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{path}[]")
    else:
        yield path


def test_every_key_of_the_report_is_documented_and_no_other(whole: EvalResult) -> None:
    content = whole.as_json()
    content["harness"] = [
        {"policy": "p", "task": "t", "metric": "acc", "value": 0.5, "error": 0.1, "cut": ""}
    ]
    content["skipped"] = [{"policy": "p", "task": "", "reason": "r"}]
    keys = set(keys_of(json.loads(json.dumps(content))))
    # Where one row has an interval and another null, both paths are there; the interval counts.
    keys -= {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    # Too few questions here for any of these intervals.
    for row in (
        "generation[].interval",
        "answers[].exact_change",
        "answers[].log_probability_change",
    ):
        keys.remove(row)
        keys |= {f"{row}.{end}" for end in ("value", "low", "high")}
    documented = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == keys
    assert f"`{content['schema']}`" in DOCUMENT.read_text()


def test_report_and_plots(whole: EvalResult, tmp_path: Path) -> None:
    report.write_report(whole, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.json", "report.md", "pareto.png", "needle.png"}
    for name in ("pareto.png", "needle.png"):
        assert Image.open(tmp_path / name).size[0] > 300
    text = (tmp_path / "report.md").read_text()
    assert "Unfinished" not in text and "![pareto](pareto.png)" in text
    for name in NAMES:
        assert f"| {name} |" in text
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["complete"] and written["perplexity"][0]["policy"] == UNQUANTIZED


def test_every_table_says_that_it_was_measured(whole: EvalResult) -> None:
    assert len(tables(whole)) == 6
    for table in tables(whole):
        assert "measured" in table.title
        assert all(len(row) == len(table.header) for row in table.rows)


def test_what_is_not_a_number_shows_in_the_table(whole: EvalResult) -> None:
    broken = replace(
        whole.perplexity[1],
        not_finite=5,
        perplexity=None,
        change=None,
        divergence=None,
        agreement=None,
    )
    result = replace(whole, perplexity=[whole.perplexity[0], broken], needles=[])
    assert "5 tokens not a number" in tables(result)[0].rows[1]
    report.show(result, table_console(stderr=True))


def test_windows_that_differ_between_rows_are_shouted_about(whole: EvalResult) -> None:
    fewer = replace(whole.perplexity[2], windows=1)
    result = replace(whole, perplexity=[*whole.perplexity[:2], fewer])
    assert any("UNFINISHED" in note and "mixed: 1" in note for note in tables(result)[0].notes)
    assert not any("UNFINISHED" in note for note in tables(whole)[0].notes)


def test_the_command_end_to_end(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("copy: {lengths: [8], passages: 2}\npolicies: [int8, 16-bit]\n")
    arguments = ["eval", str(recipe), "--model", str(model), "--device", "cpu", "--json"]
    arguments += ["--task", "copy,perplexity", "--windows", "2", "--window-tokens", "30"]
    output = tmp_path / "out"
    # Two windows of 30 tokens are one cluster each: no interval worth printing is refused.
    assert cli.main([*arguments, "--output", str(output)]) == 2
    assert "perplexity: got '2 clusters" in capsys.readouterr().err
    recipe.write_text(recipe.read_text() + "perplexity: {cluster_tokens: 7}\n")
    assert cli.main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result == json.loads((output / "report.json").read_text()) and result["complete"]
    assert "Task copy" in printed.err
    assert cli.main([*arguments, "--output", str(output), "--policy", "int8"]) == 0
    printed = capsys.readouterr()
    assert "Going on: 8 of 8 cells" in printed.err
    assert cli.main([*arguments, "--output", str(output), "--windows", "3"]) == 2
    assert "tasks.perplexity.windows: got 3; legal: 2" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "score_question", interrupt)
    output = tmp_path / "out"
    arguments = ["eval", "--quick", "--model", str(model), "--task", "copy", "--output"]
    assert cli.main([*arguments, str(output)]) == 130
    said = capsys.readouterr().err
    assert f"To go on: the same command with --output {output}" in said
    assert not json.loads((output / "report.json").read_text())["complete"]


def test_a_mistake_that_shows_late_names_the_policy_and_is_not_repeated(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = "{name: mine, kv_cache_dtype: int8, scale_type: static, kv_cache_scales: /gone}"
    arguments = ["eval", "--quick", "--model", str(model), "--task", "copy", "--policy", policy]
    assert cli.main([*arguments, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "policy 'mine': kv_cache_scales: got '/gone'" in said and "To go on" not in said


@pytest.mark.parametrize("flag", ["--task", "--lm-eval"])
def test_names_that_are_none(
    flag: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "--model", str(model), flag, ",", "--output", str(tmp_path)]) == 2
    assert f"{flag}: got ','" in capsys.readouterr().err


def commands() -> list[list[str]]:
    """Every ``ascend-kv eval`` of its document and its help."""
    blocks = re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    examples = [line.strip() for line in EXAMPLES.splitlines() if line.startswith("  ascend-kv")]
    lines = [
        shlex.split(line.split(" > ")[0], comments=True)
        for line in [*"".join(blocks).splitlines(), *examples]
    ]
    return [words[1:] for words in lines if words]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_the_document_and_the_help_runs(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first cell, on the tiny model; recipe, flags, policies and tasks are read."""
    seen: list[EvalRecipe] = []

    def begin(recipe: EvalRecipe, *_: Any) -> None:
        seen.append(recipe)
        raise RunError("far enough")

    monkeypatch.setattr(evaluation, "Evaluation", begin)
    words = [str(DOCUMENT.parents[1] / w) if w.startswith("recipes/") else w for w in words]
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    (recipe,) = seen
    assert ("--quick" in words) == (recipe.perplexity.windows == 2)
    if "--policy" in words:
        assert len(recipe.policies) == words.count("--policy")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    printed = capsys.readouterr().out
    for word in ("Policies", "Tasks", "Examples", "Exit codes", "--output DIR goes on"):
        assert word in printed
