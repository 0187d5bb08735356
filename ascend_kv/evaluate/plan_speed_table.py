"""A plan's third table: how fast, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.latent import LatentLayers
from ascend_kv.plan.performance import Latency
from ascend_kv.plan.sparse_deployment import SparsePolicy
from ascend_kv.text_table import TextTable

_NO_KERNEL = "no kernel: served by references"


def speed_table(plan: Plan) -> TextTable:
    """TTFT, TPOT and throughput of every policy, and what bounds them."""
    rows: list[tuple[str, ...]] = []
    for policy in plan.policies:
        each = policy.latencies
        scheme = f"paged {policy.name}"
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
        low, best, high = plan.stacks.values()
        source = f"Low as {low}; best as {best}; high as {high}. --published shows them."
    hardware = plan.deployment.hardware
    notes = [source, _reading(plan)]
    sparse = [one for one in plan.policies if isinstance(one, SparsePolicy)]
    if not (plan.calibration or sparse or hardware.vector_bytes_per_second):
        notes[0] += f" Dequantizing is not counted: the {hardware.name}'s vector rate is not known."
    notes += [_copied(plan, policy) for policy in plan.policies if plan.why_copied(policy)]
    if any("int8" in one.formats for one in sparse):
        serves = not isinstance(plan.deployment.model.geometry.compressed, LatentLayers)
        notes.append(
            "INT8 entries and indexer keys: the speed of an attention that reads them as they lie, "
            "which the published stacks have." + " In this package references read them." * serves
        )
    return TextTable(
        "Speed of decoding at that batch (predicted; low | best | high are times)",
        ("scheme", "batch", "TTFT, ms", "TPOT, ms", "tokens/s", "bound by"),
        rows,
        notes,
    )


def _reading(plan: Plan) -> str:
    words = "TTFT: of a mean prompt that comes alone. Batch: sequences while growing, at most "
    words += "--max-num-seqs. Bound: "
    if isinstance(plan.policies[0], SparsePolicy):
        return words + (
            "memory, cube and index (the indexer's keys) are the card's, times what published "
            "steps took above it. Tokens that a draft layer guesses are not counted."
        )
    return words + (
        "layers and tokens are costs of host and launches, memory and cube those of the card."
    )


def _copied(plan: Plan, policy: Policy | SparsePolicy) -> str:
    return (
        f"{policy.name}: in every step its keys and values are copied out of the cache, "
        f"dequantized, before attention reads them ({plan.why_copied(policy)}). The copy's bytes "
        "are counted in TPOT, what its launches cost is not."
    )


def _three(latencies: Mapping[str, Latency], value: Callable[[Latency], float]) -> str:
    found = (value(latencies[name]) for name in ("low", "best", "high"))
    return " | ".join(f"{x:,.0f}" if x >= 1e3 else f"{x:.4g}" for x in found)
