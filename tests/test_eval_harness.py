"""The adapter to lm-evaluation-harness, against a stand-in of that library."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from bench_fixture import make_model_with_tokenizer
from eval_fixture import POLICIES, make_evaluation, make_recipe

from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.quality import harness
from ascend_kv.evaluate.quality.job import run_eval
from ascend_kv.evaluate.quality.recipe import HarnessRecipe
from ascend_kv.evaluate.quality.tables import tables
from ascend_kv.llm import LLM

LONGEST = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), max_model_len=LONGEST, kv_cache_memory_bytes=1 << 20, device="cpu")


class Library:
    """Stands for ``lm_eval``: asks the adapter what its tasks would."""

    def __init__(self, known: Sequence[str] = ("arc", "wiki")) -> None:
        self.calls: list[dict[str, Any]] = []
        self.include: list[object] = []
        self.module = ModuleType("lm_eval")
        model = ModuleType("lm_eval.api.model")
        tasks = ModuleType("lm_eval.tasks")
        library = self

        class LM:
            def __init__(self) -> None:
                self.rank = 0

        class TaskManager:
            def __init__(self, include_path: object = None) -> None:
                library.include.append(include_path)
                self.all_tasks = list(known)
                self.all_tasks.append("tag")

        model.LM, tasks.TaskManager = LM, TaskManager  # type: ignore[attr-defined]
        self.module.simple_evaluate = self.evaluate  # type: ignore[attr-defined]
        self.modules = {
            "lm_eval": self.module,
            "lm_eval.api": ModuleType("lm_eval.api"),
            "lm_eval.api.model": model,
            "lm_eval.tasks": tasks,
        }
        self.base = LM

    def evaluate(self, model: Any, tasks: list[str], **options: Any) -> dict[str, Any]:
        assert isinstance(model, self.base) and model.rank == 0
        self.calls.append({"tasks": tasks, **options})
        ((value, greedy),) = model.loglikelihood([request("ab", "cd")])
        if tasks == ["tag"]:  # no entry of its own
            return {"results": {"arc": {"acc,none": 0.5}, "bare": {"acc,none": 0.75}}}
        return {
            "results": {
                tasks[0]: {
                    "alias": tasks[0],
                    "sample_len": 20,
                    "acc,none": 0.25,
                    "acc_stderr,none": 0.125,
                    "exact_match,strict": float(greedy),
                    "exact_match_stderr,strict": "N/A",
                    "sum,none": value,
                }
            }
        }


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    for name, module in library.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return library


@pytest.fixture(scope="module")
def expected(path: Path) -> Any:
    """Log probabilities of every token by a plain forward, and the tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)

    def logs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)

    return logs


def ids(llm: LLM, text: str) -> list[int]:
    return list(llm.tokenizer(text)["input_ids"])


def summed(logs: torch.Tensor, tokens: list[int], count: int) -> float:
    places = range(len(tokens) - count, len(tokens))
    return sum(float(logs[place - 1, tokens[place]]) for place in places)


@pytest.mark.parametrize(
    ("context", "continuation", "count"),
    [("The sky", " is blue", 8), ("x ", "y", 2), ("a", "b", 1), ("one two  ", "three four", 12)],
)
def test_loglikelihood_is_that_of_a_plain_forward(
    llm: LLM, library: Library, expected: Any, context: str, continuation: str, count: int
) -> None:
    """Spaces between the two belong to what is scored, as in the library's own models."""
    adapter = harness.make_adapter(llm)
    tokens = ids(llm, context + continuation)
    ((value, greedy),) = adapter.loglikelihood([request(context, continuation)])
    logs = expected(tokens)
    assert value == pytest.approx(summed(logs, tokens, count), abs=1e-3)
    best = [int(logs[place - 1].argmax()) for place in range(len(tokens) - count, len(tokens))]
    assert greedy == (best == tokens[-count:])


