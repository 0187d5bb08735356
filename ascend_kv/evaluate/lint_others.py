"""Looks over the recipes that are not of ``ascend-kv bench``: eval's, and DeepSeek-V4's.

What a recipe is follows from its keys. Of an evaluation's policies it is asked what of a bench's
schemes is: what the device's attention reads, at all and as it lies, and whether lengths fit the
model. A DeepSeek recipe makes a small model of its own, so that only blocks and types are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_kv.config import SchedulerConfig
from ascend_kv.devices import Device, get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.lint_attention import decode_fallbacks
from ascend_kv.evaluate.lint_case import Lint, find_geometry, refused, worst_first
from ascend_kv.evaluate.quality.policies import Policy
from ascend_kv.evaluate.quality.recipe import EvalRecipe
from ascend_kv.geometry import LayerFormat, ModelGeometry, format_spec
from ascend_kv.resolved_cache import check_block_size, resolve_formats

if TYPE_CHECKING:
    from ascend_kv.evaluate.deepseek_recipe import DeepseekRecipe


def lint_eval(recipe: EvalRecipe, device: Device, model: str | None) -> list[Lint]:
    """Look over a recipe of ``ascend-kv eval``.

    Args:
        recipe: as it was read.
        device: it is to run on.
        model: in place of the recipe's; nothing is fetched.

    Returns:
        The findings, the worst first.
    """
    found: list[Lint] = []
    _, geometry = find_geometry(model or recipe.model, found)
    if geometry is not None and geometry.compressed is not None:
        reason = "eval keeps every token's keys and values; these layers do not."
        return [Lint("error", "model", geometry.model_type, reason, "Another model.")]
    for number, policy in enumerate(recipe.policies):
        key = f"policies[{number}] ({policy.name})"
        found += _look_at_policy(recipe, policy, key, device, geometry)
    found += _look_at_inputs(recipe, geometry)
    return worst_first(found)


def _look_at_policy(
    recipe: EvalRecipe, policy: Policy, key: str, device: Device, geometry: ModelGeometry | None
) -> Iterator[Lint]:
    if policy.huggingface is not None:
        return  # a cache of transformers, which the device's attention does not see
    dtype = _dtype(recipe, device, geometry)
    config = policy.cache_config(dtype)
    if config.compression is not None and device.name != "cpu":
        reason = "Attention to lists of entries has no kernel on an NPU: the engine refuses it."
        yield Lint("error", key, f"compression on a {device.name}", reason, "device: cpu")
        return
    block_size = recipe.block_size or device.default_block_size
    try:
        formats: tuple[LayerFormat, ...]
        if geometry is None:
            given = config.kv_cache_dtype
            formats = (format_spec(dtype) if given == "auto" else config.spec(given),)
        else:
            formats = resolve_formats(geometry, config, dtype)
        check_block_size(device, block_size, formats)
    except UsageError as error:
        if recipe.has_built_in_policies:
            reason = "This device or model refuses it: of the built-in policies it is left out."
            yield refused(key, error, reason)._replace(severity="note")
        else:
            yield refused(key, error, "This device or model refuses it.")
        return
    if geometry is not None and device.name.startswith("910B"):
        yield from _look_at_reads(recipe, key, geometry, dtype, block_size, formats)
    scales: Any = config.kv_cache_scales
    if isinstance(scales, str) and not Path(scales).expanduser().exists():
        yield Lint("error", key, scales, "There is no such file.", "A path that exists.")


def _dtype(recipe: EvalRecipe, device: Device, geometry: ModelGeometry | None) -> str:
    """The type of the queries, as far as it is known."""
    if recipe.dtype != "auto":
        return recipe.dtype
    if geometry is not None:
        return geometry.dtype
    return "float32" if device.name == "cpu" else "float16"


def _look_at_reads(
    recipe: EvalRecipe,
    key: str,
    geometry: ModelGeometry,
    dtype: str,
    block_size: int,
    formats: tuple[LayerFormat, ...],
) -> Iterator[Lint]:
    for spec in dict.fromkeys(formats):
        tokens = max(length for _, length in _lengths(recipe))
        for fallback in decode_fallbacks(geometry, spec, dtype, block_size, tokens):
            how = (
                "In every step keys and values are copied out of the cache"
                if fallback.instead == "loaded"
                else "CANN's attention does not take it, the reference serves instead"
            )
            reason = f"{how}: what it costs in quality is the same, the evaluation takes longer."
            found = f"{fallback.rule}: {fallback.given}"
            yield Lint("note", key, found, reason, f"legal: {fallback.legal}")


def _look_at_inputs(recipe: EvalRecipe, geometry: ModelGeometry | None) -> Iterator[Lint]:
    if recipe.text is not None and not Path(recipe.text).expanduser().exists():
        yield Lint("error", "text", recipe.text, "There is no such file.", "A path that exists.")
    for key, length in _lengths(recipe):
        if geometry is not None and length > geometry.max_position_tokens:
            longest = geometry.max_position_tokens
            reason = f"The model's longest sequence has {longest}."
            yield Lint("error", key, f"{length} tokens", reason, f"at most {longest}")


def _lengths(recipe: EvalRecipe) -> list[tuple[str, int]]:
    """Tokens of the longest sequence of each task, as far as the recipe says."""
    generation = recipe.generation
    lengths = {
        "perplexity": ("perplexity.window_tokens", recipe.perplexity.window_tokens),
        "generation": (
            "generation.prompt_tokens",
            generation.prompt_tokens + generation.max_tokens,
        ),
        "needle": ("needle.lengths", max(recipe.needle.lengths)),
        "copy": ("copy.lengths", 2 * max(recipe.copy.lengths)),
        "lm_eval": ("lm_eval.max_model_len", recipe.lm_eval.max_model_len),
    }
    return [lengths[task] for task in recipe.tasks if task in lengths] or [("tasks", 2)]


def lint_deepseek(recipe: DeepseekRecipe, target: str | None) -> list[Lint]:
    """Look over a recipe of ``tools/deepseek_v4.py``, which runs on the CPU.

    Args:
        recipe: as it was read.
        target: the device that the user asked about.
    """
    found = []
    try:
        kept = [format_spec(recipe.dtype), format_spec("int8")]
        check_block_size(get_device("cpu"), recipe.block_size, kept)
        SchedulerConfig(recipe.max_model_len, recipe.max_num_seqs, recipe.max_num_batched_tokens)
    except UsageError as error:
        found.append(refused(error.field, error, "The recipe would end with this."))
    if target not in (None, "cpu"):
        reason = "The recipe runs a small random model on the CPU, whatever is here."
        found.append(Lint("note", "--target", str(target), reason, "Read its figures as a CPU's."))
    return found
