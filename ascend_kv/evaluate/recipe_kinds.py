"""What kind of recipe a YAML file is: of ``bench``, of ``eval``, or of DeepSeek-V4."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ascend_kv.evaluate.recipe import read_yaml

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
