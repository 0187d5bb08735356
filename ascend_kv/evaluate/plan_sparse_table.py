"""A plan's second table, of DeepSeek-V3.2 and V4: what a sequence holds, sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.latent import LatentLayers
from ascend_kv.plan.sparse_deployment import SparsePolicy, layers_of
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes


def sparse_group_source(policy: SparsePolicy, group: str) -> str:
    """What a group of the cache is made of, for the memory table."""
    blocks, entries = policy.blocks, policy.block_size
    return {
        "window": f"{blocks.slots} slots of the latest tokens",
        "state": f"{blocks.slots} slots of float32 projections of windows that still fill",
        "csa": f"{blocks.csa:,} blocks of {entries} entries with their indexer keys",
        "hca": f"{blocks.hca:,} blocks of {entries} entries",
    }[group]


def sparse_capacity_table(plan: Plan, policies: Sequence[SparsePolicy]) -> TextTable:
    """Bytes of one sequence by group, and sequences at once."""
    deployment = plan.deployment
    layers, serving = layers_of(deployment), deployment.serving
    longest, slots = serving.max_model_len, serving.max_num_seqs
    rows: list[tuple[str, ...]] = [
        (
            policy.name,
            " + ".join(
                f"{group} {format_bytes(size)}"
                for group, size in policy.sequence_bytes.items()
                if size
            ),
            format_bytes(sum(policy.sequence_bytes.values())),
            f"{policy.sequences_full_length:,}",
            f"{policy.budget.kv_bytes // sum(policy.sequence_bytes.values()):,}",
            f"{policy.sequences_live:,.1f}",
            f"{policy.preemption_from:,}" if policy.preemption_from else "never",
            f"{policy.longest_context:,}",
        )
        for policy in policies
    ]
    exact = {
        policy.name: sum(
            size
            for group, size in layers.kv_bytes(longest, policy.formats).items()
            if group != "state"
        )
        for policy in policies
    }
    filled = ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in exact.items())
    notes = [
        f"A sequence of {longest:,} tokens in blocks of {policies[0].block_size} entries. Without "
        f"state and with no block partly empty: {filled}.",
        f"At most --max-num-seqs = {slots} run in a step, and so many slots there are; by memory: "
        "how many such sequences the memory would hold with as many slots. Longest context: of "
        "one sequence with the memory to itself.",
    ]
    if isinstance(layers, LatentLayers):
        notes.append(
            "csa: the latent of every token and its indexer key. This package plans the model and "
            "does not serve it."
        )
    if deployment.parallel.data > 1:
        notes.append(f"Counts are for one of {deployment.parallel.data} copies of the attention.")
    if deployment.parallel.tensor > 1:
        notes.append(
            f"Every card of a copy keeps the whole cache: {deployment.parallel.tensor} cards share "
            "the query heads, and there is one KV head."
        )
    return TextTable(
        "Sequences at once (predicted from geometry)",
        (
            "scheme",
            "a sequence holds",
            "together",
            f"all {longest:,} tokens long",
            "by memory",
            "while growing",
            "preemption from",
            "longest context",
        ),
        rows,
        notes,
    )


def sparse_policy_json(policy: SparsePolicy) -> dict[str, Any]:
    """What ``--json`` has of such a policy in place of blocks and bytes of a token."""
    return {
        "formats": policy.formats._asdict(),
        "blocks": policy.blocks._asdict(),
        "group_bytes": dict(policy.group_bytes),
        "sequence_bytes": dict(policy.sequence_bytes),
        "sequences_full_length": policy.sequences_full_length,
        "sequences_live": policy.sequences_live,
    }
