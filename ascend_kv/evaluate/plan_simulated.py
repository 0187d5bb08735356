"""``ascend-kv plan --simulate``: a trace through the engine's own scheduler, by block size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.cache.tables import PagedTables, SequenceTables
from ascend_kv.compressed_layers import plan_groups
from ascend_kv.config import SchedulerConfig
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.plan_arguments import named_as_flags
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.simulation import Percentiles, Simulation, simulate
from ascend_kv.plan.sparse_deployment import SparsePolicy, layers_of
from ascend_kv.resolved_cache import plan_blocks
from ascend_kv.text_table import TextTable


class Run(NamedTuple):
    """One simulation.

    Attributes:
        scheme: the cache's formats.
        block_size: tokens a block.
        legal: whether the device's attention reads blocks of that size.
        result: what the trace met.
    """

    scheme: str
    block_size: int
    legal: bool
    result: Simulation


def simulate_plan(plan: Plan, block_sizes: Sequence[int]) -> list[Run]:
    """Every policy with every block size, in the same KV memory.

    The trace goes to one copy of the model: with data parallel, give a copy's share of the rate.

    Raises:
        UsageError: no block sizes, a size below 1, or no clock.
    """
    if not block_sizes or min(block_sizes) < 1:
        raise UsageError("--block-sizes", list(block_sizes), "numbers of 1 or more with commas")
    plan.need_speed("--simulate")
    return [_run(plan, policy, size) for policy in plan.policies for size in block_sizes]


def _run(plan: Plan, policy: Policy | SparsePolicy, block_size: int) -> Run:
    deployment = plan.deployment
    serving = deployment.serving
    with named_as_flags():
        tables = _tables(plan, policy, block_size)
        limits = SchedulerConfig(
            serving.max_model_len, serving.max_num_seqs, serving.max_num_batched_tokens
        )
        result = simulate(plan.arrivals, tables, limits, policy.clocks["best"])
    if isinstance(policy, SparsePolicy):
        names = set(policy.formats)
    else:
        names = {side.name for spec in policy.formats for side in (spec.key, spec.value)}
    multiples = (deployment.device.block_multiples[name] for name in names)
    legal = all(block_size % multiple == 0 for multiple in multiples)
    return Run(policy.name, block_size, legal, result)


def _tables(plan: Plan, policy: Policy | SparsePolicy, block_size: int) -> SequenceTables:
    """Empty tables of the policy's memory in blocks of another size."""
    deployment, memory = plan.deployment, policy.budget.kv_bytes
    longest = deployment.serving.max_model_len
    if isinstance(policy, Policy):
        geometry = deployment.geometry
        sequences = deployment.serving.max_num_seqs
        blocks = plan_blocks(geometry, policy.formats, block_size, memory, longest, sequences)
        return PagedTables(blocks, block_size)
    layers = layers_of(deployment)
    groups = plan_groups(
        layers, policy.formats, block_size, memory, longest, deployment.serving.max_num_seqs
    )
    if not layers.window_tokens:  # an entry of each token, and no slots
        return PagedTables(groups.csa, block_size)
    return GroupTables(layers, groups)


def table(runs: Sequence[Run], plan: Plan) -> TextTable:
    """One row a run."""
    deployment = plan.deployment
    return TextTable(
        f"{len(plan.arrivals):,} requests through the scheduler (simulated, time predicted)",
        (
            "scheme, block", "tokens/s", "batch, mean (peak)", "utilisation", "blocks held",
            "preempted", "recomputed tokens", "TTFT s, 50 | 90 | 99 %", "TPOT ms", "latency s",
        ),
        [
            (
                f"{run.scheme}, {run.block_size}" + ("" if run.legal else " *"),
                f"{run.result.tokens_per_second:,.1f}",
                f"{run.result.batch_mean:.1f} ({run.result.batch_peak})",
                f"{run.result.utilisation:.1%}",
                f"{run.result.occupancy:.1%}",
                str(run.result.preemptions),
                f"{run.result.recomputed_tokens:,}",
                _seconds(run.result.ttft),
                _seconds(run.result.tpot, 1e3),
                _seconds(run.result.latency),
            )
            for run in runs
        ],
        [
            "One copy of the model. Steps take what the best estimate says; block size changes how "
            "many blocks there are and how full, and what the device loses with small blocks is "
            "not known. Utilisation: share of the held slots that hold a token.",
            *(
                [f"* The {deployment.hardware.name}'s attention does not read such blocks."]
                if not all(run.legal for run in runs)
                else []
            ),
        ],
    )  # fmt: skip


def _seconds(values: Percentiles, scale: float = 1.0) -> str:
    return " | ".join(f"{scale * value:.3g}" for value in values)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs for scripts."""
    return [
        {
            "scheme": run.scheme,
            "block_size": run.block_size,
            "legal_block_size": run.legal,
            **{
                name: value._asdict() if isinstance(value, Percentiles) else value
                for name, value in run.result._asdict().items()
            },
        }
        for run in runs
    ]
