"""The tensors of a paged KV cache.

Per layer: keys ``[K, N, S, D]`` in their format's storage type (INT4: uint8 ``[K, N, S, D / 2]``),
values alike in theirs. A quantized format has scales in float32 (INT4: float16), and zero points of
the same shape where it is asymmetric::

    token_head [K, N, S]    token [K, 1, S]    group [K, N, S, D / g]    beside every token
    layer [1, 1, 1, 1]      head [1, N, 1, 1]  channel [1, N, 1, D]      static, once
    channel [K, N, 1, D]    of INT4 keys                                 beside every block

Static scales of token and token_head are a table by position beside these, from which a token
takes its scale when it is stored. Where the format says so, keys or values are stored rotated
(``formats.hadamard``). Scales beside every block come with an open block of every sequence:
``cache.residual``. K blocks, N KV heads, S tokens a block, D head_dim, g channels
a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ascend_kv import ops
from ascend_kv.cache.huge_pages import prefer_huge_pages
from ascend_kv.cache.residual import ResidualLayer, residual_dtype
from ascend_kv.cache.static_layer import ClippedShare, StaticScales
from ascend_kv.formats import format_named
from ascend_kv.formats.hadamard import rotate, rotate_back
from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry

Tensor = torch.Tensor


class LayerCache(NamedTuple):
    """The storage of one layer; what its format does not need is None."""

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_zero_point: Tensor | None = None
    value_zero_point: Tensor | None = None
    static: StaticScales | None = None
    rotated_keys: bool = False
    rotated_values: bool = False

    @property
    def block_tensors(self) -> tuple[Tensor, ...]:
        """What belongs to blocks and moves with them, ``[K, ...]`` each."""
        scales = (
            scale
            for name, scale in self.scales.items()
            if scale is not None and (self.static is None or self.static.by_position(name))
        )
        return self.key, self.value, *scales

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        """What belongs to the slots of sequences, which only ``ResidualLayer`` has."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the layer."""
        blocks = sum(tensor.nbytes for tensor in self.block_tensors)
        return blocks + (0 if self.static is None else self.static.nbytes)

    @property
    def scales(self) -> dict[str, Any]:
        """Scales and zero points as keyword arguments of the operators."""
        return {
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
            "key_zero_point": self.key_zero_point,
            "value_zero_point": self.value_zero_point,
        }

    def store(self, key: Tensor, value: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Store T tokens.

        Args:
            key: ``[T, N, D]``. value: alike.
            slots: ``[T]`` int64, where each goes, ``block * S + offset``; none is skipped.
            positions: ``[T]`` int64, of each token in its own sequence.

        Raises:
            UsageError: as ``kv_cache_store``.
        """
        if self.static is not None:
            self.static.count(key, value, positions)
            self._place_scales(self.static, slots, positions)
        if self.rotated_keys:
            key = rotate(key)
        if self.rotated_values:
            value = rotate(value)
        dynamic = self.static is None
        ops.kv_cache_store(key, value, self.key, self.value, slots, **self.scales, dynamic=dynamic)

    def attend(
        self,
        query: Tensor,
        block_tables: Tensor,
        query_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        softmax_scale: float,
        **options: Any,
    ) -> Tensor:
        """``paged_attention`` to what is stored here: ``[T, H, D]`` in the query's type.

        Args:
            query: ``[T, H, D]``, as the model makes them.
            block_tables, query_lengths, kv_lengths, softmax_scale, options: the operator's.

        Raises:
            UsageError: as the operator.
        """
        asked = query
        if self.rotated_keys:
            asked = rotate_back(query)
            if "key_offset" in options:
                options["offset_query"] = query
        output, _ = ops.paged_attention(
            asked,
            self.key,
            self.value,
            block_tables,
            query_lengths,
            kv_lengths,
            softmax_scale,
            **self.scales,
            **options,
        )
        if self.rotated_values:
            output = rotate_back(output)
        return output.to(query.dtype)

    def _place_scales(self, static: StaticScales, slots: Tensor, positions: Tensor) -> None:
        block_size = self.key.shape[2]
        for name, paged in self.scales.items():
            if paged is not None and static.by_position(name):
                given = static.at(name, positions)
                assert given is not None, "load_static_scales gives all that a format has"
                paged[slots // block_size, :, slots % block_size] = given.squeeze(2)


class PagedKVCache:
    """All layers' storage, allocated at once. Its contents are unspecified until written."""

    def __init__(
        self,
        geometry: ModelGeometry,
        formats: Sequence[LayerFormat],
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        static_scales: Sequence[Mapping[str, Tensor]] | None = None,
        max_num_seqs: int = 0,
        model_dtype: str = "float16",
    ) -> None:
        """Allocate ``num_blocks * geometry.block_bytes(formats, block_size)`` bytes.

        Args:
            geometry: layers, KV heads and head_dim.
            formats: one format per layer.
            num_blocks: K; every layer has as many.
            block_size: S, tokens a block.
            device: where the tensors live.
            static_scales: from ``load_static_scales``, where a format has static scales; their
                ``geometry.static_bytes`` come on top.
            max_num_seqs: sequences at once, each of which has ``geometry.residual_bytes`` on top.
            model_dtype: the type the model runs in, which decides that of open blocks.
        """
        assert len(formats) == geometry.num_layers, "one format per layer"
        assert static_scales is not None or not any(spec.static for spec in formats)
        self.formats = tuple(formats)
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, geometry.num_kv_heads, block_size, geometry.head_dim)
        layers: list[LayerCache | ResidualLayer] = []
        for spec, given in zip(formats, static_scales or [{}] * len(formats), strict=True):
            layer = _allocate_layer(spec, shape, torch.device(device), given)
            if spec.key.scales_by_block:
                assert max_num_seqs, "every sequence needs a slot"
                kept = residual_dtype(model_dtype)
                layers.append(ResidualLayer(spec, layer, max_num_seqs, kept, geometry.head_dim))
            else:
                layers.append(layer)
        self.layers = tuple(layers)

    @property
    def bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes really allocated for each layer, scales included."""
        return tuple(layer.nbytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes really allocated, scales included."""
        return sum(self.bytes_by_layer)

    def clipped_shares(self) -> dict[int, ClippedShare]:
        """By layer that has static scales: how much of what it has stored lay beyond them."""
        return {
            number: layer.static.clipped_share
            for number, layer in enumerate(self.layers)
            if layer.static is not None
        }


