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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ascend_kv.architectures import COMPRESSED_MODEL_TYPES, check_servable, layer_windows
from ascend_kv.compressed_layers import CompressedLayers, layers_from_config
from ascend_kv.errors import UnsupportedModelError, UsageError

Granularity = Literal["layer", "head", "token", "token_head", "channel", "group"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
SCALE_TYPES = ("dynamic", "static")


@dataclass(frozen=True)
class FormatSpec:
    """How one layer's keys and values are kept, and what that costs.

    Attributes:
        name: "float32", "float16", "bfloat16" or "int8".
        value_bits: bits of one stored number.
        granularity: which numbers share a scale; None for unquantized formats.
        symmetric: whether zero is always code 0; otherwise a zero point goes with each scale.
        scale_bits: bits of one scale, and of one zero point; 0 for unquantized formats.
        static: whether the scales are given beforehand; otherwise every token makes its own.
        group_size: channels that share a scale where the granularity is "group".
    """

    name: str
    value_bits: int
    granularity: str | None = None
    symmetric: bool = True
    scale_bits: int = 0
    static: bool = False
    group_size: int | None = None

    def __str__(self) -> str:
        """Such as "float16", "int8/token_head" or "int8/group32/asymmetric"."""
        if not self.quantized:
            return self.name
        words = [self.name, f"{self.granularity}{self.group_size or ''}"]
        words += ["static"] * self.static + ["asymmetric"] * (not self.symmetric)
        return "/".join(words)

    @property
    def quantized(self) -> bool:
        """Whether scales go with the values."""
        return self.granularity is not None

    @property
    def scales_by_token(self) -> bool:
        """Whether scales lie beside every token; those of layer, head and channel do not."""
        return self.granularity in ("token", "token_head", "group")

    def scale_shape(self, kv_heads: int, head_dim: int, positions: int) -> tuple[int, ...]:
        """``[1, N, P, D]`` with 1 for what shares a scale: one side's static scales.

        P positions, for a token's scale may differ with its position.
        """
        return {
            "layer": (1, 1, 1, 1),
            "head": (1, kv_heads, 1, 1),
            "channel": (1, kv_heads, 1, head_dim),
            "token": (1, 1, positions, 1),
            "token_head": (1, kv_heads, positions, 1),
        }[self.granularity or ""]

    def vectors_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys in one layer, over all kv heads; its values cost the same.

        token_head keeps a scale for each head, token one for all heads, group one for each
        ``group_size`` channels of each head. The scales of layer, head and channel belong to the
        layer, not to a token, and count nothing here. Asymmetric formats keep as many zero points
        as scales.
        """
        scales = 0
        if self.scales_by_token:
            scales = 1 if self.granularity == "token" else kv_heads
        if self.group_size is not None:
            assert head_dim % self.group_size == 0, "check_head_dim comes first"
            scales *= head_dim // self.group_size
        parameters = scales if self.symmetric else 2 * scales
        return (kv_heads * head_dim * self.value_bits + parameters * self.scale_bits) // 8

    def static_bytes(self, kv_heads: int, head_dim: int, positions: int) -> int:
        """Bytes of one layer's static scales and zero points, keys' and values' together."""
        if not self.static:
            return 0
        scales = math.prod(self.scale_shape(kv_heads, head_dim, positions))
        return 2 * (scales if self.symmetric else 2 * scales) * self.scale_bits // 8

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse groups that do not divide a head evenly.

        Raises:
            UsageError: names the legal sizes.
        """
        if self.group_size is None or (
            self.group_size < head_dim and head_dim % self.group_size == 0
        ):
            return
        legal = [size for size in range(2, head_dim) if head_dim % size == 0]
        hint = "Groups are smaller than a head: the whole head is granularity token_head."
        raise UsageError("group_size", self.group_size, legal or "none in this model", hint)

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys and values in one layer, scales and zero points included."""
        return 2 * self.vectors_bytes(kv_heads, head_dim)


FORMATS: Mapping[str, FormatSpec] = {
    "float32": FormatSpec("float32", 32),
    "float16": FormatSpec("float16", 16),
    "bfloat16": FormatSpec("bfloat16", 16),
}
"""The unquantized formats by name; ``format_spec`` makes the quantized ones."""

_SYNONYMS = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
FORMAT_NAMES = (*FORMATS, "int8", "int8_per_token_head", *_SYNONYMS)
"""Every name that ``format_spec`` takes."""


def format_spec(
    name: str,
    granularity: str = "token_head",
    symmetric: bool = True,
    scale_type: str = "dynamic",
    group_size: int | None = None,
) -> FormatSpec:
    """The format of that name; all but the name is of no account to unquantized formats.

    Args:
        name: "float32" ("fp32"), "float16" ("fp16", "half"), "bfloat16" ("bf16"), "int8" or
            "int8_per_token_head", vLLM's name for INT8 with ``granularity="token_head"``.
        granularity: which numbers share a scale.
        symmetric: no zero points.
        scale_type: "dynamic": from each token's own numbers; "static": given beforehand.
        group_size: channels that share a scale, with granularity "group" only.

    Raises:
        UsageError: an unknown name, granularity or scale type, or a group_size that is missing,
            not wanted or below 2.
    """
    if granularity not in GRANULARITIES:
        raise UsageError("granularity", granularity, GRANULARITIES)
    if scale_type not in SCALE_TYPES:
        raise UsageError("scale_type", scale_type, SCALE_TYPES)
    name = _SYNONYMS.get(name, name)
    if name in FORMATS:
        return FORMATS[name]
    if name == "int8_per_token_head" and granularity != "token_head":
        raise UsageError("granularity", granularity, f"token_head with {name}")
    if name not in ("int8", "int8_per_token_head"):
        raise UsageError("kv_cache_dtype", name, FORMAT_NAMES)
    if granularity == "group":
        if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 2:
            raise UsageError("group_size", group_size, "a divisor of head_dim of at least 2")
        if scale_type == "static":
            hint = "Static scales of groups are scales of channels that repeat."
            raise UsageError("scale_type", scale_type, "dynamic with granularity group", hint)
    elif group_size is not None:
        raise UsageError("group_size", group_size, f"none with granularity {granularity}")
    return FormatSpec("int8", 8, granularity, symmetric, 32, scale_type == "static", group_size)


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

    def token_bytes(self, formats: Sequence[FormatSpec]) -> int:
        """Bytes of one token in all layers; ``formats`` has one entry for each layer.

        Raises:
            UnsupportedModelError: compressed layers, whose bytes are no multiple of tokens.
        """
        if self.compressed is not None:
            hint = "ModelGeometry.compressed has the bytes of such layers."
            raise UnsupportedModelError(
                "model_type", self.model_type, "a model that keeps every token", hint
            )
        assert len(formats) == self.num_layers, "one format for each layer"
        return sum(spec.token_bytes(self.num_kv_heads, self.head_dim) for spec in formats)

    def block_bytes(self, formats: Sequence[FormatSpec], block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens in all layers, as they are allocated."""
        return block_size * self.token_bytes(formats)

    def static_bytes(self, formats: Sequence[FormatSpec], max_model_len: int) -> int:
        """Bytes of the static scales of all layers, for sequences of up to ``max_model_len``."""
        return sum(
            spec.static_bytes(self.num_kv_heads, self.head_dim, max_model_len) for spec in formats
        )

    def cache_bytes(
        self, formats: Sequence[FormatSpec], num_blocks: int, block_size: int, max_model_len: int
    ) -> int:
        """Bytes of a whole cache: its blocks, and once the static scales."""
        blocks = num_blocks * self.block_bytes(formats, block_size)
        return blocks + self.static_bytes(formats, max_model_len)

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
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    elif hidden_size % num_heads:
        raise UnsupportedModelError(
            "hidden_size",
            hidden_size,
            f"a multiple of num_attention_heads = {num_heads} where head_dim is not given",
        )
    else:
        head_dim = hidden_size // num_heads
    num_layers = _count(config, "num_hidden_layers")
    return ModelGeometry(
        model_type=config["model_type"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads"),
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=_count(config, "vocab_size"),
        max_position_tokens=_count(config, "max_position_embeddings"),
        dtype=_dtype(config),
        layer_windows=layer_windows(config, num_layers),
        compressed=layers_from_config(config)
        if config["model_type"] in COMPRESSED_MODEL_TYPES
        else None,
    )


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if value is None:
        hint = "Write num_attention_heads if every query head has a KV head of its own."
        raise UnsupportedModelError(
            field, "missing", "in the config", hint if field == "num_key_value_heads" else ""
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(field, value, "a whole number of at least 1")
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in FORMATS:
        raise UnsupportedModelError("dtype", given, FORMATS)
    return name
