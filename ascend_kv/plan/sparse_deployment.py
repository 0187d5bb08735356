"""A deployment of a model with sparse attention: DeepSeek-V4, and V3.2.

Its cache is slots and blocks. A sequence holds a slot of "window" and of "state", the projections
of windows of tokens that still fill, from its first token to its last, and takes blocks of "csa"
and "hca" entries as it grows. V3.2 has blocks of "csa" only, an entry of each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ascend_kv.compressed_layers import (
    PAGED_GROUPS,
    CompressedFormats,
    CompressedLayers,
    GroupBlocks,
    least_bytes,
    plan_groups,
)
from ascend_kv.config import CacheConfig
from ascend_kv.geometry import FORMATS, format_spec
from ascend_kv.plan.capacity import check_lengths, mean_blocks
from ascend_kv.plan.deployment import Deployment, latencies_of
from ascend_kv.plan.memory import Budget, Part, activations_part, fixed_parts, weights_part
from ascend_kv.plan.performance import Clock, Latency, has_rates
from ascend_kv.plan.sparse import SparseCosts, SparseModel, sparse_clock, sparse_model
from ascend_kv.resolved_cache import resolve_block_size, resolve_compressed_formats

_SCORES_AT_ONCE = 1 << 22
"""Scores of the indexer in memory at once, and tens of bytes for each (``deepseek_v4_indexer``)."""


class SparsePolicy(NamedTuple):
    """One way to keep such a cache.

    Attributes:
        formats: of entries, indexer keys and the rest.
        block_size: entries of a block.
        budget: of one card.
        blocks: slots and blocks that it holds, for one copy of the model.
        group_bytes: what each group takes of it.
        sequence_bytes: by group, of one sequence of max_model_len: its slots and blocks.
        sequences_full_length: sequences at once if all were max_model_len long.
        sequences_live: sequences at once on average, when finished ones are replaced.
        longest_context: tokens of one sequence that has the blocks of such a cache to itself, made
            for one sequence and for the model's longest.
        preemption_from: with so many at once some are preempted; None where slots run out first.
        batch: sequences at once that speed is predicted for.
        latencies, clocks: "low", "best" and "high", empty where nothing is known.
    """

    formats: CompressedFormats
    block_size: int
    budget: Budget
    blocks: GroupBlocks
    group_bytes: Mapping[str, int]
    sequence_bytes: Mapping[str, int]
    sequences_full_length: int
    sequences_live: float
    longest_context: int
    preemption_from: int | None
    batch: int
    latencies: Mapping[str, Latency]
    clocks: Mapping[str, Clock]

    @property
    def name(self) -> str:
        """The formats in few words."""
        dtype, entries, keys = self.formats
        return dtype if entries == keys == dtype else f"{entries}, indexer {keys}"


def layers_of(deployment: Deployment) -> CompressedLayers:
    """Of the model's cache."""
    layers = deployment.model.geometry.compressed
    assert layers is not None, "the model's attention is sparse"
    return layers


def sequence_bytes(
    layers: CompressedLayers, formats: CompressedFormats, block_size: int, tokens: int
) -> dict[str, int]:
    """What one sequence of ``tokens`` holds: a slot of window and state, and whole blocks."""
    csa, hca = (_blocks_of(layers, group, block_size, tokens) for group in PAGED_GROUPS)
    return layers.cache_bytes(GroupBlocks(1, csa, hca, block_size), formats)


