"""What kind of recipe a YAML file is, of bench, eval or DeepSeek-V4, and who looks it over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.recipe import load_eval_recipe
from ascend_kv.evaluate.recipe import load_recipe, read_yaml

if TYPE_CHECKING:
    from ascend_kv.evaluate.lint_case import Lint

_MARKS = {
    "bench": {"schemes", "budget", "workload", "sweep", "planted_bias", "samples"},
    "eval": {"policies", "tasks", "generation", "needle", "copy", "recall", "lm_eval"},
    "deepseek": {"schedule", "decode_context_tokens", "decode_steps"},
}
"""Keys that recipes of one kind only have."""


class RecipeKind(NamedTuple):
    """A kind, and the command that runs it."""

    name: str
    command: str


KINDS = {
    "bench": RecipeKind("bench", "ascend-kv bench"),
    "eval": RecipeKind("eval", "ascend-kv eval"),
    "deepseek": RecipeKind("deepseek", "tools/deepseek_v4.py"),
}


def recipe_kind(path: Path) -> RecipeKind:
    """The kind whose own keys the file has most of; a bench's where it has none.

    Raises:
        UsageError: no such file, not YAML, or not keys and values.
    """
    keys = read_yaml(path).keys()
    return KINDS[max(_MARKS, key=lambda name: len(_MARKS[name] & keys))]


def check_recipe(path: Path, kind: RecipeKind, model: str | None) -> None:
    """Refuse a recipe that its own command would, before anything is looked at.

    Raises:
        UsageError: as that command, or a model that is not asked for.
    """
    if kind.name == "deepseek" and model is not None:
        raise UsageError("--model", model, "none with a DeepSeek recipe, which makes its own")
    if kind.name == "bench":
        load_recipe(path)
    elif kind.name == "eval":
        load_eval_recipe(path)


def lint_any(path: Path, kind: RecipeKind, aim: Device | None, model: str | None) -> list[Lint]:
    """What a recipe would run into.

    Args:
        path, kind: the recipe.
        aim: the device it is for; None: the one that is here.
        model: in place of the recipe's.

    Raises:
        UsageError, RunError: as the recipe's command, or no such device here.
    """
    from ascend_kv.evaluate import lint, lint_others  # torch comes with them

    if kind.name == "deepseek":
        from ascend_kv.evaluate.deepseek_recipe import load_deepseek_recipe

        return lint_others.lint_deepseek(load_deepseek_recipe(path), aim.name if aim else None)
    if kind.name == "eval":
        recipe = load_eval_recipe(path)
        return lint_others.lint_eval(recipe, aim or lint.device_here(recipe.device), model)
    bench = load_recipe(path)
    return lint.lint_recipe(bench, aim or lint.device_here(bench.device), model)
