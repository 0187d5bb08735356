"""How long a step of DeepSeek-V3.2 or V4 takes: what its sparse attention and its experts move.

    step = stack * (bytes / bandwidth * memory_factor
                    + operations / matrix rate * cube_factor
                    + index)
    index = the larger of CSA layers * longest row of indexer keys * key_seconds
            and the indexer's operations / matrix rate

A card reads its share of the weights, of the routed experts those that the step's tokens reach,
and of the cache the window, all indexer keys, the entries that the indexer chose and those of 128
tokens. Experts are shared by ``Parallel.expert`` cards, whose tokens they all see. The factors are
fitted to published steps (``published_v4``), in which tokens travelled to their experts and back:
that is in them, and not told apart.
"""

from __future__ import annotations

from typing import NamedTuple

from ascend_kv.compressed_layers import CompressedLayers
from ascend_kv.model_config import need_count
from ascend_kv.plan.hardware import Hardware
from ascend_kv.plan.latent import LatentLayers
from ascend_kv.plan.models import PlannedModel
from ascend_kv.plan.parallel import Parallel
from ascend_kv.plan.parameters import Parameters
from ascend_kv.plan.performance import Clock, Load, StepTime
from ascend_kv.plan.weight_formats import WeightFormat


class SparseCosts(NamedTuple):
    """The parameters of the model.

    Attributes:
        memory_factor: times what the bytes take at the published bandwidth.
        cube_factor: times what the operations take at the published matrix rate.
        key_seconds: of each indexer key in each layer, however many sequences there are.
        stack: times all of it.
    """

    memory_factor: float
    cube_factor: float
    key_seconds: float = 0.0
    stack: float = 1.0


SPARSE_PEAK = SparseCosts(1.0, 1.0)
"""Nothing lost: the roofline itself."""