def test_greedy_is_recognized(llm: LLM, library: Library, expected: Any) -> None:
    adapter = harness.make_adapter(llm)
    found = 0
    for letter in "abcdefghijklmnopqrstuvwxyz":
        best = llm.tokenizer.decode([int(expected(ids(llm, letter))[-1].argmax())])
        if best.isascii() and best.strip():  # a byte that is a text of its own
            found += 1
            ((_, greedy), (_, other)) = adapter.loglikelihood(
                [request(letter, best), request(letter, "\x01" if best != "\x01" else "\x02")]
            )
            assert greedy and not other
    assert found


def test_an_empty_context_begins_with_a_token_of_its_own(
    llm: LLM, library: Library, expected: Any
) -> None:
    adapter = harness.make_adapter(llm)
    tokens = [*adapter._first, *ids(llm, "abc")]
    ((value, _),) = adapter.loglikelihood([request("", "abc")])
    assert value == pytest.approx(summed(expected(tokens), tokens, 3), abs=1e-3)


def test_long_prompts_lose_their_beginning(llm: LLM, library: Library, expected: Any) -> None:
    adapter = harness.make_adapter(llm)
    ((value, _),) = adapter.loglikelihood([request("q" * 90, "xyz")])
    tokens = ids(llm, "q" * 90 + "xyz")[-(LONGEST - 1) :]
    assert value == pytest.approx(summed(expected(tokens), tokens, 3), abs=1e-3)


@pytest.mark.parametrize("letters", [1, 45, 46, 47, 93, 150])
def test_a_whole_text_counts_every_token_once(
    llm: LLM, library: Library, expected: Any, letters: int
) -> None:
    """Windows as the library cuts them: each begins with one token of context, the last full."""
    adapter = harness.make_adapter(llm)
    text = "".join(chr(97 + i * i % 23) for i in range(letters))
    (value,) = adapter.loglikelihood_rolling([request(text)])
    tokens, longest = ids(llm, text), LONGEST - 1
    total, done = 0.0, 0
    while done < len(tokens):
        stop = min(done + longest - 1, len(tokens))
        begin = max(0, stop - longest)
        window = [*(adapter._first if done == 0 else []), *tokens[begin:stop]]
        total += summed(expected(window), window, stop - done)
        done = stop
    assert value == pytest.approx(total, abs=5e-3)


def test_several_texts_keep_apart(llm: LLM, library: Library) -> None:
    adapter = harness.make_adapter(llm)
    texts = ["a" * 100, "", "bcd"]
    together = adapter.loglikelihood_rolling([request(text) for text in texts])
    alone = [adapter.loglikelihood_rolling([request(text)])[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-3) and together[1] == 0


def test_generation_stops_where_the_task_says(llm: LLM, library: Library) -> None:
    adapter = harness.make_adapter(llm)
    (whole,) = adapter.generate_until([request("Go", {"max_gen_toks": 12})])
    stop = whole[5]
    (cut, same) = adapter.generate_until(
        [
            request("Go", {"max_gen_toks": 12, "until": [stop, ""]}),
            request("Go", {"max_gen_toks": 12, "until": None, "do_sample": False}),
        ]
    )
    assert cut == whole[: whole.index(stop)] and same == whole
    (long,) = adapter.generate_until([request("z" * 200, {})])  # 256 tokens would not fit
    assert isinstance(long, str)


def test_figures_are_read(llm: LLM, library: Library) -> None:
    recipe = HarnessRecipe(tasks=("arc",), limit=5, num_fewshot=2, include_path="mine")
    manager = harness.check_tasks(library.module, recipe)
    found, cut = harness.run_task(library.module, manager, llm, "arc", recipe)
    assert [figure.metric for figure in found] == ["acc", "exact_match (strict)", "sum"]
    assert found[0] == ("arc", "acc", 0.25, 0.125) and found[1].error is None and cut == ""
    assert math.isfinite(found[2].value)
    (call,) = library.calls
    assert (call["limit"], call["num_fewshot"], call["tasks"]) == (5, 2, ["arc"])
    assert library.include == ["mine"]


def test_a_tag_gives_the_figures_of_its_tasks(llm: LLM, library: Library) -> None:
    found, _ = harness.run_task(library.module, None, llm, "tag", HarnessRecipe(tasks=("tag",)))
    assert found == [("arc", "acc", 0.5, None), ("bare", "acc", 0.75, None)]


@pytest.mark.parametrize("results", [{}, {"arc": {"alias": "arc", "sample_len": 3}}])
def test_a_task_without_a_figure_is_an_error(
    llm: LLM, library: Library, results: dict[str, Any]
) -> None:
    library.module.simple_evaluate = lambda **_: {"results": results}  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="arc came back without a figure"):
        harness.run_task(library.module, None, llm, "arc", HarnessRecipe(tasks=("arc",)))


