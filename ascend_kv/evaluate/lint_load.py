"""Lints of what a run asks of a device: its attention, its memory, the batch, the lengths."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.lint_attention import decode_fallbacks
from ascend_kv.evaluate.lint_case import Case, Lint, Severity, refused
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.schemes import layer_formats, make_budget
from ascend_kv.ops.fused_rules import Fallback
from ascend_kv.user_values import format_bytes

_FULL = 0.9
"""Of a device's memory; graphs, activations and workspaces need the rest."""


def look_at_attention(case: Case) -> Iterator[Lint]:
    """Decodes that an NPU's fused attention cannot make over the cache as it lies."""
    geometry, recipe = case.geometry, case.recipe
    if geometry is None or not case.device.name.startswith("910B"):
        return
    broken: dict[Fallback, list[int]] = {}
    for number, scheme in enumerate(recipe.schemes):
        formats = layer_formats(recipe, scheme.kv_cache_dtype, geometry, case.model_dtype)
        for spec in dict.fromkeys(formats):
            sides = {side.name for side in (spec.key, spec.value) if side.quantized}
            if not sides <= set(case.device.formats):
                continue  # refused by ``look_at_formats``
            for fallback in decode_fallbacks(
                geometry, spec, case.model_dtype, case.block_size, recipe.max_model_len
            ):
                numbers = broken.setdefault(fallback, [])
                if number not in numbers:
                    numbers.append(number)
    for fallback, numbers in broken.items():
        how = (
            "In every step keys and values are copied out of the cache"
            if fallback.instead == "loaded"
            else "CANN's attention does not take it, the reference serves instead"
        )
        yield Lint(
            "warning",
            f"schemes[{', '.join(map(str, numbers))}].kv_cache_dtype",
            f"{fallback.rule}: {fallback.given}",
            f"{how}, so the throughput is not that of the format.",
            f"legal: {fallback.legal}",
        )


def look_at_batch(case: Case) -> Iterator[Lint]:
    """A budget that holds no sequence, and a batch that makes sequences lose their blocks."""
    if case.geometry is None:
        return
    requests = case.recipe.workload.requests
    for number, scheme in enumerate(case.recipe.schemes):
        try:
            plan = case.capacity_of(scheme)
        except UsageError as error:
            yield refused(f"schemes[{number}]", error, "The budget does not hold it.")
            continue
        if scheme.batch == "all" and requests > plan.sequences_live:
            yield Lint(
                "warning",
                f"schemes[{number}].batch",
                f"{scheme.name}: {requests} requests at once, the budget holds about "
                f"{plan.sequences_live:.0f}",
                "Where blocks run out a sequence loses its own and is computed again: more batch, "
                "less throughput.",
                "batch: planned, or a larger budget.",
            )


def look_at_memory(case: Case) -> Iterator[Lint]:
    """Weights and cache against the device, with room for what a plan tends to forget."""
    geometry, model = case.geometry, case.model
    memory = case.device.memory_bytes or this_machine("cpu", 0).memory_bytes
    if geometry is None or model is None or memory is None:
        return
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    weights = sum(file.stat().st_size for file in files)
    budget = make_budget(case.recipe, geometry, case.block_size).bytes
    share = (weights + budget) / memory
    if share <= _FULL:
        return
    found = (
        f"weights {format_bytes(weights)} + cache {format_bytes(budget)} of {format_bytes(memory)}"
    )
    reason = (
        "That does not fit."
        if share > 1
        else "Graphs, activations and workspaces need room too; without it the device runs out of "
        "memory later (vllm-ascend issues 89 and 8260)."
    )
    severity: Severity = "error" if share > 1 else "warning"
    yield Lint(severity, "budget", found, reason, "Fewer budget.sequences, or a smaller model.")


def look_at_lengths(case: Case) -> Iterator[Lint]:
    """Sequences longer than the model."""
    geometry, recipe = case.geometry, case.recipe
    if geometry is None:
        return
    longest = geometry.max_position_tokens
    if recipe.max_model_len > longest:
        found = f"{recipe.max_model_len} tokens"
        reason = f"The model's longest sequence has {longest}."
        yield Lint("error", "max_model_len", found, reason, f"at most {longest}")
