"""``ascend-kv plan --explain``: every formula of a plan with its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_kv.evaluate.plan_sparse_explained import sparse_sections
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.capacity import explain_memory
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.parallel import copies_of_heads, kv_heads_of_rank
from ascend_kv.plan.performance import Load
from ascend_kv.user_values import format_bytes


def explain(plan: Plan) -> str:
    """Lines of text by section, without a newline at the end."""
    if plan.deployment.model.geometry.compressed is not None:
        first, *more = sparse_sections(plan).items()
        sections = dict([first, ("Memory of a card", _memory(plan)), *more])
    else:
        dense = [policy for policy in plan.policies if isinstance(policy, Policy)]
        sections = {
            "Bytes of a token": _token_bytes(plan, dense),
            "Memory of a card": _memory(plan),
            "Blocks and sequences": [line for each in dense for line in _blocks(plan, each)],
            "Time": [line for each in dense for line in _time(plan, each)],
        }
    return "\n\n".join(
        "\n".join([f"{title}:", *lines]) for title, lines in sections.items() if lines
    )


def _token_bytes(plan: Plan, policies: Sequence[Policy]) -> list[str]:
    deployment = plan.deployment
    geometry, tensor = deployment.model.geometry, deployment.parallel.tensor
    longest = deployment.serving.max_model_len
    lines: list[str] = []
    for policy in policies:
        for line in explain_memory(geometry, policy.formats, longest).splitlines():
            if line not in lines:  # what holds for every format is said once
                lines.append(line)
    if tensor > 1:
        copies = copies_of_heads(geometry, tensor)
        lines.append(
            f"One card of {tensor}: {kv_heads_of_rank(geometry, tensor)} of "
            f"{geometry.num_kv_heads} KV heads; each lies on {copies} card(s) of a copy."
        )
    return lines


def _memory(plan: Plan) -> list[str]:
    lines = []
    for part in plan.fullest.budget.parts:
        lines.append(
            f"{part.name} = {part.formula} = {format_bytes(part.bytes)}, between "
            f"{format_bytes(part.low)} and {format_bytes(part.high)}. From: {part.source}."
        )
    if plan.deployment.kv_bytes is None:
        budget = plan.fullest.budget
        parts = " - ".join(format_bytes(part.bytes) for part in budget.parts)
        lines.append(
            f"KV cache = {format_bytes(budget.total_bytes)} - {parts} = "
            f"{format_bytes(budget.kv_bytes)}"
        )
    for name, figure in (("bandwidth", "hbm_bytes_per_second"), ("matrix rate", "cube_flops")):
        source = plan.deployment.hardware.sources.get(figure)
        if source is not None:
            value = getattr(plan.deployment.hardware, figure)
            if value is not None:
                lines.append(f"{name} = {value / 1e12:.3g} T a second. From: {source}.")
    return lines


def _blocks(plan: Plan, policy: Policy) -> list[str]:
    deployment, paged = plan.deployment, policy.paged
    name = policy.name
    longest, size = deployment.serving.max_model_len, policy.block_size
    static = deployment.geometry.static_bytes(policy.formats, longest)
    held = paged.num_blocks / paged.sequences_live
    less = f" - {static:,} of static scales" if static else ""
    block = f"({size} tokens x {paged.token_bytes:,} bytes)"
    if paged.residual_bytes:
        less += f" - {paged.residual_bytes:,} of open blocks"
        block = f"{paged.block_bytes:,} bytes a block"
    return [
        f"{name}: ({policy.budget.kv_bytes:,}{less}) // {block} = "
        f"{paged.num_blocks:,} blocks = {paged.num_blocks * size:,} tokens.",
        f"{name}: {paged.num_blocks:,} // ceil({longest:,} / {size}) = "
        f"{paged.sequences_full_length:,} sequences of {longest:,} tokens; contiguous the same, "
        "however short they are.",
        f"{name}: a sequence holds {held:.1f} blocks on the average of all its steps: "
        f"{paged.num_blocks:,} / {held:.1f} = {paged.sequences_live:,.1f} at once; from "
        f"{policy.preemption_from:,} on some are preempted.",
    ]


def _time(plan: Plan, policy: Policy) -> list[str]:
    if not policy.clocks:
        return []
    deployment = plan.deployment
    load = Load(policy.batch, round(policy.batch * deployment.mean_context()))
    name = policy.name
    lines = []
    for end, clock in policy.clocks.items():
        step = clock(load)
        parts = ", ".join(f"{what} {1e3 * seconds:.3f}" for what, seconds in step.parts.items())
        lines.append(
            f"{name}, {end}: a step of {load.decodes} sequences that attend to "
            f"{load.decode_context:,} tokens takes {1e3 * step.seconds:.3f} ms: {parts}."
        )
    if plan.calibration is None:
        model = deployment.served_model(policy.formats, policy.block_size)
        reads = (
            f"{name}: a card reads {model.weight_bytes_read(load.tokens) / 1e9:.3f} GB of weights "
            f"and {load.decode_context * model.kv_token_bytes / 1e9:.3f} GB of cache, and does "
            f"{model.operations(load) / 1e12:.3f} T operations. step = layers + tokens + the "
            "largest of memory, cube and vector + collectives."
        )
        if model.copied_bytes:
            copied = 2 * load.decode_context * model.copied_bytes
            reads += f" Copying the cache writes and reads {copied / 1e9:.3f} GB more."
        lines.append(reads)
    return lines
