"""A plan as tables and as JSON."""

from __future__ import annotations

from typing import Any

from ascend_kv.evaluate.plan_capacity_table import capacity_table
from ascend_kv.evaluate.plan_memory_table import memory_table
from ascend_kv.evaluate.plan_sparse_table import sparse_capacity_table, sparse_policy_json
from ascend_kv.evaluate.plan_speed_table import speed_table
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.parallel import copies_of_heads
from ascend_kv.plan.sparse_deployment import SparsePolicy
from ascend_kv.text_table import TextTable

LABEL = "predicted: nothing here was run on the device"


def plan_tables(plan: Plan) -> list[TextTable]:
    """Memory, capacity and, where it can be predicted, speed."""
    sparse = [policy for policy in plan.policies if isinstance(policy, SparsePolicy)]
    dense = [policy for policy in plan.policies if isinstance(policy, Policy)]
    second = sparse_capacity_table(plan, sparse) if sparse else capacity_table(plan, dense)
    found = [memory_table(plan), second]
    if any(policy.latencies for policy in plan.policies):
        found.append(speed_table(plan))
    else:
        reasons = dict.fromkeys(plan.why_no_speed(policy) for policy in plan.policies)
        found[-1].notes.append(f"No speed is predicted: {'; '.join(reasons)}.")
    return found


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
        "expert_parallel": parallel.expert if model.parameters.num_experts else None,
        "copies_of_each_kv_head": copies_of_heads(model.geometry, parallel.tensor),
        "serving": vars(deployment.serving),
        "memory": [part._asdict() for part in plan.fullest.budget.parts],
        "total_bytes": plan.fullest.budget.total_bytes,
        "policies": [_policy_json(plan, policy) for policy in plan.policies],
    }


def _policy_json(plan: Plan, policy: Policy | SparsePolicy) -> dict[str, Any]:
    budget = policy.budget
    if isinstance(policy, SparsePolicy):
        capacity = sparse_policy_json(policy)
    else:
        capacity = {"paged": policy.paged._asdict(), "contiguous": policy.contiguous._asdict()}
    return {
        "scheme": policy.name,
        "block_size": policy.block_size,
        "kv_bytes": budget.kv_bytes,
        "kv_bytes_low": budget.kv_low,
        "kv_bytes_high": budget.kv_high,
        **capacity,
        "longest_context": policy.longest_context,
        "preemption_from": policy.preemption_from,
        "copied_every_step": plan.why_copied(policy),
        "batch": policy.batch,
        "speed": {name: each._asdict() for name, each in policy.latencies.items()},
    }
