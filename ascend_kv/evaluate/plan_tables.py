"""A plan as tables and as JSON: memory, capacity, speed, and what the speed model rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ascend_kv.compressed_layers import DEEPSEEK_V4_FLASH, explain_compression
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.capacity import Capacity, describe_formats
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.parallel import copies_of_heads
from ascend_kv.plan.performance import Latency
from ascend_kv.plan.published import stacks, studies, swap_row, third_from_first_two
from ascend_kv.plan.published_v4 import compression_claims
from ascend_kv.plan.study import FAR, Study
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes

_NO_KERNEL = "no kernel: served by references"
LABEL = "predicted: nothing here was run on the device"


def plan_tables(plan: Plan) -> list[TextTable]:
    """Memory, capacity and, where it can be predicted, speed."""
    found = [_memory_table(plan), _capacity_table(plan)]
    if any(policy.latencies for policy in plan.policies):
        found.append(_speed_table(plan))
    else:
        reasons = dict.fromkeys(plan.why_no_speed(policy) for policy in plan.policies)
        found[-1].notes.append(f"No speed is predicted: {'; '.join(reasons)}.")
    return found


def _memory_table(plan: Plan) -> TextTable:
    deployment = plan.deployment
    first = plan.fullest
    parallel, model = deployment.parallel, deployment.model
    rows: list[tuple[str, ...]] = [
        (part.name, format_bytes(part.bytes), _range(part.low, part.high), part.source)
        for part in first.budget.parts
        if part.high
    ]
    for policy in plan.policies:
        budget = policy.budget
        given = deployment.kv_bytes is not None
        rows.append(
            (
                f"KV cache, {describe_formats(policy.formats)}",
                format_bytes(budget.kv_bytes),
                _range(budget.kv_low, budget.kv_high),
                "--memory" if given else "what the other parts leave",
            )
        )
    unused = first.budget.total_bytes - first.budget.kv_bytes
    unused -= sum(part.bytes for part in first.budget.parts)
    if deployment.kv_bytes is not None and unused > 0:
        rows.append(("unused", format_bytes(unused), "", "--memory asks for no more"))
    rows.append(("total", format_bytes(first.budget.total_bytes), "", ""))
    notes = [
        f"{model.name}: {model.parameters.total / 1e9:.2f} billion weights ({model.source}), "
        f"stored as {deployment.weights.name}.",
    ]
    if any(policy.budget.parts != first.budget.parts for policy in plan.policies):
        notes.append(
            f"Parts and total with {describe_formats(first.formats)}, which needs most beside "
            "its cache."
        )
    copies = copies_of_heads(model.geometry, parallel.tensor)
    if copies > 1:
        notes.append(
            f"Every KV head lies on {copies} cards of a copy: {model.geometry.num_kv_heads} KV "
            f"heads are fewer than {parallel.tensor} cards, so the cache shrinks no further."
        )
    cards = f", {parallel.cards} cards ({parallel})" if parallel.cards > 1 else ""
    return TextTable(
        f"Memory of one {deployment.hardware.name}{cards} (predicted)",
        ("part", "expected", "range", "from"),
        rows,
        notes,
    )


def _range(low: int, high: int) -> str:
    return "" if low == high else f"{format_bytes(low)} to {format_bytes(high)}"


def _capacity_table(plan: Plan) -> TextTable:
    deployment = plan.deployment
    longest = deployment.serving.max_model_len
    lengths = deployment.lengths
    prompt, output = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    rows = []
    for policy in plan.policies:
        for allocator, capacity in (("contiguous", policy.contiguous), ("paged", policy.paged)):
            rows.append(_capacity_row(policy, allocator, capacity))
    copies = deployment.parallel.data
    notes = [
        f"Requests of {prompt:,.0f} prompt and {output:,.0f} output tokens on the average. While "
        "growing: a paged sequence holds fewer blocks at its beginning than at its end. With more "
        "at once, preemption begins: this engine computes a preempted sequence again, others swap "
        f"it to the host. At most {deployment.serving.max_num_seqs} run in a step "
        "(--max-num-seqs).",
    ]
    for policy in plan.policies:
        notes += _block_notes(policy)
    if deployment.parallel.tensor > 1:
        notes.append("Bytes are one card's; the cards of a copy hold the same sequences.")
    if copies > 1:
        notes.append(f"Counts are for one of {copies} copies.")
    return TextTable(
        "Sequences at once (predicted from geometry)",
        (
            "scheme",
            "bytes a token",
            "blocks",
            f"all {longest:,} tokens long",
            f"all {prompt + output:,.0f} long",
            "while growing",
            "preemption from",
            "longest context",
        ),
        rows,
        notes,
    )


def _block_notes(policy: Policy) -> list[str]:
    """What keys with scales by block cost beside their codes."""
    size, residual = policy.block_size, policy.paged.residual_bytes
    keys = [spec.key for spec in policy.formats if spec.key.scales_by_block]
    if not keys:
        return []
    bits = max(key.scale_bits * (1 if key.symmetric else 2) for key in keys)
    return [
        f"{describe_formats(policy.formats)}: scales take {bits} / {size} = {bits / size:.3g} bits "
        f"of every number of a key. Each sequence's block that is not full yet lies in 16 bits "
        f"beside the blocks: {format_bytes(residual)} for --max-num-seqs."
    ]


def _capacity_row(policy: Policy, allocator: str, plan: Capacity) -> tuple[str, ...]:
    return (
        f"{allocator} {describe_formats(policy.formats)}",
        f"{plan.token_bytes:,}",
        f"{plan.num_blocks:,} of {policy.block_size}",
        f"{plan.sequences_full_length:,}",
        f"{plan.sequences_mean:,.1f}",
        f"{plan.sequences_live:,.1f}",
        f"{policy.preemption_from:,}" if allocator == "paged" else "never",
        f"{policy.longest_context:,}" if allocator == "paged" else "as reserved",
    )


def _speed_table(plan: Plan) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for policy in plan.policies:
        each = policy.latencies
        scheme = f"paged {describe_formats(policy.formats)}"
        if not each:
            rows.append((scheme, str(policy.batch), "", "", "", _NO_KERNEL))
            continue
        rows.append(
            (
                scheme,
                str(policy.batch),
                _three(each, lambda x: 1e3 * x.ttft_seconds),
                _three(each, lambda x: 1e3 * x.tpot_seconds),
                _three(each, lambda x: x.tokens_per_second),
                each["best"].bound,
            )
        )
    if plan.calibration is not None:
        source = f"Measured on this machine ({plan.calibration.machine}), half of the steps within "
        source += "the range."
    else:
        low, best, high = (where for _, where in stacks().values())
        source = f"Low as {low}; best as {best}; high as {high}. --published shows them."
    hardware = plan.deployment.hardware
    if plan.calibration is None and hardware.vector_bytes_per_second is None:
        source += f" Dequantizing is not counted: the {hardware.name}'s vector rate is not known."
    return TextTable(
        "Speed of decoding at that batch (predicted; low | best | high are times)",
        ("scheme", "batch", "TTFT, ms", "TPOT, ms", "tokens/s", "bound by"),
        rows,
        [
            source,
            "TTFT: of a mean prompt that comes alone. Batch: sequences while growing, at most "
            "--max-num-seqs. Bound: layers and tokens are costs of host and launches, memory and "
            "cube those of the card.",
        ],
    )


def _three(latencies: Mapping[str, Latency], value: Callable[[Latency], float]) -> str:
    return " | ".join(f"{value(latencies[name]):,.4g}" for name in ("low", "best", "high"))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for scripts; the keys are explained in recipes/plan.md."""
    deployment = plan.deployment
    model, parallel = deployment.model, deployment.parallel
    return {
        "schema": "ascend_kv.plan/1",
        "label": LABEL,
        "model": {
            "name": model.name,
            "source": model.source,
            "model_type": model.geometry.model_type,
            "parameters": model.parameters.total,
            "active_parameters": model.parameters.active,
            "weights": deployment.weights.name,
        },
        "device": deployment.hardware.name,
        "cards": parallel.cards,
        "tensor_parallel": parallel.tensor,
        "data_parallel": parallel.data,
        "copies_of_each_kv_head": copies_of_heads(model.geometry, parallel.tensor),
        "serving": vars(deployment.serving),
        "memory": [part._asdict() for part in plan.fullest.budget.parts],
        "total_bytes": plan.fullest.budget.total_bytes,
        "policies": [_policy_json(policy) for policy in plan.policies],
    }