def _allocate_layer(
    layer: LayerFormat,
    shape: tuple[int, int, int, int],
    device: torch.device,
    given: Mapping[str, Tensor],
) -> LayerCache:
    """``shape`` is [K, N, S, D]; ``given`` are the static scales and zero points, if any."""
    static = StaticScales(layer, given, device) if layer.static else None
    tensors: dict[str, Tensor] = {}
    for side, spec in (("key", layer.key), ("value", layer.value)):
        tensors |= _allocate_side(side, spec, shape, device)
    if static is not None:
        tensors = static.tensors | tensors
    return LayerCache(
        **tensors,
        static=static,
        rotated_keys=layer.key.hadamard,
        rotated_values=layer.value.hadamard,
    )


def _allocate_side(
    side: str, spec: FormatSpec, shape: tuple[int, int, int, int], device: torch.device
) -> dict[str, Tensor]:
    """Keys or values, with the scales and zero points that lie beside them."""
    kind = format_named(spec.name)
    blocks, heads, size, dim = shape
    stored = (blocks, heads, size, dim // kind.codes_per_element)
    empty = torch.empty(stored, dtype=kind.dtype, device=device)
    tensors = {side: prefer_huge_pages(empty)}
    if not spec.quantized or not (spec.scales_by_token or spec.scales_by_block):
        return tensors
    scales = [blocks, 1 if spec.granularity == "token" else heads, size]
    if spec.scales_by_block:
        scales = [blocks, heads, 1, dim]
    if spec.group_size is not None:
        scales.append(dim // spec.group_size)
    for name in ("scale",) if spec.symmetric else ("scale", "zero_point"):
        beside = torch.empty(scales, dtype=kind.scale_dtype, device=device)
        tensors[f"{side}_{name}"] = prefer_huge_pages(beside)
    return tensors
