"""A plan's second table, of a model that keeps every token: sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.capacity import Capacity
from ascend_kv.plan.deployment import Policy
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes


def capacity_table(plan: Plan, policies: Sequence[Policy]) -> TextTable:
    """Blocks and sequences at once under each policy and allocator."""
    deployment = plan.deployment
    longest = deployment.serving.max_model_len
    lengths = deployment.lengths
    prompt, output = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    rows = []
    for policy in policies:
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
    for policy in policies:
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
        f"{policy.name}: scales take {bits} / {size} = {bits / size:.3g} bits of every number of "
        "a key. Each sequence's block that is not full yet lies in 16 bits beside the blocks: "
        f"{format_bytes(residual)} for --max-num-seqs."
    ]


def _capacity_row(policy: Policy, allocator: str, plan: Capacity) -> tuple[str, ...]:
    return (
        f"{allocator} {policy.name}",
        f"{plan.token_bytes:,}",
        f"{plan.num_blocks:,} of {policy.block_size}",
        f"{plan.sequences_full_length:,}",
        f"{plan.sequences_mean:,.1f}",
        f"{plan.sequences_live:,.1f}",
        f"{policy.preemption_from:,}" if allocator == "paged" else "never",
        f"{policy.longest_context:,}" if allocator == "paged" else "as reserved",
    )
