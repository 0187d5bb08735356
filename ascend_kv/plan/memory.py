"""A card's memory, part by part: what is left for the KV cache, or which part does not fit.

Weights follow from the configuration. The other parts are estimates, each with a range and with
where it comes from, since leaving them out is how plans end in "out of memory" (vllm-ascend issues
89 and 8260).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.geometry import LayerFormat, ModelGeometry
from ascend_kv.plan.hardware import Hardware
from ascend_kv.plan.parallel import Parallel
from ascend_kv.plan.parameters import Parameters
from ascend_kv.plan.weight_formats import WeightFormat
from ascend_kv.user_values import format_bytes

_MIB, _GIB = 2**20, 2**30

HCCL_BUFFER_BYTES = 200 * _MIB
LOW_BIT = ("fp8", "int4")
"""Formats whose keys want the key offset where there is a large key bias, by their beginning."""


class Part(NamedTuple):
    """One part of a card's memory, in bytes.

    Attributes:
        name: of the part.
        bytes: expected.
        low, high: between these it is likely to be.
        formula: how the figure came about, with its numbers.
        source: where the formula or the figures were read.
    """

    name: str
    bytes: int
    low: int
    high: int
    formula: str
    source: str


@dataclass(frozen=True)
class Serving:
    """What decides memory beside model and card.

    Attributes:
        max_model_len: the longest sequence, in tokens.
        max_num_seqs: the most sequences in one step.
        max_num_batched_tokens: the most tokens of one step.
        utilization: share of the usable memory that is used, as vLLM's gpu_memory_utilization.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    utilization: float = 0.92


def weights_part(parameters: Parameters, weights: WeightFormat, parallel: Parallel) -> Part:
    """One card's weights: matrices shared out, vectors on every card."""
    linear, experts = parameters.attention + parameters.dense, parameters.experts
    other = parameters.embedding + (0 if parameters.tied else parameters.output)
    stored = (parameters.linear_bytes(weights) + other * weights.other_bytes) / parallel.tensor
    stored += experts * weights.expert_bytes / parallel.expert
    size = round(stored + parameters.norms * weights.other_bytes)
    each = parameters.linear_bytes(weights) / linear
    formula = (
        f"({linear:,} linear x {each:.4g} B + {other:,} embedding and output x "
        f"{weights.other_bytes:g} B) / {parallel.tensor} + {parameters.norms:,} vectors x "
        f"{weights.other_bytes:g} B"
    )
    if experts:
        formula += (
            f" + {experts:,} in routed experts x {weights.expert_bytes:g} B / {parallel.expert}"
        )
    # 3 %: 1.14 GiB were measured where 1.11 are counted (vllm-ascend pull request 8289)
    return Part("weights", size, size, round(1.03 * size), formula, f"config; {weights.source}")


