"""The tensors of a paged KV cache.

Per layer: keys ``[K, N, S, D]``, values alike, in the format's storage type; for quantized
formats scales ``[K, N, S]`` (one a token and head) or ``[K, 1, S]`` (one a token) in float32,
and zero points of the same shape when the format is asymmetric.
K blocks, N KV heads, S tokens a block, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ascend_kv.geometry import FormatSpec, ModelGeometry


class LayerCache(NamedTuple):
    """The storage of one layer; what its format does not need is None."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    key_zero_point: torch.Tensor | None = None
    value_zero_point: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the layer."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    @property
    def scales(self) -> dict[str, Any]:
        """Scales and zero points as keyword arguments of the operators."""
        return {
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
            "key_zero_point": self.key_zero_point,
            "value_zero_point": self.value_zero_point,
        }


class PagedKVCache:
    """All layers' storage, allocated at once. Its contents are unspecified until written."""

    def __init__(
        self,
        geometry: ModelGeometry,
        formats: Sequence[FormatSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``num_blocks * geometry.block_bytes(formats, block_size)`` bytes.

        Args:
            geometry: layers, KV heads and head_dim.
            formats: one format per layer.
            num_blocks: K; every layer has as many.
            block_size: S, tokens a block.
            device: where the tensors live.
        """
        assert len(formats) == geometry.num_layers, "one format per layer"
        self.formats = tuple(formats)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(
            _allocate_layer(spec, geometry, num_blocks, block_size, torch.device(device))
            for spec in formats
        )

    @property
    def bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes really allocated for each layer, scales included."""
        return tuple(layer.nbytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes really allocated, scales included."""
        return sum(self.bytes_by_layer)


def _allocate_layer(
    spec: FormatSpec, geometry: ModelGeometry, blocks: int, size: int, device: torch.device
) -> LayerCache:
    storage = getattr(torch, spec.name)
    heads, dim = geometry.num_kv_heads, geometry.head_dim

    def data() -> torch.Tensor:
        return torch.empty(blocks, heads, size, dim, dtype=storage, device=device)

    if not spec.quantized:
        return LayerCache(data(), data())
    scale_heads = 1 if spec.granularity == "token" else heads

    def scales() -> torch.Tensor:
        return torch.empty(blocks, scale_heads, size, dtype=torch.float32, device=device)

    if spec.symmetric:
        return LayerCache(data(), data(), scales(), scales())
    return LayerCache(data(), data(), scales(), scales(), scales(), scales())
