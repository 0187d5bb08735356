"""The tensors of a cache that compresses dense layers (``untrained_compression``).

Per layer, in pages of one kind, keys ``[K, N, S, D]`` and values alike, each group with its own K:
tokens ("window" or "full") and, in layers that compress, entries of 4 tokens ("csa") and of 128
("hca"). An entry is kept as a token is: one key, turned by RoPE at the entry's position, and one
value for each key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ascend_kv.cache.paged import LayerCache
from ascend_kv.cache.static_layer import ClippedShare
from ascend_kv.geometry import FormatSpec, ModelGeometry
from ascend_kv.untrained_compression import Compression


class UntrainedLayerCache(NamedTuple):
    """The storage of one layer."""

    group: str
    """Of its tokens, "window" or "full"."""
    tokens: LayerCache
    fine: LayerCache | None = None
    """Entries of "csa"."""
    coarse: LayerCache | None = None
    """Entries of "hca"."""

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of its tokens and entries."""
        parts = {self.group: self.tokens, "csa": self.fine, "hca": self.coarse}
        return {group: part.nbytes for group, part in parts.items() if part is not None}


class UntrainedKVCache:
    """All layers' storage, allocated at once. Its contents are unspecified until written."""

    def __init__(
        self,
        geometry: ModelGeometry,
        policy: Compression,
        spec: FormatSpec,
        blocks: Mapping[str, int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``blocks[group] * group_block_bytes(...)[group]`` bytes for each group.

        Args:
            geometry: of the model. policy: which layers compress.
            spec: the unquantized format of everything.
            blocks: by group. block_size: S.
            device: where the tensors live.
        """
        assert not spec.quantized, "entries are means of keys and values as they are"
        self.formats = (spec,) * geometry.num_layers
        self.blocks = dict(blocks)
        self.block_size = block_size
        dtype = getattr(torch, spec.name)
        heads, dim = geometry.num_kv_heads, geometry.head_dim

        def pages(group: str) -> LayerCache | None:
            if group not in blocks:
                return None
            shape = (blocks[group], heads, block_size, dim)
            key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            return LayerCache(key, value)

        def layer(number: int) -> UntrainedLayerCache:
            group = "window" if number < policy.window_layers else "full"
            tokens = pages(group)
            assert tokens is not None, "every layer keeps tokens"
            if group == "window":
                return UntrainedLayerCache(group, tokens)
            return UntrainedLayerCache(group, tokens, pages("csa"), pages("hca"))

        self.layers = tuple(layer(number) for number in range(geometry.num_layers))

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together."""
        return sum(self.blocks.values())

    def clipped_shares(self) -> dict[int, ClippedShare]:
        """Of layers with static scales, which there are not."""
        return {}

    @property
    def bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes really allocated for each layer."""
        return tuple(sum(layer.bytes_by_group.values()) for layer in self.layers)

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes really allocated for each group."""
        totals = dict.fromkeys(self.blocks, 0)
        for layer in self.layers:
            for group, count in layer.bytes_by_group.items():
                totals[group] += count
        return totals

    @property
    def allocated_bytes(self) -> int:
        """Bytes really allocated."""
        return sum(self.bytes_by_layer)


def group_block_bytes(
    geometry: ModelGeometry, policy: Compression, spec: FormatSpec, block_size: int
) -> dict[str, int]:
    """By group the bytes of one block in all layers that use it.

    Raises:
        UsageError: the model has no layer left to compress.
    """
    block = block_size * spec.token_bytes(geometry.num_kv_heads, geometry.head_dim)
    return {group: count * block for group, count in policy.groups(geometry.num_layers).items()}


def sequence_bytes(
    geometry: ModelGeometry, policy: Compression, spec: FormatSpec, tokens: int
) -> dict[str, int]:
    """By group the bytes that a sequence of ``tokens`` needs, whole blocks aside."""
    by_unit = group_block_bytes(geometry, policy, spec, 1)
    return {group: policy.held(group, tokens) * size for group, size in by_unit.items()}
