"""``ascend-kv plan --explain`` of DeepSeek-V3.2 and V4: the formulas of slots, blocks and steps."""

from __future__ import annotations

from ascend_kv.compressed_layers import (
    PAGED_GROUPS,
    CompressedFormats,
    CompressedLayers,
    explain_compression,
)
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Deployment
from ascend_kv.plan.latent import LatentLayers
from ascend_kv.plan.performance import Load
from ascend_kv.plan.sparse_deployment import SparsePolicy, layers_of, served_sparse_model
from ascend_kv.user_values import format_bytes

_FLOAT32 = 4


def sparse_sections(plan: Plan) -> dict[str, list[str]]:
    """Lines by title, without what is said of every model."""
    deployment = plan.deployment
    policies = [policy for policy in plan.policies if isinstance(policy, SparsePolicy)]
    longest = deployment.serving.max_model_len
    return {
        "Bytes of a sequence": _sequence(deployment, policies),
        "What circulates": _claims(layers_of(deployment), longest),
        "Blocks and sequences": [line for each in policies for line in _blocks(deployment, each)],
        "Time": [line for each in policies for line in _time(plan, each)],
    }


def _claims(layers: CompressedLayers, tokens: int) -> list[str]:
    """The 57 MB and its like, which are of V4 Flash at 128K."""
    if isinstance(layers, LatentLayers):
        return []
    return [
        'Articles give 7.3 GB, 1.8 GB ("CSA, 4x") and 57 MB ("HCA, 128x") for V4 Flash at 128K: '
        "7.3 GB / 4 and 7.3 GB / 128, as if every layer were of one kind, and windows and indexer "
        f"took nothing. Here, at {tokens:,} tokens:",
        *explain_compression(layers, tokens).splitlines(),
    ]


def _sequence(deployment: Deployment, policies: list[SparsePolicy]) -> list[str]:
    layers, tokens = layers_of(deployment), deployment.serving.max_model_len
    names = {"csa": "every token" if layers.csa_ratio == 1 else f"{layers.csa_ratio} tokens"}
    names["hca"] = f"{layers.hca_ratio} tokens"
    lines = []
    for policy in policies:
        for group in PAGED_GROUPS:
            if not layers.count(group):
                continue
            entry, ratio = layers.entry_bytes(group, policy.formats), layers.ratio(group)
            total = tokens // ratio * layers.group_entry_bytes(group, policy.formats)
            lines.append(
                f"{policy.name}, {group}: {layers.count(group)} layers x {tokens:,} // {ratio} "
                f"entries x {entry:,} bytes ({_entry(layers, group, policy.formats)}; one for "
                f"{names[group]}) = {format_bytes(total)}."
            )
    formats = policies[0].formats
    if layers.window_tokens:
        size = layers.slot_bytes("window", formats)
        lines.append(
            f"window: {len(layers.kinds)} layers x {layers.window_tokens} tokens x "
            f"{layers.head_dim} numbers in {formats.dtype} = {format_bytes(size)}."
        )
    for kind in PAGED_GROUPS:
        kept, count = layers.state_tokens(kind), layers.count(kind)
        if not kept or not count:
            continue
        channels, said = layers.head_dim, f"{layers.head_dim}"
        if kind == "csa":
            channels = 2 * (layers.head_dim + layers.index_dim)
            said = f"2 x ({layers.head_dim} + {layers.index_dim})"
        size = count * kept * 2 * channels * _FLOAT32
        lines.append(
            f"state, {kind}: {count} layers x {kept} tokens x 2 (values and gates) x {said} "
            f"channels x {_FLOAT32} bytes = {format_bytes(size)}."
        )
    return lines


def _entry(layers: CompressedLayers, group: str, formats: CompressedFormats) -> str:
    numbers = f"{layers.head_dim} numbers in {formats.entries}"
    if formats.entries == "int8":
        numbers = f"{layers.head_dim - layers.rotary_dim} INT8 codes, scales, and "
        numbers += f"{layers.rotary_dim} in {formats.dtype}"
    if group != "csa":
        return numbers
    return f"{numbers}, and an indexer key of {layers.index_dim} in {formats.index_keys}"


def _blocks(deployment: Deployment, policy: SparsePolicy) -> list[str]:
    layers, blocks, size = layers_of(deployment), policy.blocks, policy.block_size
    longest = deployment.serving.max_model_len
    lines = []
    for group, there in (("csa", blocks.csa), ("hca", blocks.hca)):
        if layers.count(group):
            ratio = layers.ratio(group)
            need = -(-(longest // ratio) // size)
            lines.append(
                f"{policy.name}, {group}: {there:,} blocks; a sequence of {longest:,} tokens takes "
                f"ceil({longest:,} // {ratio} / {size}) = {need:,}, so {there // need:,} such fit."
                if need
                else f"{policy.name}, {group}: {there:,} blocks; {longest:,} tokens fill no entry."
            )
    ends = f"{blocks.slots} slots"
    lines.append(
        f"{policy.name}: with {ends}, {policy.sequences_full_length:,} sequences of {longest:,} "
        f"tokens at once, and {policy.sequences_live:,.1f} of the given lengths while they grow."
    )
    return lines


def _time(plan: Plan, policy: SparsePolicy) -> list[str]:
    if not policy.clocks:
        return []
    deployment = plan.deployment
    load = Load(policy.batch, round(policy.batch * deployment.mean_context()))
    model = served_sparse_model(deployment, policy.formats)
    mean = load.decode_context / load.decodes
    weights = model.weight_bytes_read(load.tokens)
    cache = model.cache_bytes_read(load.decodes, load.decodes, mean)
    together = load.tokens * deployment.parallel.expert / deployment.parallel.tensor
    reached = model.reached(together) / max(1, deployment.model.parameters.experts)
    lines = [
        f"{policy.name}: a step of {load.decodes} sequences of {mean:,.0f} tokens in each copy "
        f"reads {weights / 1e9:.3f} GB of weights on a card ({reached:.0%} of its experts, which "
        f"{together:,.0f} tokens reach) and {cache / 1e9:.3f} GB of cache, does "
        f"{model.operations(load) / 1e12:.3f} T operations and "
        f"{model.index_operations(load) / 1e12:.3f} T in the indexer. step = memory + cube + index."
    ]
    for end, clock in policy.clocks.items():
        step = clock(load)
        parts = ", ".join(f"{what} {1e3 * seconds:.3f}" for what, seconds in step.parts.items())
        lines.append(f"{policy.name}, {end}: {1e3 * step.seconds:.3f} ms: {parts}.")
    return lines
