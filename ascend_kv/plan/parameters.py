"""How many weights a model has, and where: what has to lie on each card, and be read each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_kv.geometry import ModelGeometry
from ascend_kv.model_config import count_or_zero, need_count
from ascend_kv.plan.deepseek_parameters import deepseek_attention, deepseek_kept
from ascend_kv.plan.weight_formats import WeightFormat


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights by what happens to them.

    Attributes:
        embedding: the table of token embeddings; a step reads a row for each token.
        output: the matrix that makes logits. It is the embedding itself where they are tied: then
            ``tied`` is true, and a step reads it all although it is stored once.
        attention: projections of all layers.
        dense: feed-forward matrices of all layers that every token goes through, shared experts
            and routers included.
        experts: routed experts of all layers together.
        num_experts, experts_per_token: routed experts of a layer, and how many a token takes.
        tied: whether the output is the embedding.
        norms: vectors and biases.
        half: of ``attention`` and ``dense``, what stays in 16 bit in every published format of 8
            bits and less: DeepSeek's routers, compressors and the weights of its indexer's heads.
        half_with_int8: what stays there besides where the format is of integers.
    """

    embedding: int
    output: int
    attention: int
    dense: int
    experts: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    norms: int = 0
    half: int = 0
    half_with_int8: int = 0

    @property
    def total(self) -> int:
        """Stored weights."""
        output = 0 if self.tied else self.output
        return self.embedding + output + self.attention + self.dense + self.experts + self.norms

    @property
    def active(self) -> float:
        """Weights that one token is multiplied with: 2 floating-point operations each."""
        return self.output + self.attention + self.dense + self._expert_share(1) * self.experts

    def _expert_share(self, tokens: float) -> float:
        """Share of the experts that ``tokens`` tokens reach, if they choose evenly."""
        if not self.num_experts:
            return 0.0
        return float(1 - (1 - self.experts_per_token / self.num_experts) ** tokens)

    def reached_experts(self, tokens: float) -> float:
        """Routed weights that a step of so many tokens reads, in all layers."""
        return self._expert_share(tokens) * self.experts

    def linear_bytes(self, weights: WeightFormat) -> float:
        """Bytes of the linear layers of all layers, without routed experts."""
        kept = 0
        if weights.linear_bytes < 2:
            kept = self.half + (self.half_with_int8 if weights.integers else 0)
        return (self.attention + self.dense - kept) * weights.linear_bytes + kept * 2


def count_parameters(config: Mapping[str, Any], geometry: ModelGeometry) -> Parameters:
    """The weights of a model, counted from its configuration.

    Llama, Mistral, Qwen2, Qwen3, Gemma 3 and mixtures of experts of them: four projections in
    attention; a gate, an up and a down matrix in each feed-forward part. Qwen2 has biases on
    query, key and value projections, Qwen3 two norms of head_dim a layer. For DeepSeek's attention
    see ``deepseek_attention``.

    Args:
        config: a Hugging Face ``config.json``.
        geometry: from the same config.

    Raises:
        UnsupportedModelError: names a field that is missing.
    """
    layers, hidden = geometry.num_layers, geometry.hidden_size
    embedding = geometry.vocab_size * hidden
    kept = [0, 0]
    if geometry.model_type.startswith("deepseek"):
        attention = deepseek_attention(config)
        kept = deepseek_kept(config)
    else:
        attention = _grouped_attention(geometry)
    norms = (2 * layers + 1) * hidden
    if geometry.model_type == "qwen2":
        norms += layers * geometry.head_dim * (geometry.num_heads + 2 * geometry.num_kv_heads)
    if geometry.model_type.startswith("qwen3"):
        norms += layers * 2 * geometry.head_dim
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((need_count(config, name) for name in names if config.get(name)), 0)
    dense_layers = count_or_zero(config, "first_k_dense_replace") if experts else layers
    dense = 0
    if dense_layers:
        dense = dense_layers * 3 * hidden * need_count(config, "intermediate_size")
    routed, per_token = 0, 0
    if experts:
        name = "moe_intermediate_size" if config.get("moe_intermediate_size") else ""
        one = 3 * hidden * need_count(config, name or "intermediate_size")
        sparse = layers - dense_layers
        routed, per_token = sparse * experts * one, need_count(config, "num_experts_per_tok")
        dense += sparse * (hidden * experts + count_or_zero(config, "n_shared_experts") * one)
    return Parameters(
        embedding=embedding,
        output=embedding,
        attention=attention,
        dense=dense,
        experts=routed,
        num_experts=experts,
        experts_per_token=per_token,
        tied=bool(config.get("tie_word_embeddings", False)),
        norms=norms,
        half=kept[0],
        half_with_int8=kept[1],
    )


def _grouped_attention(geometry: ModelGeometry) -> int:
    heads = 2 * geometry.num_heads + 2 * geometry.num_kv_heads
    return geometry.num_layers * geometry.hidden_size * geometry.head_dim * heads