def _blocks_of(layers: CompressedLayers, group: str, block_size: int, tokens: int) -> int:
    if not layers.count(group):
        return 0
    return -(-(tokens // layers.ratio(group)) // block_size)


def sparse_parts(deployment: Deployment) -> list[Part]:
    """A card's memory without the cache."""
    model, serving, parallel = deployment.model, deployment.serving, deployment.parallel
    layers = layers_of(deployment)
    columns = serving.max_model_len // layers.csa_ratio
    scores = min(serving.max_num_batched_tokens * columns, max(columns, _SCORES_AT_ONCE))
    if not layers.count("csa"):
        scores = 0
    return [
        weights_part(model.parameters, deployment.weights, parallel),
        *fixed_parts(deployment.hardware, parallel),
        activations_part(
            model.geometry,
            model.parameters,
            serving,
            parallel,
            deployment.element_bytes,
            int(model.config.get("hc_mult") or 1),
        ),
        Part(
            "indexer scores", 4 * scores, 0, 24 * scores,
            f"up to {scores:,} scores x 4 B at once, and as much again and more to select the best",
            "indexer of this package; a fused one keeps none",
        ),
    ]  # fmt: skip


def served_sparse_model(deployment: Deployment, formats: CompressedFormats) -> SparseModel:
    """What one card works on in a step."""
    layers = layers_of(deployment)
    value = FORMATS[formats.dtype].value_bits / 8
    key = layers.entry_bytes("csa", formats) - layers.entry_bytes("hca", formats)
    return sparse_model(
        deployment.model,
        deployment.weights,
        deployment.parallel,
        entry_bytes=layers.entry_bytes("hca", formats),
        key_bytes=key,
        window_bytes=layers.head_dim * value,
    )


def plan_sparse_policy(
    deployment: Deployment, cache: CacheConfig, costs: Mapping[str, SparseCosts]
) -> SparsePolicy:
    """Plan one cache policy.

    Args:
        deployment: what runs where.
        cache: the policy; its allocator and memory are of no account.
        costs: how long steps take, by "low", "best" and "high".

    Raises:
        UsageError: names what does not fit, or what the device cannot read.
    """
    layers, serving = layers_of(deployment), deployment.serving
    longest, slots = serving.max_model_len, serving.max_num_seqs
    check_lengths(deployment.lengths, longest)
    formats = resolve_compressed_formats(cache, deployment.model.geometry.dtype)
    kept = [format_spec(name) for name in formats]
    block_size = resolve_block_size(cache, deployment.device, kept)
    least = least_bytes(layers, formats, block_size, longest, slots)
    budget = deployment.share_out(sparse_parts(deployment), least)
    if deployment.kv_bytes is None:
        budget = budget._replace(kv_low=max(budget.kv_low, least))
    blocks = plan_groups(layers, formats, block_size, budget.kv_bytes, longest, slots)
    full, live = _sequences(layers, blocks, deployment.lengths, longest)
    batch = max(1, min(slots, int(live)))
    clocks: dict[str, Clock] = {}
    if has_rates(deployment.hardware):
        model = served_sparse_model(deployment, formats)
        clocks = {
            name: sparse_clock(model, deployment.hardware, each) for name, each in costs.items()
        }
    return SparsePolicy(
        formats,
        block_size,
        budget,
        blocks,
        layers.cache_bytes(blocks, formats),
        sequence_bytes(layers, formats, block_size, longest),
        full,
        live,
        _longest_context(deployment, formats, block_size, budget.kv_bytes),
        int(live) + 1 if live < slots else None,
        batch,
        latencies_of(deployment, batch, clocks),
        clocks,
    )


def _sequences(
    layers: CompressedLayers,
    blocks: GroupBlocks,
    lengths: Sequence[tuple[int, int]],
    longest: int,
) -> tuple[int, float]:
    """Sequences at once that are all of the longest, and on the average while they grow."""
    full, live = blocks.slots, float(blocks.slots)
    for group, there in (("csa", blocks.csa), ("hca", blocks.hca)):
        need = _blocks_of(layers, group, blocks.block_size, longest)
        if need:
            full = min(full, there // need)
        held = mean_blocks(lengths, blocks.block_size, layers.ratio(group))
        if layers.count(group) and held:
            live = min(live, there / held)
    return full, live


def _longest_context(
    deployment: Deployment, formats: CompressedFormats, block_size: int, memory_bytes: int
) -> int:
    layers, most = layers_of(deployment), deployment.model.geometry.max_position_tokens
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        taken = sum(sequence_bytes(layers, formats, block_size, middle).values())
        low, high = (middle, high) if taken <= memory_bytes else (low, middle - 1)
    return low
