"""Lints of what is stored: formats, blocks, keys with a large bias, static scales."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.lint_case import Case, Lint, refused
from ascend_kv.evaluate.recipe import BenchRecipe, name_format
from ascend_kv.geometry import layer_format
from ascend_kv.model_files import read_json
from ascend_kv.resolved_cache import check_block_size

_SCALE = re.compile(r"(^|[._])(k|v|key|value)_scale$")
_WASTE = 0.2
"""Of a sequence's blocks; half a block is empty on the average."""


def look_at_formats(case: Case) -> Iterator[Lint]:
    """Formats and block sizes that the device's attention cannot read."""
    for key, name in case.recipe.formats():
        if name == "auto":
            continue
        try:
            with name_format(key):
                check_block_size(case.device, case.block_size, [layer_format(name)])
        except UsageError as error:
            yield refused(error.field, error, f"The {case.device.name}'s attention refuses it.")


def look_at_block_size(case: Case) -> Iterator[Lint]:
    """Blocks too large for the requests, or small for what keeping them costs."""
    size, mean = case.block_size, case.mean_tokens
    waste = size / 2 / (mean + size / 2)
    if waste > _WASTE:
        yield Lint(
            "warning",
            "block_size",
            f"{size} tokens, with {mean:.0f} in a running sequence on the average",
            f"Half a block a sequence stays empty: about {waste:.0%} of what is held.",
            f"A smaller multiple of {case.device.block_multiples['int8']}, or longer requests.",
        )
    if size < 16:
        yield Lint(
            "warning",
            "block_size",
            f"{size} tokens",
            "Block tables grow and every block costs the scheduler and the attention a look-up.",
            "16 on a CPU, 128 on a 910B.",
        )
    if case.on_npu and size % 128 and case.quantized:
        yield Lint(
            "note",
            "block_size",
            f"{size} tokens of INT8 on the {case.device.name}",
            "CANN recommends 128 for a quantized cache, and its fast paths want it.",
            "block_size: 128",
        )


def look_at_key_bias(case: Case) -> Iterator[Lint]:
    """Keys that one large bias leaves without digits."""
    recipe, geometry = case.recipe, case.geometry
    if geometry is None or not geometry.model_type.startswith("qwen2") or not case.quantized:
        return
    if recipe.pair_scaling is not False or recipe.key_offset_layers != "none":
        return
    last = geometry.num_layers - 1
    skipped = {layer % geometry.num_layers for layer in recipe.kv_cache_dtype_skip_layers}
    remedy = "pair_scaling: auto and key_offset_layers: auto cost nothing or little."
    yield Lint(
        "error",
        "pair_scaling",
        f"{geometry.model_type} with quantized keys, pair_scaling: false, key_offset_layers: none",
        "Its key bias is so large that it sets the scale: INT8 by token and head cost 4.5 % of "
        "perplexity on Qwen2.5-Coder-0.5B, and 0.01 % with pair scaling.",
        remedy,
    )
    if skipped and last not in skipped:
        yield Lint(
            "warning",
            "kv_cache_dtype_skip_layers",
            f"{sorted(skipped)}, without {last}, the last",
            "In Qwen2.5-7B the largest key bias is in the last layer (921 against 605 in the first "
            "and 22 in the middle one; llama.cpp issue 21385).",
            f"Add -1; better: {remedy}",
        )


def look_at_scales(case: Case) -> Iterator[Lint]:
    """Static scales: lost ones, and what they cannot follow."""
    recipe = case.recipe
    if recipe.scale_type == "static" and recipe.kv_cache_scales is not None:
        yield Lint(
            "note",
            "scale_type",
            "static",
            "What lies beyond a static scale is clipped: later tokens, other languages, other "
            "domains. The log counts clipped values.",
            "dynamic, or calibrate on text like yours.",
        )
        yield from _scales_of(Path(recipe.kv_cache_scales).expanduser(), recipe)
    elif case.geometry and case.model and case.model.is_dir() and case.quantized:
        config = read_json(case.model / "config.json")
        if (config.get("quantization_config") or {}).get("kv_cache_scheme"):
            yield Lint(
                "note",
                "scale_type",
                "dynamic, while the checkpoint has calibrated scales (kv_cache_scheme)",
                "They are not used: every token gets its own.",
                "scale_type: static and kv_cache_scales: the checkpoint, to use them.",
            )


def _scales_of(path: Path, recipe: BenchRecipe) -> Iterator[Lint]:
    key = "kv_cache_scales"
    if not path.exists():
        yield Lint("error", key, str(path), "There is no such file.", "A path that exists.")
        return
    conditioned = recipe.pair_scaling is not False or recipe.key_offset_layers != "none"
    if path.is_dir() and conditioned:
        yield Lint(
            "error",
            key,
            f"{path}, with key conditioning",
            "A checkpoint's scales are those of keys as the model makes them.",
            "pair_scaling: false and key_offset_layers: none, or scales made with conditioning.",
        )
    if ones := _count_ones(path):
        yield Lint(
            "error",
            key,
            f"{path}: all {ones} numbers are 1.0",
            "So they look when they were lost on the way and replaced (vllm issue 54623).",
            "Make them again, or scale_type: dynamic.",
        )


def _count_ones(path: Path) -> int:
    """How many scales a file or checkpoint has, if all of them are 1.0; else 0.

    What cannot be read counts as none: the run itself will say that better.
    """
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in filter(_SCALE.search, tensors.keys()):
                    scale = tensors.get_tensor(name)
                    if not bool((scale == 1).all()):
                        return 0
                    count += scale.numel()
        except (SafetensorError, OSError):
            return 0
    return count
