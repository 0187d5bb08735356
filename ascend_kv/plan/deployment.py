"""One deployment, planned: a card's memory, cache policies side by side, and their speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_kv.config import CacheConfig
from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import LayerFormat, ModelGeometry
from ascend_kv.plan.attention_reads import why_copied
from ascend_kv.plan.capacity import Capacity, capacity, describe_formats
from ascend_kv.plan.hardware import Hardware
from ascend_kv.plan.memory import (
    Budget,
    Part,
    Serving,
    activations_part,
    copied_part,
    fixed_parts,
    loaded_prefix_part,
    make_budget,
    score_bias_part,
    weights_part,
)
from ascend_kv.plan.models import PlannedModel
from ascend_kv.plan.parallel import Parallel, rank_geometry
from ascend_kv.plan.performance import (
    Clock,
    Costs,
    Latency,
    ServedModel,
    has_rates,
    latency,
    roofline_clock,
)
from ascend_kv.plan.weight_formats import WeightFormat
from ascend_kv.resolved_cache import resolve_block_size, resolve_formats
from ascend_kv.user_values import format_bytes

Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Deployment:
    """What is planned.

    Attributes:
        model, weights, parallel: what runs, and on how many cards.
        device: whose attention reads the cache. hardware: the card's figures.
        serving: limits of the scheduler, and the share of memory that is used.
        lengths: prompt and output tokens of the requests.
        kv_bytes: a card's budget for the cache where the user named one.
    """

    model: PlannedModel
    weights: WeightFormat
    parallel: Parallel
    device: Device
    hardware: Hardware
    serving: Serving
    lengths: Lengths
    kv_bytes: int | None = None

    @property
    def geometry(self) -> ModelGeometry:
        """One card's share of the model."""
        return rank_geometry(self.model.geometry, self.parallel.tensor)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.model.geometry.dtype == "float32" else 2

    def mean_context(self) -> float:
        """Tokens a sequence has on the average of all its decode steps."""
        steps = sum(output for _, output in self.lengths)
        return sum(output * (prompt + output / 2) for prompt, output in self.lengths) / steps

    def mean_prompt(self) -> int:
        return round(sum(prompt for prompt, _ in self.lengths) / len(self.lengths))

    def parts(self, formats: Sequence[LayerFormat], block_size: int) -> list[Part]:
        """A card's memory without the cache."""
        model, serving, parallel = self.model, self.serving, self.parallel
        return [
            weights_part(model.parameters, self.weights, parallel),
            *fixed_parts(self.hardware, parallel),
            activations_part(
                model.geometry, model.parameters, serving, parallel, self.element_bytes
            ),
            score_bias_part(model.geometry, formats, serving, self.hardware, parallel),
            loaded_prefix_part(self.geometry, formats, serving, self.hardware, self.element_bytes),
            *self._copy_part(formats, block_size),
        ]

    def _copy_part(self, formats: Sequence[LayerFormat], block_size: int) -> list[Part]:
        copied = self.copied(formats, block_size)
        if not copied:
            return []
        context, reason = self.mean_context(), next(iter(copied.values()))
        return [copied_part(self.geometry, self.serving, context, self.element_bytes, reason)]

    def budget(self, formats: Sequence[LayerFormat], block_size: int) -> Budget:
        """What the cache gets on a card.

        Raises:
            UsageError: something does not fit; says what.
        """
        longest = self.serving.max_model_len
        blocks = -(-longest // block_size)
        least = self.geometry.cache_bytes(
            formats, blocks, block_size, longest, self.serving.max_num_seqs
        )
        return self.share_out(self.parts(formats, block_size), least)

    def share_out(self, parts: list[Part], least: int) -> Budget:
        """What ``parts`` leave to the cache on a card, which wants ``least`` bytes.

        Raises:
            UsageError: something does not fit; says what.
        """
        if self.hardware.memory_bytes is None:
            if self.kv_bytes is None:
                legal = "a KV budget such as 90MB or 1.5GiB, or a --device whose memory is known"
                hint = "Two cards are called 950: 950PR and 950DT." * (self.device.name == "950")
                raise UsageError("--memory", None, legal, hint)
            total = self.kv_bytes + sum(part.bytes for part in parts)
            return Budget(parts, self.kv_bytes, self.kv_bytes, self.kv_bytes, total)
        budget = make_budget(self.hardware, parts, self.serving, least)
        if self.kv_bytes is None:
            return budget
        if self.kv_bytes > budget.kv_bytes:
            taken = ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in budget.parts)
            raise UsageError(
                "--memory",
                format_bytes(self.kv_bytes),
                f"at most {format_bytes(budget.kv_bytes)} on a {self.hardware.name}",
                f"The rest is taken: {taken}.",
            )
        return budget._replace(kv_bytes=self.kv_bytes, kv_low=self.kv_bytes, kv_high=self.kv_bytes)

    def by_references(self, formats: Sequence[LayerFormat]) -> bool:
        """Whether the device lacks a kernel for one: how fast a reference is, nothing says."""
        sides = (side.name for spec in formats for side in (spec.key, spec.value))
        return any(name in self.device.by_references for name in sides)

    def copied(self, formats: Sequence[LayerFormat], block_size: int) -> dict[LayerFormat, str]:
        """The formats that a 910B copies out of the cache for every decode, and why."""
        geometry, longest = self.model.geometry, self.serving.max_model_len
        if not self.device.name.startswith("910B"):
            return {}  # a CPU reads all; of a 950's attention no rules were read
        halves = {"float16", "bfloat16"}
        sides = {side.name for spec in formats for side in (spec.key, spec.value)}
        # a cache of the other half type is one of a model that runs in that type
        dtype = min(sides & halves or {geometry.dtype} & halves or {"float16"})
        found = {
            spec: why_copied(geometry, spec, dtype, block_size, longest)
            for spec in dict.fromkeys(formats)
        }
        return {spec: reason for spec, reason in found.items() if reason is not None}

    def served_model(self, formats: Sequence[LayerFormat], block_size: int) -> ServedModel:
        """What one card works on in a step."""
        geometry, copied = self.geometry, self.copied(formats, block_size)
        dense = 2 * geometry.num_kv_heads * geometry.head_dim * self.element_bytes
        on_npu = self.device.name != "cpu"
        quantized = sum(side.quantized for spec in formats for side in (spec.key, spec.value))
        numbers = quantized * geometry.num_kv_heads * geometry.head_dim
        return ServedModel(
            layers=geometry.num_layers,
            parameters=self.model.parameters,
            weights=self.weights,
            tensor=self.parallel.tensor,
            attention_width=geometry.num_heads * geometry.head_dim,
            hidden_size=geometry.hidden_size,
            kv_token_bytes=geometry.token_bytes(formats),
            kv_numbers=numbers,
            copied_bytes=dense * sum(spec in copied for spec in formats),
            loaded_bytes=dense * sum(spec.quantized for spec in formats) * on_npu,
        )


