"""How one layer's keys and values are kept, and what that costs in bytes: exact arithmetic.

``format_names`` makes these of what users write; what the bytes hold is said in
``ascend_kv.formats``, one file a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ascend_kv.errors import UsageError

Granularity = Literal["layer", "head", "token", "token_head", "channel", "group"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
SCALE_TYPES = ("dynamic", "static")
BY_TOKEN = ("token", "token_head", "group")
"""Granularities whose scales lie beside every token"""
LEAST_BLOCK_SIZE = 64
"""Tokens of a block where its scales are by channel: 32 / 64 bits a number for them. At 16 tokens
they would be two bits."""
_OPEN_BYTES = 2  # a number of a block that is not full yet: 16 bits
_FIELD = "kv_cache_dtype"
# Below it a rotation mixes too few channels to spread anything.
_LEAST_ROTATED = 8


@dataclass(frozen=True)
class FormatSpec:
    """How keys or values, or both alike, of one layer are kept, and what that costs.

    Attributes:
        name: "float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2" or "int4".
        value_bits: bits of one stored number.
        granularity: which numbers share a scale; None for unquantized formats.
        symmetric: whether zero is always code 0; otherwise a zero point goes with each scale.
        scale_bits: bits of one scale, and of one zero point; 0 for unquantized formats.
        static: whether the scales are given beforehand; otherwise every token makes its own.
        group_size: channels that share a scale where the granularity is "group".
        hadamard: whether they are stored rotated (``formats.hadamard``); costs no bytes.
    """

    name: str
    value_bits: int
    granularity: str | None = None
    symmetric: bool = True
    scale_bits: int = 0
    static: bool = False
    group_size: int | None = None
    hadamard: bool = False

    def __str__(self) -> str:
        """A name that ``format_spec`` takes: "float16", "int8/group32/asymmetric"."""
        if not self.quantized:
            return self.name
        words = [self.name, f"{self.granularity}{self.group_size or ''}"]
        words += ["static"] * self.static + ["asymmetric"] * (not self.symmetric)
        return "/".join(words + ["hadamard"] * self.hadamard)

    @property
    def key(self) -> FormatSpec:
        """The keys' format."""
        return self

    @property
    def value(self) -> FormatSpec:
        """The values' format."""
        return self

    @property
    def quantized(self) -> bool:
        """Whether scales go with the values."""
        return self.granularity is not None

    @property
    def scales_by_token(self) -> bool:
        """Whether scales lie beside every token; those of layer, head and channel do not."""
        return self.granularity in BY_TOKEN

    @property
    def scales_by_block(self) -> bool:
        """Whether each channel has one scale for the tokens of a block: INT4 keys by channel."""
        return self.granularity == "channel" and self.name == "int4"

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
        """Bytes of one token's keys, or values, in one layer, over all kv heads.

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
        bits = kv_heads * head_dim * self.value_bits + parameters * self.scale_bits
        assert bits % 8 == 0, "check_head_dim comes first"
        return bits // 8

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys and values in one layer, scales and zero points included."""
        return _token_bytes(self, kv_heads, head_dim)

    def block_scale_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of the scales that the tokens of a block share; those of tokens are elsewhere."""
        if not self.scales_by_block:
            return 0
        return kv_heads * head_dim * (1 if self.symmetric else 2) * self.scale_bits // 8

    def block_bytes(self, kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block's keys and values in one layer, with all that lies beside them."""
        return _block_bytes(self, kv_heads, head_dim, block_size)

    def static_bytes(self, kv_heads: int, head_dim: int, positions: int) -> int:
        """Bytes of one layer's static scales and zero points, keys' and values' together."""
        return 2 * self.side_static_bytes(kv_heads, head_dim, positions)

    def side_static_bytes(self, kv_heads: int, head_dim: int, positions: int) -> int:
        """The same of the keys, or the values, alone."""
        if not self.static:
            return 0
        scales = math.prod(self.scale_shape(kv_heads, head_dim, positions))
        return (scales if self.symmetric else 2 * scales) * self.scale_bits // 8

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse what does not fit a head: its groups, two codes a byte, a rotation.

        Raises:
            UsageError: names what is legal.
        """
        if self.value_bits == 4 and head_dim % 2:
            hint = f"{self.name} keeps two channels in a byte, and this head_dim is odd."
            raise UsageError(_FIELD, self.name, "int8, fp8_e4m3 and others of 8 or 16 bits", hint)
        if self.hadamard and rotated_channels(head_dim) < _LEAST_ROTATED:
            hint = (
                f"Of head_dim {head_dim} a Hadamard rotation could mix "
                f"{rotated_channels(head_dim)} channels at a time, the largest power of two that "
                "divides it, and that spreads nothing."
            )
            raise UsageError(_FIELD, str(self), "the same without hadamard", hint)
        if self.group_size is None:
            return
        even = self.value_bits == 4
        sizes = [x for x in range(2, head_dim) if head_dim % x == 0 and not (even and x % 2)]
        if self.group_size not in sizes:
            hint = "Groups are smaller than a head: the whole head is granularity token_head."
            hint += f" Those of {self.name} are even." * even
            raise UsageError("group_size", self.group_size, sizes or "none in this model", hint)


@dataclass(frozen=True)
class MixedFormat:
    """Keys of one layer in one format, its values in another. As ``FormatSpec`` for both."""

    key: FormatSpec
    value: FormatSpec

    def __str__(self) -> str:
        """A name that ``layer_format`` takes: "k:int8/token_head+v:int4/token_head"."""
        return f"k:{self.key}+v:{self.value}"

    @property
    def quantized(self) -> bool:
        """Whether keys or values are."""
        return self.key.quantized or self.value.quantized

    @property
    def static(self) -> bool:
        """Whether keys or values have scales that are given beforehand."""
        return self.key.static or self.value.static

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's keys and values in one layer, scales and zero points included."""
        return _token_bytes(self, kv_heads, head_dim)

    def block_bytes(self, kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block's keys and values in one layer, with all that lies beside them."""
        return _block_bytes(self, kv_heads, head_dim, block_size)

    def static_bytes(self, kv_heads: int, head_dim: int, positions: int) -> int:
        """Bytes of one layer's static scales and zero points, keys' and values' together."""
        sides = (self.key, self.value)
        return sum(side.side_static_bytes(kv_heads, head_dim, positions) for side in sides)

    def check_head_dim(self, head_dim: int) -> None:
        """As ``FormatSpec.check_head_dim``, for both."""
        self.key.check_head_dim(head_dim)
        self.value.check_head_dim(head_dim)


LayerFormat = FormatSpec | MixedFormat
"""How one layer is kept."""


def _token_bytes(layer: LayerFormat, kv_heads: int, head_dim: int) -> int:
    sides = (layer.key, layer.value)
    return sum(side.vectors_bytes(kv_heads, head_dim) for side in sides)


def _block_bytes(layer: LayerFormat, kv_heads: int, head_dim: int, block_size: int) -> int:
    sides = (layer.key, layer.value)
    shared = sum(side.block_scale_bytes(kv_heads, head_dim) for side in sides)
    return block_size * layer.token_bytes(kv_heads, head_dim) + shared


def residual_bytes(layer: LayerFormat, kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes of one sequence's partly filled block in one layer, kept in 16 bits beside the blocks.

    Scales by block are made when its last token arrives; 0 for all other formats.
    """
    if not layer.key.scales_by_block:
        return 0
    return 2 * kv_heads * head_dim * block_size * _OPEN_BYTES


def rotated_channels(head_dim: int) -> int:
    """How many channels a Hadamard rotation mixes: the largest power of two in ``head_dim``."""
    return head_dim & -head_dim
