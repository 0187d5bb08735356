"""What a recipe would run into, before it runs: known pitfalls, each with reason and remedy.

A lint looks at one thing. What it says about a device comes from ``devices`` and from the rules of
its fused attention, what it says about memory from the planner. Figures in the reasons name where
they are from: measured on this repository's code, or published by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ascend_kv.devices import Device, get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.lint_case import Case, Lint, find_geometry, refused, worst_first
from ascend_kv.evaluate.lint_formats import (
    look_at_block_size,
    look_at_formats,
    look_at_key_bias,
    look_at_scales,
)
from ascend_kv.evaluate.lint_load import (
    look_at_attention,
    look_at_batch,
    look_at_lengths,
    look_at_memory,
)
from ascend_kv.evaluate.recipe import BenchRecipe, with_real_formats
from ascend_kv.ops import platform

LOOKS: tuple[Callable[[Case], Iterator[Lint]], ...] = (
    look_at_lengths,
    look_at_formats,
    look_at_block_size,
    look_at_key_bias,
    look_at_scales,
    look_at_attention,
    look_at_batch,
    look_at_memory,
)


def lint_recipe(recipe: BenchRecipe, device: Device, model: str | None) -> list[Lint]:
    """Look a recipe over.

    Args:
        recipe: as it was read, so that what ``load_recipe`` refuses is not here any more.
        device: it is to run on.
        model: in place of the recipe's. Nothing is fetched: one that is not on this machine is
            not looked at.

    Returns:
        The findings, the worst first.
    """
    found: list[Lint] = []
    path, geometry = find_geometry(model or recipe.model, found)
    if geometry is not None and geometry.compressed is not None:
        reason = "bench cannot serve compressed layers: its budget counts bytes by the token."
        remedy = "recipes/deepseek_v4.md, or another model."
        return [Lint("error", "model", geometry.model_type, reason, remedy)]
    own = "float32" if path and path.suffix == ".gguf" else geometry.dtype if geometry else "auto"
    model_dtype = own if recipe.dtype == "auto" else recipe.dtype
    case = Case(with_real_formats(recipe, model_dtype), device, geometry, path, model_dtype)
    for look in LOOKS:
        try:
            found += look(case)
        except UsageError as error:  # as layers that the model has not got
            found.append(refused(error.field, error, "It cannot be served."))
    return worst_first(found)


def as_text(path: str, lints: Sequence[Lint]) -> str:
    """What was found in a recipe, as lines that can be pasted."""
    lines = [f"\n{path}:" if lints else f"\n{path}: nothing to complain of"]
    for lint in lints:
        lines += [f"{lint.severity:<7} {lint.key}: {lint.found}", f"{'':<7} {lint.reason}"]
        lines.append(f"{'':<7} -> {lint.remedy}")
    return "\n".join(lines)


def device_here(wanted: str) -> Device:
    """The device that a recipe would run on here.

    Args:
        wanted: the recipe's ``device``.

    Raises:
        UsageError, RunError: as ``platform.check_device`` and ``find_device``.
    """
    found = platform.find_device() if wanted == "auto" else wanted
    platform.check_device(found)
    return get_device(platform.device_name(found))