def activations_part(
    geometry: ModelGeometry,
    parameters: Parameters,
    serving: Serving,
    parallel: Parallel,
    element_bytes: int,
    streams: int = 1,
) -> Part:
    """What one layer keeps for all tokens of a step, and the logits of its sequences.

    Residual (DeepSeek-V4 has several ``streams`` of it), its norm and the layer's result in full
    width; gate, up and their product in the card's share; where cards share experts, what tokens
    carry to them and back. Logits once in the model's type, and twice in float32, for the sampler.
    """
    tokens = serving.max_num_batched_tokens
    layers = geometry.num_layers
    per_token = parameters.experts_per_token
    wide = (2 + streams) * geometry.hidden_size
    if parallel.experts is not None and parallel.expert > 1:
        wide += 2 * per_token * geometry.hidden_size
    inner = (parameters.dense // layers + parameters.experts // layers * per_token // max(
        1, parameters.num_experts
    )) // geometry.hidden_size // parallel.tensor  # fmt: skip
    layer = tokens * (wide + inner) * element_bytes
    logits = serving.max_num_seqs * geometry.vocab_size * (element_bytes + 8)
    size = layer + logits
    formula = (
        f"{tokens:,} tokens x ({wide:,} + {inner:,}) x {element_bytes} B + "
        f"{serving.max_num_seqs:,} sequences x {geometry.vocab_size:,} logits x "
        f"{element_bytes + 8} B"
    )
    source = "shapes of one decoder layer; the range is for fragments and copies"
    return Part("activations", size, size // 2, 2 * size, formula, source)


def score_bias_part(
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    serving: Serving,
    hardware: Hardware,
    parallel: Parallel,
) -> Part:
    """The bias q.R(n).offset of every query head at every position, float16, one layer at a time.

    Native attention on a CPU needs none. Elsewhere it depends on the weights: this counts it where
    a model has key biases and keys are kept in few bits or as floats of 8 bits; for INT8 it is the
    upper end of the range.
    """
    low_bit = any(spec.key.name.startswith(LOW_BIT) for spec in formats)
    biased = geometry.model_type == "qwen2"
    quantized = any(spec.key.quantized for spec in formats)
    whole = serving.max_num_seqs * geometry.num_heads // parallel.tensor * serving.max_model_len * 2
    most = whole if biased and quantized and hardware.name != "cpu" else 0
    formula = (
        f"{serving.max_num_seqs} sequences x {geometry.num_heads // parallel.tensor} heads x "
        f"{serving.max_model_len:,} positions x 2 B"
        if most
        else "native attention gives the offset back tile by tile"
        if biased and quantized
        else "no key bias that quantized keys would want taken out"
    )
    source = "key offset, only for models with a key bias; decided from the weights at load"
    return Part("score-bias buffer", most if low_bit else 0, 0, most, formula, source)


def loaded_prefix_part(
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    serving: Serving,
    hardware: Hardware,
    element_bytes: int,
) -> Part:
    """Keys and values that prompts attend to, dense, where they lie quantized; a layer at a time.

    The fused attention of an NPU reads a quantized cache for decodes only: for the prompts of a
    step keys and values are written out as ``[prompts, heads, longest, head_dim]``. A CPU reads
    the cache as it lies.

    Args:
        geometry: one card's share.
        formats: one for each layer.
        serving: longest sequence, and the sequences and tokens of a step.
        hardware: the card.
        element_bytes: of the queries' type.
    """
    loads = hardware.name != "cpu" and any(spec.quantized for spec in formats)
    token = 2 * geometry.num_kv_heads * geometry.head_dim * element_bytes
    one = serving.max_model_len * token if loads else 0
    # a chunk of one token is served as a decode
    most = max(1, min(serving.max_num_seqs, serving.max_num_batched_tokens // 2))
    formula = (
        f"2 x {geometry.num_kv_heads} heads x {serving.max_model_len:,} tokens x "
        f"{geometry.head_dim} x {element_bytes} B; 0 to {most} prompts a step"
        if loads
        else "the cache is attended to as it lies"
    )
    source = "paged_attention of this package: prompts over a quantized cache load it densely"
    return Part("loaded prefix", one, 0, most * one, formula, source)


def copied_part(
    geometry: ModelGeometry, serving: Serving, context: float, element_bytes: int, reason: str
) -> Part:
    """Keys and values of all decoding sequences, dense, where attention does not read the cache.

    They are written out side by side, all as long as the longest, for one layer at a time.

    Args:
        geometry: one card's share.
        serving: sequences of a step, and the longest.
        context: tokens of a sequence, on the average.
        element_bytes: of the queries' type.
        reason: why the cache is not read as it lies.
    """
    token = 2 * geometry.num_kv_heads * geometry.head_dim * element_bytes
    one, most = round(context) * token, serving.max_model_len * token
    formula = (
        f"{serving.max_num_seqs} sequences x 2 x {geometry.num_kv_heads} heads x "
        f"{round(context):,} tokens x {geometry.head_dim} x {element_bytes} B; up to "
        f"{serving.max_model_len:,} tokens"
    )
    source = f"paged_attention of this package; {reason}"
    size, high = serving.max_num_seqs * one, serving.max_num_seqs * most
    return Part("copied cache", size, token, high, formula, source)


def fixed_parts(hardware: Hardware, parallel: Parallel) -> list[Part]:
    """Parts that do not depend on the model: an NPU's runtime, or a CPU process's."""
    if hardware.name == "cpu":
        return [
            Part(
                "libraries", 400 * _MIB, 330 * _MIB, 600 * _MIB, "Python, torch and transformers",
                "measured: what two served models' processes held beside weights and cache on "
                "x86-64 Linux with torch 2.13",
            )
        ]  # fmt: skip
    groups = 2 if parallel.cards > 1 else 0
    buffer = 2 * HCCL_BUFFER_BYTES
    return [
        Part(
            "graph and workspace", _GIB, round(0.17 * _GIB), 3 * _GIB,
            "captured graphs, operators' workspace, runtime: 1 GiB",
            "0.13 GiB outside torch and 0.04 GiB of graphs for a small model in vllm-ascend pull "
            "request 8289; more and larger graphs are assumed to take up to 3 GiB",
        ),
        Part(
            "HCCL buffers", groups * buffer, (groups // 2) * buffer, 2 * groups * buffer,
            f"{groups} communicators x 2 x 200 MiB",
            "HCCL_BUFFSIZE in CANN's list of environment variables: 200 MiB by default, twice a "
            "communicator; their number is assumed to be 1 to 4",
        ),
    ]  # fmt: skip


class Budget(NamedTuple):
    """Parts of a card's memory, and what the KV cache gets.

    Attributes:
        parts: all but the KV cache.
        kv_bytes: for the KV cache, expected.
        kv_low, kv_high: with every part at its high, or low, end.
        total_bytes: of the card; on a CPU what the parts and the cache add up to.
    """

    parts: list[Part]
    kv_bytes: int
    kv_low: int
    kv_high: int
    total_bytes: int


def make_budget(hardware: Hardware, parts: Sequence[Part], serving: Serving, least: int) -> Budget:
    """What is left for the KV cache on a card.

    Args:
        hardware: with a known memory.
        parts: ``weights_part`` and the others.
        serving: its utilization.
        least: KV bytes of one sequence of ``max_model_len``.

    Raises:
        UsageError: the parts, or one sequence's cache, do not fit; says which does not.
    """
    assert hardware.memory_bytes is not None and hardware.usable_bytes is not None
    kept = hardware.memory_bytes - hardware.usable_bytes
    margin = round((1 - serving.utilization) * hardware.usable_bytes)
    system = Part(
        "system", kept, round(0.9 * kept), round(1.1 * kept),
        f"{format_bytes(hardware.memory_bytes)} - {format_bytes(hardware.usable_bytes)}",
        hardware.sources["usable_bytes"],
    )  # fmt: skip
    unused = Part(
        "left free", margin, margin, margin,
        f"{1 - serving.utilization:.2f} x {format_bytes(hardware.usable_bytes)}",
        "--memory-utilization, the meaning of vLLM's gpu_memory_utilization",
    )  # fmt: skip
    every = [system, unused, *parts]
    left = hardware.memory_bytes
    for part in every:
        if part.bytes > left:
            raise _does_not_fit(hardware, part, left, every)
        left -= part.bytes
    if left < least:
        cache = Part("KV cache", least, least, least, "one sequence of --max-model-len", "")
        raise _does_not_fit(hardware, cache, left, every)
    low = hardware.memory_bytes - sum(part.high for part in every)
    high = hardware.memory_bytes - sum(part.low for part in every)
    return Budget(every, left, max(0, low), high, hardware.memory_bytes)


def _does_not_fit(hardware: Hardware, part: Part, left: int, parts: Sequence[Part]) -> UsageError:
    taken = ", ".join(f"{other.name} {format_bytes(other.bytes)}" for other in parts)
    remedy = {
        "weights": "Take more cards (--cards, --tensor-parallel) or smaller weights (--weights "
        "w8a8).",
        "KV cache": "Lower --max-model-len, quantize the cache (--formats int8), or take more "
        "cards (--tensor-parallel).",
        "activations": "Lower --max-num-batched-tokens or --max-num-seqs.",
        "score-bias buffer": "Lower --max-model-len or --max-num-seqs.",
        "loaded prefix": "Lower --max-model-len.",
        "copied cache": "Lower --max-num-seqs, or take a format that is read as it lies.",
        "indexer scores": "Lower --max-model-len or --max-num-batched-tokens.",
    }.get(part.name, "Raise --memory-utilization.")
    return UsageError(
        "--device",
        f"{hardware.name} ({format_bytes(hardware.memory_bytes or 0)})",
        f"a card with room for {part.name}: {format_bytes(part.bytes)} where "
        f"{format_bytes(left)} are left",
        f"{part.name[0].upper()}{part.name[1:]} ({part.formula}) does not fit; a card holds: "
        f"{taken}. {remedy}",
    )
