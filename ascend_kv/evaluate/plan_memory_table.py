"""A plan's first table: a card's memory, part by part."""

from __future__ import annotations

from ascend_kv.evaluate.plan_sparse_table import sparse_group_source
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.parallel import copies_of_heads
from ascend_kv.plan.sparse_deployment import SparsePolicy
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes


def memory_table(plan: Plan) -> TextTable:
    """A card's memory, part by part, and the cache under every policy."""
    deployment = plan.deployment
    first = plan.fullest
    parallel, model = deployment.parallel, deployment.model
    rows: list[tuple[str, ...]] = [
        (part.name, format_bytes(part.bytes), _range(part.low, part.high), part.source)
        for part in first.budget.parts
        if part.high
    ]
    for policy in plan.policies:
        rows += _cache_rows(policy, deployment.kv_bytes is not None)
    unused = first.budget.total_bytes - first.budget.kv_bytes
    unused -= sum(part.bytes for part in first.budget.parts)
    if deployment.kv_bytes is not None and unused > 0:
        rows.append(("unused", format_bytes(unused), "", "--memory asks for no more"))
    rows.append(("total", format_bytes(first.budget.total_bytes), "", ""))
    notes = [
        f"{model.name}: {model.parameters.total / 1e9:.2f} billion weights ({model.source}), "
        f"stored as {deployment.weights.name}.",
    ]
    if parallel.experts is not None:
        notes.append(
            f"Attention: {parallel.tensor} x tensor parallel; the routed experts of a layer, "
            f"{model.parameters.num_experts}, are shared out to {parallel.expert} card(s)."
        )
    if any(policy.budget.parts != first.budget.parts for policy in plan.policies):
        notes.append(f"Parts and total with {first.name}, which needs most beside its cache.")
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


def _cache_rows(policy: Policy | SparsePolicy, given: bool) -> list[tuple[str, ...]]:
    """What the cache gets, and where its layers are of several kinds what each of them takes."""
    budget = policy.budget
    rows: list[tuple[str, ...]] = [
        (
            f"KV cache, {policy.name}",
            format_bytes(budget.kv_bytes),
            _range(budget.kv_low, budget.kv_high),
            "--memory" if given else "what the other parts leave",
        )
    ]
    if not isinstance(policy, SparsePolicy):
        return rows
    rows += [
        (f"  of it {group}", format_bytes(size), "", sparse_group_source(policy, group))
        for group, size in policy.group_bytes.items()
        if size
    ]
    spare = budget.kv_bytes - sum(policy.group_bytes.values())
    if spare > budget.kv_bytes // 100:
        source = "--max-num-seqs sequences of --max-model-len tokens take no more"
        rows.append(("  of it unused", format_bytes(spare), "", source))
    return rows
