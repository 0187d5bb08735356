"""What ``ascend-kv eval`` does: frozen dataclasses that recipes/eval.yaml mirrors key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.policies import (
    DEFAULT_POLICIES,
    UNQUANTIZED,
    Policy,
    parse_policy,
    read_policy,
)
from ascend_kv.evaluate.recipe import WindowRecipe, checked_versions, merge, read_versions
from ascend_kv.geometry import FORMATS
from ascend_kv.registry import did_you_mean
from ascend_kv.user_values import from_mapping

TASKS = ("perplexity", "generation", "needle", "copy", "recall", "lm_eval")
"""Every task, in the order in which they run."""


@dataclass(frozen=True)
class CalibrationRecipe:
    """The text that policies with ``calibrate`` learn from; not the one they are judged by."""

    text: str | None = None
    tokens: int = 2048


@dataclass(frozen=True)
class GenerationRecipe:
    """Greedy continuations, compared with the unquantized cache's."""

    prompts: int = 16
    prompt_tokens: int = 256
    max_tokens: int = 64


@dataclass(frozen=True)
class NeedleRecipe:
    """A sentence hidden in a long text, at so many percent of it."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    repeats: int = 3


@dataclass(frozen=True)
class CopyRecipe:
    """Passages of random tokens that come twice."""

    lengths: tuple[int, ...] = (64, 256)
    passages: int = 4


@dataclass(frozen=True)
class RecallRecipe:
    """Lists of keys with values, and questions after them."""

    pairs: tuple[int, ...] = (16, 64)
    lists: int = 4
    questions: int = 8


@dataclass(frozen=True)
class HarnessRecipe:
    """Tasks of lm-evaluation-harness, where it is installed."""

    tasks: tuple[str, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    max_model_len: int = 2048
    include_path: str | None = None


@dataclass(frozen=True)
class EvalRecipe:
    """Everything ``ascend-kv eval`` does, in the order of the YAML file."""

    model: str | None = None
    dtype: str = "auto"
    device: Literal["auto", "cpu", "npu"] = "auto"
    text: str | None = None
    block_size: int | None = None
    seed: int = 0
    tasks: tuple[str, ...] = ("perplexity", "generation", "needle", "copy", "recall")
    calibration: CalibrationRecipe = field(default_factory=CalibrationRecipe)
    perplexity: WindowRecipe = field(
        default_factory=lambda: WindowRecipe(windows=16, window_tokens=2048)
    )
    generation: GenerationRecipe = field(default_factory=GenerationRecipe)
    needle: NeedleRecipe = field(default_factory=NeedleRecipe)
    copy: CopyRecipe = field(default_factory=CopyRecipe)
    recall: RecallRecipe = field(default_factory=RecallRecipe)
    lm_eval: HarnessRecipe = field(default_factory=HarnessRecipe)
    policies: tuple[Policy, ...] = DEFAULT_POLICIES

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded.

        Raises:
            UsageError: names the key, what was given and what is legal.
        """
        if self.dtype not in ("auto", *FORMATS):
            raise UsageError("dtype", self.dtype, ("auto", *FORMATS))
        if self.seed < 0:
            raise UsageError("seed", self.seed, "0 or more")
        if self.block_size is not None and self.block_size < 1:
            raise UsageError("block_size", self.block_size, "1 or more")
        self._check_tasks()
        self._check_policies()
        self.perplexity.check()
        for name, least in _LEAST.items():
            section, key = name.split(".")
            given = getattr(getattr(self, section), key)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and value < least:
                    raise UsageError(name, value, f"{least} or more")
        for depth in self.needle.depths:
            if not 0 <= depth <= 100:
                raise UsageError("needle.depths", depth, "0 to 100 (percent)")
        for name in ("needle.lengths", "needle.depths", "copy.lengths", "recall.pairs"):
            section, key = name.split(".")
            given = getattr(getattr(self, section), key)
            if not given or len(set(given)) < len(given):
                raise UsageError(name, list(given), "a list of numbers that differ")
        if self.recall.questions > min(self.recall.pairs):
            legal = f"at most {min(self.recall.pairs)}, the shortest list's pairs"
            raise UsageError("recall.questions", self.recall.questions, legal)

    def _check_tasks(self) -> None:
        if not self.tasks:
            raise UsageError("tasks", [], TASKS)
        for task in self.tasks:
            if task not in TASKS:
                raise UsageError("tasks", task, TASKS, did_you_mean(task, TASKS))
        if "lm_eval" in self.tasks and not self.lm_eval.tasks:
            raise UsageError("lm_eval.tasks", [], "names of lm-evaluation-harness tasks")

    def _check_policies(self) -> None:
        if not self.policies:
            raise UsageError("policies", [], "one policy or more")
        names = [policy.name for policy in self.policies]
        for name in names:
            if name == UNQUANTIZED:
                hint = "The unquantized reference is always there and needs no mention."
                raise UsageError("policies", name, "other names", hint)
            if names.count(name) > 1:
                raise UsageError("policies", name, "names that differ")

    @property
    def has_built_in_policies(self) -> bool:
        """Whether nobody chose them: one list, of which not every model can have every policy."""
        return self.policies in (DEFAULT_POLICIES, _read(QUICK, "quick").policies)

    @property
    def ordered_tasks(self) -> tuple[str, ...]:
        """The tasks in the order in which they run."""
        return tuple(task for task in TASKS if task in self.tasks)