ClockMaker = Callable[[Deployment, Sequence[LayerFormat], int], Mapping[str, Clock]]
"""The clocks of a deployment with a cache of these formats, in blocks of so many tokens, by name:
"low", "best", "high"."""


def roofline_clocks(costs: Mapping[str, Costs]) -> ClockMaker:
    """Clocks from a card's published rates; none where it has none, or no kernel for a format."""

    def make(
        deployment: Deployment, formats: Sequence[LayerFormat], block_size: int
    ) -> Mapping[str, Clock]:
        if not has_rates(deployment.hardware) or deployment.by_references(formats):
            return {}
        model = deployment.served_model(formats, block_size)
        return {
            name: roofline_clock(model, deployment.hardware, each) for name, each in costs.items()
        }

    return make


class Policy(NamedTuple):
    """One way to keep the cache.

    Attributes:
        formats: of every layer.
        block_size: tokens a block.
        budget: of one card.
        paged, contiguous: what each allocator makes of it, for one copy of the model.
        longest_context: tokens of one sequence that has the cache to itself, at most the model's.
        preemption_from: with so many sequences at once, of the lengths that were given and in all
            stages, the cache overflows: some are preempted and computed again.
        batch: sequences at once that speed is predicted for.
        latencies: "low", "best" and "high"; empty where nothing is known to predict them from.
        clocks: by the same names.
    """

    formats: tuple[LayerFormat, ...]
    block_size: int
    budget: Budget
    paged: Capacity
    contiguous: Capacity
    longest_context: int
    preemption_from: int
    batch: int
    latencies: Mapping[str, Latency]
    clocks: Mapping[str, Clock]

    @property
    def name(self) -> str:
        """The formats in few words."""
        return describe_formats(self.formats)


def latencies_of(
    deployment: Deployment, batch: int, clocks: Mapping[str, Clock]
) -> dict[str, Latency]:
    """TTFT, TPOT and throughput of a deployment by the names of its clocks."""
    return {
        name: latency(
            clock,
            batch=batch,
            prompt_tokens=deployment.mean_prompt(),
            context_tokens=deployment.mean_context(),
            max_num_batched_tokens=deployment.serving.max_num_batched_tokens,
            copies=deployment.parallel.data,
        )
        for name, clock in clocks.items()
    }


def plan_policy(deployment: Deployment, cache: CacheConfig, make_clocks: ClockMaker) -> Policy:
    """Plan one cache policy.

    Args:
        deployment: what runs where.
        cache: the policy; its allocator and memory are of no account.
        make_clocks: how long steps take.

    Raises:
        UsageError: names what does not fit, or what the device cannot read.
    """
    geometry, serving = deployment.geometry, deployment.serving
    formats = resolve_formats(geometry, cache, deployment.model.geometry.dtype)
    block_size = resolve_block_size(cache, deployment.device, formats)
    budget = deployment.budget(formats, block_size)
    paged, contiguous = (
        capacity(
            geometry,
            formats,
            budget.kv_bytes,
            block_size,
            allocator,
            serving.max_model_len,
            deployment.lengths,
            serving.max_num_seqs,
        )
        for allocator in ("paged", "contiguous")
    )
    batch = max(1, min(serving.max_num_seqs, int(paged.sequences_live)))
    clocks = make_clocks(deployment, formats, block_size)
    longest = min(deployment.model.geometry.max_position_tokens, paged.num_blocks * block_size)
    return Policy(
        formats,
        block_size,
        budget,
        paged,
        contiguous,
        longest,
        int(paged.sequences_live) + 1,
        batch,
        latencies_of(deployment, batch, clocks),
        clocks,
    )