def test_what_does_not_fit_is_counted(llm: LLM, library: Library) -> None:
    adapter = harness.make_adapter(llm)
    adapter.loglikelihood([request("q" * 40, "xyz"), request("", "x" * (LONGEST - 2))])
    adapter.loglikelihood_rolling([request("q" * 200)])  # in windows, every token once
    adapter.generate_until(
        [request("Go", {"max_gen_toks": 12}), request("Go", {"max_gen_toks": 23})]
    )
    assert not adapter.cut
    adapter.loglikelihood([request("q" * 45, "xyz"), request("a", "x" * (LONGEST - 1))])
    adapter.generate_until([request("z" * 26, {"max_gen_toks": 23}), request("Go", {})])
    assert adapter.cut == {
        "prompts without their beginning": 3,
        "continuations scored in part": 1,
        "answers ended before the task's limit": 1,
    }


def test_what_was_cut_stands_below_the_table(path: Path, library: Library, tmp_path: Path) -> None:
    evaluate = library.evaluate

    def longer(model: Any, **options: Any) -> dict[str, Any]:
        model.loglikelihood([request("q" * 80, "xyz")])
        return evaluate(model, **options)

    library.module.simple_evaluate = longer  # type: ignore[attr-defined]
    recipe = make_recipe(
        path,
        tasks=("lm_eval",),
        lm_eval=HarnessRecipe(tasks=("arc",), max_model_len=64),
        policies=POLICIES[:1],
    )
    result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    (table,) = (table for table in tables(result) if "lm-evaluation-harness" in table.title)
    assert [note for note in table.notes if "int8" in note] == [
        "Longer than lm_eval.max_model_len: int8, arc: 1 prompts without their beginning."
    ]


def test_an_unknown_task_is_refused(library: Library) -> None:
    with pytest.raises(UsageError, match="Did you mean arc"):
        harness.check_tasks(library.module, HarnessRecipe(tasks=("arcc",)))


def test_a_task_that_fails_says_why(llm: LLM, library: Library) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("no way\nto the hub")

    library.module.simple_evaluate = fail  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="arc failed: ConnectionError: no way to the hub"):
        harness.run_task(library.module, None, llm, "arc", HarnessRecipe(tasks=("arc",)))


def test_without_the_library_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match="pip install lm_eval") as caught:
        harness.find_harness()
    assert caught.value.field == "lm_eval.tasks"


def test_tasks_of_the_library_run_for_every_cache_of_ours(
    path: Path, library: Library, tmp_path: Path
) -> None:
    recipe = make_recipe(
        path,
        tasks=("lm_eval",),
        lm_eval=HarnessRecipe(tasks=("arc",), max_model_len=64),
        policies=(POLICIES[0], POLICIES[2]),
    )
    evaluation = make_evaluation(recipe, tmp_path)
    assert [(entry.policy, entry.task) for entry in evaluation.skipped] == [("fp8", "lm_eval")]
    result = run_eval(evaluation, lambda result: None)
    assert result.complete and len(library.calls) == 2
    values = {row.policy: row.value for row in result.harness if row.metric == "sum"}
    assert set(values) == {"unquantized", "int8"} and values["unquantized"] != values["int8"]
    more = make_recipe(
        path,
        tasks=("lm_eval",),
        lm_eval=HarnessRecipe(tasks=("arc", "wiki"), max_model_len=64),
        policies=(POLICIES[0],),
    )
    run_eval(make_evaluation(more, tmp_path), lambda result: None)
    assert [call["tasks"] for call in library.calls[2:]] == [["wiki"], ["wiki"]]
