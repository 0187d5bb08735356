"""From a model's configuration to layers, heads and bytes of KV cache: exact integer arithmetic.

The letters used for shapes everywhere in this package:

    T packed tokens of a step    B sequences       H query heads    N key/value heads
    D head_dim                   G = H / N         S block_size     K blocks
    L layers                     M blocks in a row of a block table

Memory: a key and a value of D numbers are kept for every one of the N key/value heads of every
layer, so a token costs ``2 * L * N * D * bytes`` (Ainslie et al., "GQA: Training Generalized
Multi-Query Transformer Models from Multi-Head Checkpoints", 2023), plus the scales of a quantized
format. With query heads in place of key/value heads the answer is G times too large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_kv.architectures import COMPRESSED_MODEL_TYPES, check_servable, layer_windows
from ascend_kv.cache_formats import (
    GRANULARITIES,
    SCALE_TYPES,
    FormatSpec,
    LayerFormat,
    MixedFormat,
    residual_bytes,
)
from ascend_kv.compressed_layers import CompressedLayers, layers_from_config
from ascend_kv.errors import UnsupportedModelError
from ascend_kv.format_names import FORMAT_NAMES, FORMATS, format_spec, layer_format
from ascend_kv.model_config import MOST_LAYERS, need_count

__all__ = [
    "FORMATS",
    "FORMAT_NAMES",
    "GRANULARITIES",
    "SCALE_TYPES",
    "FormatSpec",
    "LayerFormat",
    "MixedFormat",
    "ModelGeometry",
    "format_spec",
    "geometry_from_config",
    "layer_format",
]


@dataclass(frozen=True)
class ModelGeometry:
    """What of a decoder-only model decides the size of its KV cache.

    Attributes:
        model_type: Hugging Face's name of the architecture.
        num_layers: L. num_heads: H. num_kv_heads: N. head_dim: D.
        hidden_size: width of the residual stream; H * D need not equal it.
        vocab_size: rows of the token embedding.
        max_position_tokens: the longest sequence the model was made for.
        dtype: the type its weights are kept in, "float32", "float16" or "bfloat16".
        layer_windows: for each layer the number of latest tokens a query sees, itself included,
            or None where it sees all.
        compressed: what the layers keep where they keep entries of many tokens (DeepSeek-V4);
            bytes come from there then, and this class has none.

    Raises:
        UnsupportedModelError: query heads that do not share key/value heads evenly, or windows
            that are not one a layer.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_tokens: int
    dtype: str
    layer_windows: tuple[int | None, ...]
    compressed: CompressedLayers | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                "num_key_value_heads",
                self.num_kv_heads,
                f"a divisor of num_attention_heads = {self.num_heads}",
            )
        if len(self.layer_windows) != self.num_layers:
            raise UnsupportedModelError(
                "layer_types",
                f"{len(self.layer_windows)} layers",
                f"one for each of num_hidden_layers = {self.num_layers}",
            )

    @property
    def group_size(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def token_bytes(self, formats: Sequence[LayerFormat]) -> int:
        """Bytes of one token in all layers; ``formats`` has one entry for each layer.

        Raises:
            UnsupportedModelError: compressed layers, whose bytes are no multiple of tokens.
        """
        if self.compressed is not None:
            hint = "Its layers are compressed: recipes/deepseek_v4.md has their bytes."
            raise UnsupportedModelError(
                "model_type", self.model_type, "a model that keeps every token", hint
            )
        assert len(formats) == self.num_layers, "one format for each layer"
        return sum(spec.token_bytes(self.num_kv_heads, self.head_dim) for spec in formats)

    def block_bytes(self, formats: Sequence[LayerFormat], block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens in all layers, as they are allocated."""
        self.token_bytes(formats)  # refuses compressed layers
        heads, dim = self.num_kv_heads, self.head_dim
        return sum(spec.block_bytes(heads, dim, block_size) for spec in formats)

    def residual_bytes(self, formats: Sequence[LayerFormat], block_size: int) -> int:
        """Bytes of one sequence's partly filled block, where a format keeps it apart; else 0."""
        heads, dim = self.num_kv_heads, self.head_dim
        return sum(residual_bytes(spec, heads, dim, block_size) for spec in formats)

    def static_bytes(self, formats: Sequence[LayerFormat], max_model_len: int) -> int:
        """Bytes of the static scales of all layers, for sequences of up to ``max_model_len``."""
        return sum(
            spec.static_bytes(self.num_kv_heads, self.head_dim, max_model_len) for spec in formats
        )

    def cache_bytes(
        self,
        formats: Sequence[LayerFormat],
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 0,
    ) -> int:
        """Bytes of a whole cache: blocks, once the static scales, and each sequence's residual."""
        residual = self.residual_bytes(formats, block_size)
        assert max_num_seqs or not residual, "the residual of how many sequences?"
        blocks = num_blocks * self.block_bytes(formats, block_size)
        return blocks + self.static_bytes(formats, max_model_len) + max_num_seqs * residual

    def ungrouped_token_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of one token if every query head kept a key and a value of its own.

        This is what "2 * layers * hidden * bytes" counts; it is ``group_size`` times too much.
        """
        return 2 * self.num_layers * self.num_heads * self.head_dim * element_bytes


def geometry_from_config(config: Mapping[str, Any]) -> ModelGeometry:
    """The geometry that a Hugging Face ``config.json`` describes.

    Nothing is guessed: num_key_value_heads must be there even where every query head has its own.
    head_dim may be absent, then it is hidden_size / num_attention_heads. A config without
    ``dtype`` (formerly ``torch_dtype``) counts as float32.

    Raises:
        UnsupportedModelError: names the field that is missing or at odds, or the model_type.
    """
    check_servable(config)
    hidden_size = need_count(config, "hidden_size")
    num_heads = need_count(config, "num_attention_heads")
    if config.get("head_dim") is not None:
        head_dim = need_count(config, "head_dim")
    elif hidden_size % num_heads:
        raise UnsupportedModelError(
            "hidden_size",
            hidden_size,
            f"a multiple of num_attention_heads = {num_heads} where head_dim is not given",
        )
    else:
        head_dim = hidden_size // num_heads
    num_layers = need_count(config, "num_hidden_layers", MOST_LAYERS)
    return ModelGeometry(
        model_type=config["model_type"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=need_count(config, "num_key_value_heads"),
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=need_count(config, "vocab_size"),
        max_position_tokens=need_count(config, "max_position_embeddings"),
        dtype=_dtype(config),
        layer_windows=layer_windows(config, num_layers),
        compressed=layers_from_config(config)
        if config["model_type"] in COMPRESSED_MODEL_TYPES
        else None,
    )


def _dtype(config: Mapping[str, Any]) -> str:
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in FORMATS:
        raise UnsupportedModelError("dtype", given, FORMATS)
    return name
