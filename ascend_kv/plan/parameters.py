"""How many weights a model has, and where: what has to lie on each card, and be read each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import ModelGeometry


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


class WeightFormat(NamedTuple):
    """How weights are stored.

    Attributes:
        name: as ``--weights`` takes it.
        linear_bytes: of a weight in a linear layer, scales included.
        other_bytes: of one in embedding, output and norms.
        int8_compute: whether activations are 8 bit too, so that matrices multiply at INT8's rate.
        source: of the layout.
    """

    name: str
    linear_bytes: float
    other_bytes: float
    int8_compute: bool
    source: str


_PLAIN = "the type's width"
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat("float32", 4, 4, False, _PLAIN),
    "float16": WeightFormat("float16", 2, 2, False, _PLAIN),
    "bfloat16": WeightFormat("bfloat16", 2, 2, False, _PLAIN),
    "w8a8": WeightFormat(
        "w8a8", 1, 2, True,
        "INT8 linear layers with a scale for each output channel, which is below 0.2 %; embedding "
        "and output in 16 bit, as in cann-recipes-infer models/qwen",
    ),
    "w4a16": WeightFormat(
        "w4a16", 0.5 + 2 / 128, 2, False,
        "INT4 linear layers, a 16-bit scale for each group of 128 weights",
    ),
}  # fmt: skip


def weight_format(name: str, model_dtype: str) -> WeightFormat:
    """The format of that name; "auto" is the model's own type.

    Raises:
        UsageError: an unknown name.
    """
    chosen = model_dtype if name == "auto" else name
    if chosen not in WEIGHT_FORMATS:
        raise UsageError("--weights", name, ("auto", *WEIGHT_FORMATS))
    return WEIGHT_FORMATS[chosen]


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
    deepseek = geometry.model_type.startswith("deepseek")
    attention = deepseek_attention(config) if deepseek else _grouped_attention(geometry)
    norms = (2 * layers + 1) * hidden
    if geometry.model_type == "qwen2":
        norms += layers * geometry.head_dim * (geometry.num_heads + 2 * geometry.num_kv_heads)
    if geometry.model_type.startswith("qwen3"):
        norms += layers * 2 * geometry.head_dim
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    dense_layers = int(config.get("first_k_dense_replace") or 0) if experts else layers
    dense = 0
    if dense_layers:
        dense = dense_layers * 3 * hidden * _need(config, "intermediate_size")
    routed, per_token = 0, 0
    if experts:
        name = "moe_intermediate_size" if config.get("moe_intermediate_size") else ""
        one = 3 * hidden * _need(config, name or "intermediate_size")
        sparse = layers - dense_layers
        routed, per_token = sparse * experts * one, _need(config, "num_experts_per_tok")
        dense += sparse * (hidden * experts + int(config.get("n_shared_experts") or 0) * one)
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
    )


def _grouped_attention(geometry: ModelGeometry) -> int:
    heads = 2 * geometry.num_heads + 2 * geometry.num_kv_heads
    return geometry.num_layers * geometry.hidden_size * geometry.head_dim * heads


def deepseek_attention(config: Mapping[str, Any]) -> int:
    """Weights of DeepSeek's attention in all layers: low-rank query, latent, indexer, output.

    V3.2: multi-head latent attention. V4: one key that is the value too, a gate and, where four
    tokens are compressed into one, both twice; a grouped output projection. Widths as in
    ``transformers``' ``deepseek_v32`` and ``deepseek_v4``.
    """
    hidden, rank = _need(config, "hidden_size"), _need(config, "q_lora_rank")
    heads, layers = _need(config, "num_attention_heads"), _need(config, "num_hidden_layers")
    index_dim = _need(config, "index_head_dim")
    indexer = _need(config, "index_n_heads") * (rank * index_dim + hidden) + hidden * index_dim
    if config["model_type"] != "deepseek_v4":
        latent, rope = _need(config, "kv_lora_rank"), _need(config, "qk_rope_head_dim")
        nope, value = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
        query = rank * (hidden + heads * (nope + rope))
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return layers * (query + keys + heads * value * hidden + indexer)
    dim, out_rank = _need(config, "head_dim"), _need(config, "o_lora_rank")
    query = rank * (hidden + heads * dim)
    output = out_rank * (heads * dim + _need(config, "o_groups") * hidden)
    every = query + output + hidden * dim
    kinds = list(config["layer_types"])
    sparse = kinds.count("compressed_sparse_attention")
    heavy = kinds.count("heavily_compressed_attention")
    compressor = 2 * hidden * dim  # key and gate
    index_compressor = 2 * 2 * hidden * index_dim - hidden * index_dim  # in place of its one key
    return (
        layers * every + heavy * compressor + sparse * (2 * compressor + indexer + index_compressor)
    )


def _need(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(field, value, "a whole number of at least 1 in the config")
    return value