class SparseModel(NamedTuple):
    """What of a model and its cache one card works on.

    Attributes:
        layers: of the cache.
        parameters, weights: stored weights and their format.
        parallel: how they are shared out.
        heads: query heads on this card. index_heads: of the indexer, all on each card.
        head_width: numbers that a query head and one entry multiply, its part of the sum included.
        window_bytes: of a token in a layer's window.
        entry_bytes: of an entry without its indexer key. key_bytes: of an indexer key.
        even: whether tokens are spread over the experts by force, as benchmarks do.
    """

    layers: CompressedLayers
    parameters: Parameters
    weights: WeightFormat
    parallel: Parallel
    heads: int
    index_heads: int
    head_width: int
    window_bytes: float
    entry_bytes: float
    key_bytes: float
    even: bool = False

    def weight_bytes_read(self, tokens: float) -> float:
        """Bytes of weights that a step of so many tokens in each copy reads on this card."""
        parameters, weights = self.parameters, self.weights
        linear = parameters.linear_bytes(weights)
        other = parameters.output * weights.other_bytes
        reached = self.reached(tokens * self.parallel.expert / self.parallel.tensor)
        return (linear + other) / self.parallel.tensor + (
            reached * weights.expert_bytes / self.parallel.expert
        )

    def reached(self, tokens: float) -> float:
        """Routed weights that so many tokens reach, in all layers."""
        parameters = self.parameters
        if not self.even:
            return parameters.reached_experts(tokens)
        share = tokens * parameters.experts_per_token / parameters.num_experts
        return min(1.0, share) * parameters.experts

    def attended(self, context: float) -> float:
        """Entries and tokens of windows that one token attends to, all layers."""
        layers = self.layers
        chosen = layers.count("csa") * min(layers.index_topk, self.keys(context))
        return self._window(context) + chosen + layers.count("hca") * (context // layers.hca_ratio)

    def keys(self, context: float) -> float:
        """Indexer keys of a sequence in one layer."""
        return context // self.layers.csa_ratio

    def cache_bytes_read(self, sequences: float, tokens: float, context: float) -> float:
        """Bytes of cache that a step reads on this card.

        Window, indexer keys and entries of 128 tokens are read once for all tokens that a sequence
        brings, chosen entries for each, and never more than there are.

        Args:
            sequences: with ``tokens`` together, each with ``context`` tokens.
        """
        layers, keys = self.layers, self.keys(context)
        sparse = layers.count("csa")
        chosen = sparse * min(tokens * min(layers.index_topk, keys), sequences * keys)
        heavy = layers.count("hca") * (context // layers.hca_ratio)
        window = self._window(context) * self.window_bytes
        each = window + sparse * keys * self.key_bytes + heavy * self.entry_bytes
        return sequences * each + chosen * self.entry_bytes

    def moved_bytes(self, load: Load) -> float:
        """Weights and cache of one step. All sequences are taken to be of the mean length."""
        moved = self.weight_bytes_read(load.tokens)
        if load.decodes:
            mean = load.decode_context / load.decodes
            moved += self.cache_bytes_read(load.decodes, load.decodes, mean)
        if load.prefill_tokens:  # one chunk: its tokens share what they attend to
            context = load.prefill_context
            moved += self.cache_bytes_read(1, load.prefill_tokens, context)
        return moved

    def operations(self, load: Load) -> float:
        """Multiplications and additions of the matrices and of attention, without the indexer's."""
        parameters = self.parameters
        inner = parameters.active - parameters.output
        matrices = 2 * (inner * load.tokens + parameters.output * load.decodes)
        pairs = sum(tokens * self.attended(context) for tokens, context in _means(load))
        return matrices / self.parallel.tensor + 2.0 * self.head_width * self.heads * pairs

    def index_operations(self, load: Load) -> float:
        """Of the indexer: every token with every key before it."""
        layers = self.layers
        pairs = sum(tokens * self.keys(context) for tokens, context in _means(load))
        return 2.0 * layers.count("csa") * self.index_heads * layers.index_dim * pairs

    def key_rows(self, load: Load) -> float:
        """Indexer keys of one sequence, all layers."""
        longest = max((context for _, context in _means(load)), default=0.0)
        return self.layers.count("csa") * self.keys(longest)

    def _window(self, context: float) -> float:
        return len(self.layers.kinds) * min(context, self.layers.window_tokens)


def sparse_model(
    model: PlannedModel,
    weights: WeightFormat,
    parallel: Parallel,
    entry_bytes: float,
    key_bytes: float,
    window_bytes: float | None = None,
    even: bool = False,
) -> SparseModel:
    """One card's share of a model.

    Args:
        model: with layers that are compressed.
        weights, parallel: how it is stored and shared out.
        entry_bytes, key_bytes, window_bytes, even: as ``SparseModel`` has them; a token in a window
            is like an entry where nothing else is said.
    """
    layers = model.geometry.compressed
    assert layers is not None, "the model's attention is sparse"
    # what V3.2's RoPE turns is in its keys only
    keys_only = layers.rotary_dim if isinstance(layers, LatentLayers) else 0
    return SparseModel(
        layers=layers,
        parameters=model.parameters,
        weights=weights,
        parallel=parallel,
        heads=model.geometry.num_heads // parallel.tensor,
        index_heads=need_count(model.config, "index_n_heads"),
        head_width=2 * layers.head_dim - keys_only,
        window_bytes=entry_bytes if window_bytes is None else window_bytes,
        entry_bytes=entry_bytes,
        key_bytes=key_bytes,
        even=even,
    )


def _means(load: Load) -> list[tuple[int, float]]:
    """Tokens of a step and the tokens that each attends to on the average: decodes, prompts."""
    kinds = (
        (load.decodes, load.decode_context),
        (load.prefill_tokens, load.prefill_pairs),
    )
    return [(tokens, pairs / tokens) for tokens, pairs in kinds if tokens]


def matrix_rate(hardware: Hardware, weights: WeightFormat) -> float:
    """Operations a second at the published peak."""
    assert hardware.cube_flops, "has_rates() comes first"
    return hardware.cube_flops * (2 if weights.eight_bits else 1)


def sparse_step_time(
    model: SparseModel, load: Load, hardware: Hardware, costs: SparseCosts
) -> StepTime:
    """The time of one step.

    Args:
        model, load: one card's share.
        hardware: with a published bandwidth and matrix rate.
        costs: the parameters.
    """
    assert hardware.hbm_bytes_per_second, "has_rates() comes first"
    rate = matrix_rate(hardware, model.weights)
    parts = {
        "memory": costs.memory_factor * model.moved_bytes(load) / hardware.hbm_bytes_per_second,
        "cube": costs.cube_factor * model.operations(load) / rate,
        "index": max(costs.key_seconds * model.key_rows(load), model.index_operations(load) / rate),
    }
    parts = {name: costs.stack * seconds for name, seconds in parts.items()}
    return StepTime(sum(parts.values()), parts, max(parts, key=parts.__getitem__))


def sparse_clock(model: SparseModel, hardware: Hardware, costs: SparseCosts) -> Clock:
    """``sparse_step_time`` of one model on one card."""
    return lambda load: sparse_step_time(model, load, hardware, costs)