_LEAST = {
    "calibration.tokens": 2,
    "generation.prompts": 1,
    "generation.prompt_tokens": 1,
    "generation.max_tokens": 1,
    "needle.lengths": 64,
    "needle.repeats": 1,
    "copy.lengths": 2,
    "copy.passages": 1,
    "recall.pairs": 1,
    "recall.lists": 1,
    "recall.questions": 1,
    "lm_eval.limit": 1,
    "lm_eval.num_fewshot": 0,
    "lm_eval.max_model_len": 16,
}

QUICK: dict[str, Any] = {
    "perplexity": {"windows": 2, "window_tokens": 512},
    "generation": {"prompts": 2, "prompt_tokens": 64, "max_tokens": 16},
    "needle": {"lengths": [256], "depths": [0, 50, 100], "repeats": 1},
    "copy": {"lengths": [64], "passages": 1},
    "recall": {"pairs": [16], "lists": 1},
    "policies": [
        "int8",
        "int8, keys as they are",
        "fp8_e4m3",
        "int4/asymmetric/hadamard",
        "HF fp8",
    ],
}
"""What ``--quick`` changes where no recipe is given; recipes/eval.yaml says the same."""


def load_eval_recipe(path: Path | None, quick: bool = False) -> EvalRecipe:
    """Read a YAML recipe, or take the built-in one where there is none.

    The ``quick`` section is checked in every run, so that a mistake in it is found early.

    Raises:
        UsageError: no such file, not YAML, an unknown key or an illegal value.
    """
    contents = ({}, QUICK) if path is None else read_versions(path)

    def read(content: Mapping[str, Any]) -> EvalRecipe:
        recipe = _read(content, str(path))
        recipe.check()
        return recipe

    return checked_versions(contents, read)[quick]


def _read(content: Mapping[str, Any], where: str) -> EvalRecipe:
    policies = content.get("policies", DEFAULT_POLICIES)
    if not isinstance(policies, Sequence) or isinstance(policies, str):
        raise UsageError(f"{where}: policies", policies, "a list of policies")
    rest = {key: value for key, value in content.items() if key != "policies"}
    # A section that says nothing of some keys keeps their defaults, as the others do.
    rest = merge({"perplexity": {"windows": 16, "window_tokens": 2048}}, rest)
    recipe = from_mapping(EvalRecipe, rest, where)
    return replace(
        recipe,
        policies=tuple(
            entry
            if isinstance(entry, Policy)
            else read_policy(entry, f"{where}: policies[{number}]")
            for number, entry in enumerate(policies)
        ),
    )


def with_flags(recipe: EvalRecipe, given: Mapping[str, Any]) -> EvalRecipe:
    """The recipe with what the command line said in place of its own.

    Args:
        recipe: from the file, or built in.
        given: flags by name, None or empty where they were not given: model, text, device,
            dtype, tasks, policies, windows, window_tokens, lm_eval, limit.

    Raises:
        UsageError: names the key at fault.
    """
    plain = {
        name: given[name]
        for name in ("model", "text", "device", "dtype")
        if given.get(name) is not None
    }
    windows = {
        name: given[name] for name in ("windows", "window_tokens") if given.get(name) is not None
    }
    harness: dict[str, Any] = {}
    tasks = tuple(given.get("tasks") or recipe.tasks)
    if given.get("lm_eval"):
        harness["tasks"] = tuple(given["lm_eval"])
        tasks = (*(given.get("tasks") or ()), "lm_eval")
    if given.get("limit") is not None:
        harness["limit"] = given["limit"]
    policies = tuple(parse_policy(text) for text in given.get("policies") or ())
    changed = replace(
        recipe,
        **plain,
        tasks=tasks,
        perplexity=replace(recipe.perplexity, **windows),
        lm_eval=replace(recipe.lm_eval, **harness),
        policies=policies or recipe.policies,
    )
    changed.check()
    return changed