def _policy_json(policy: Policy) -> dict[str, Any]:
    budget = policy.budget
    return {
        "scheme": describe_formats(policy.formats),
        "block_size": policy.block_size,
        "kv_bytes": budget.kv_bytes,
        "kv_bytes_low": budget.kv_low,
        "kv_bytes_high": budget.kv_high,
        "paged": policy.paged._asdict(),
        "contiguous": policy.contiguous._asdict(),
        "longest_context": policy.longest_context,
        "preemption_from": policy.preemption_from,
        "batch": policy.batch,
        "speed": {name: _latency_json(each) for name, each in policy.latencies.items()},
    }


def _latency_json(latency: Latency) -> dict[str, Any]:
    return latency._asdict()


def published_tables() -> list[TextTable]:
    """Every published row, predicted from the others of its study, and claims that no fit takes."""
    return [_summary_table(), *(_study_table(study) for study in studies()), _claims_table()]


def _summary_table() -> TextTable:
    third, swap = third_from_first_two(), swap_row()
    within, without = swap.within_6_gb / swap.published - 1, swap.without_swap / swap.published - 1
    constant = swap.constant / swap.published - 1
    rows: list[tuple[str, ...]] = [
        (
            "row 3 from rows 1 and 2", f"{third.published:g}", f"{third.predicted:.1f}",
            f"{third.error:+.1%}", f"{third.constant_error:+.1%}",
        ),
        (
            "row 4, if 6 GB hold 32 sequences", f"{swap.published:g}", f"{swap.within_6_gb:.1f}",
            f"{within:+.1%}", f"{constant:+.1%}",
        ),
        (
            "row 4, if nothing swapped", f"{swap.published:g}", f"{swap.without_swap:.1f}",
            f"{without:+.1%}", f"{constant:+.1%}",
        ),
    ]  # fmt: skip
    return TextTable(
        "The field article's throughput table, tokens/s (published | predicted)",
        ("row", "published", "predicted", "error", "error of the mean of the others"),
        rows,
        [
            "The budget behind row 4 is not given, and 9 GB do not fill a card of 64 GB where row "
            "1 keeps 12: that row cannot be predicted from the table. Over the host link "
            f"{swap.moved_bytes / 1e9:.2f} GB a step would explain it.",
        ],
    )  # fmt: skip


def _study_table(study: Study) -> TextTable:
    costs = study.costs(1.0)
    scale, unit = (1.0, "tokens/s") if study.unit == "tokens/s" else (1e3, f"ms: {study.unit}")
    rows: list[tuple[str, ...]] = [
        (
            held.name, f"{scale * held.published:.4g}", f"{scale * held.predicted:.4g}",
            f"{held.error:+.1%}", f"{held.constant_error:+.1%}", f"{held.efficiency:.0%}",
            "far" if held.efficiency < FAR else "",
        )
        for held in study.held_out()
    ]  # fmt: skip
    worse = sum(abs(held.error) > abs(held.constant_error) for held in study.held_out())
    return TextTable(
        f"{study.name} (published, {unit}; each row predicted from the others)",
        (
            "row", "published", "predicted", "error", "error of their mean",
            "roofline over measured", "from roofline",
        ),
        rows,
        [
            f"Source: {study.source}. {study.remark}",
            f"Fitted to all rows ({', '.join(study.free)}): {1e3 * costs.layer_seconds:.3f} ms a "
            f"layer, {1e3 * costs.token_seconds:.3f} ms a token, memory efficiency "
            f"{costs.memory_efficiency:.0%}. The mean of the others is nearer in {worse} of "
            f"{len(rows)} rows.",
        ],
    )  # fmt: skip


def _claims_table() -> TextTable:
    rows: list[tuple[str, ...]] = [
        (
            claim.name, f"{1e3 * claim.claimed_seconds:g}", f"{1e3 * claim.roofline_seconds:.2f}",
            f"{claim.efficiency:.0%}", "far" if claim.efficiency < FAR else "", claim.remark,
        )
        for claim in compression_claims()
    ]  # fmt: skip
    return TextTable(
        "The field article's compression table, ms a token (published | roofline)",
        ("row", "claimed", "roofline", "roofline over claimed", "from roofline", "remark"),
        rows,
        [
            f"Far: more than {1 / FAR:g} times the roofline. One sequence's cache and one card's "
            "share of the weights at 4 TB/s.",
            "7.3 GB / 4 is 1.8 GB, and / 128 is 57 MB: as if every layer were of one kind.",
            *explain_compression(DEEPSEEK_V4_FLASH, 131072).splitlines(),
        ],
    )


def published_json() -> dict[str, Any]:
    """The same for scripts."""
    return {
        "article_third_row": third_from_first_two()._asdict(),
        "article_swap_row": swap_row()._asdict(),
        "studies": [
            {
                "name": study.name,
                "source": study.source,
                "unit": study.unit,
                "fitted": list(study.free),
                "remark": study.remark,
                "rows": [
                    {
                        **held._asdict(),
                        "error": held.error,
                        "constant_error": held.constant_error,
                        "far_from_roofline": held.efficiency < FAR,
                    }
                    for held in study.held_out()
                ],
            }
            for study in studies()
        ],
        "claims": [
            {**claim._asdict(), "far_from_roofline": claim.efficiency < FAR}
            for claim in compression_claims()
        ],
    }
