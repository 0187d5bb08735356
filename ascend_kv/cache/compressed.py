"""The tensors of a KV cache whose layers keep entries of many tokens (``compressed_layers``).

Per layer, for B slots of sequences, K blocks of S entries, in the model's type where nothing else
is said::

    ring        [B, 1, W, D]   the latest W tokens; position p at p % W
    entries     [K, 1, S, D]   or INT8: codes [K, 1, S, D - R] int8, scales [K, 1, S] float32 and,
                               in the model's type, the R channels that RoPE turns [K, 1, S, R]
    index_keys  [K, 1, S, I]   or INT8: codes [K, 1, S, I] int8 and scales [K, 1, S] float32
    state       [B * P, 2, C]  float32, values and gates of the latest P tokens; position p of
    index_state                slot b at b * P + p % P. P: ``CompressedLayers.state_tokens``

A key is the value too, and there is one head. The scale of an INT8 vector is its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_kv.cache.static_layer import ClippedShare
from ascend_kv.compressed_layers import CompressedFormats, CompressedLayers, GroupBlocks
from ascend_kv.formats import INT8
from ascend_kv.formats.base import Encoded

Tensor = torch.Tensor


class PagedVectors(NamedTuple):
    """Vectors in pages, one a slot, ``block * S + offset``; those of an INT8 format in parts."""

    codes: Tensor
    scales: Tensor | None = None
    exact: Tensor | None = None

    @property
    def quantized(self) -> bool:
        """Whether ``codes`` are INT8."""
        return self.scales is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self if part is not None)

    def store(self, vectors: Tensor, slots: Tensor) -> None:
        """Write ``[n, D]`` at ``slots`` [n]."""
        if self.scales is None:
            _flat(self.codes)[slots] = vectors.to(self.codes.dtype)
            return
        width = self.codes.shape[3]
        encoded = INT8.encode(vectors[:, :width], (1,))
        assert encoded.scale is not None
        _flat(self.codes)[slots] = encoded.codes
        self.scales.view(-1)[slots] = encoded.scale[:, 0]
        if self.exact is not None:
            _flat(self.exact)[slots] = vectors[:, width:].to(self.exact.dtype)

    def read_codes(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes ``[n, D]`` at ``slots`` [n] as float32, and what they are times ``[n]``, if so.

        For scores, which the scales may multiply afterwards.
        """
        codes = _flat(self.codes).index_select(0, slots).to(torch.float32)
        if self.scales is None:
            return codes, None
        assert self.exact is None, "there is one scale for all of a vector"
        return codes, self.scales.view(-1).index_select(0, slots)

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The vectors at ``slots`` of any shape: ``[..., D]``."""
        rows = slots.flatten()
        codes = _flat(self.codes).index_select(0, rows)  # on a CPU far faster than codes[slots]
        if self.scales is None:
            return codes.to(dtype).view(*slots.shape, -1)
        scales = self.scales.view(-1).index_select(0, rows)[:, None]
        vectors = INT8.decode(Encoded(codes, scales), dtype)
        if self.exact is not None:
            exact = _flat(self.exact).index_select(0, rows).to(dtype)
            vectors = torch.cat((vectors, exact), 1)
        return vectors.view(*slots.shape, -1)


class CompressedLayerCache(NamedTuple):
    """The storage of one layer; what its kind does not need is None."""

    ring: Tensor
    entries: PagedVectors | None = None
    index_keys: PagedVectors | None = None
    state: Tensor | None = None
    index_state: Tensor | None = None

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of its window, its state and its entries; the caller knows its kind."""
        pages = sum(part.nbytes for part in (self.entries, self.index_keys) if part is not None)
        state = sum(part.nbytes for part in (self.state, self.index_state) if part is not None)
        return {"window": self.ring.nbytes, "entries": pages, "state": state}


class CompressedKVCache:
    """All layers' storage, allocated at once. Its contents are unspecified until written."""

    def __init__(
        self,
        layers: CompressedLayers,
        formats: CompressedFormats,
        blocks: GroupBlocks,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the bytes that ``layers.cache_bytes(blocks, formats)`` says."""
        self.kinds = layers.kinds
        self.formats = formats
        self.blocks = blocks
        self.layers = tuple(
            _allocate(kind, layers, formats, blocks, torch.device(device)) for kind in layers.kinds
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the two paged groups together."""
        return self.blocks.csa + self.blocks.hca

    def clipped_shares(self) -> dict[int, ClippedShare]:
        """Of layers with static scales, which there are not: INT8 entries have their own."""
        return {}

    @property
    def bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes really allocated for each layer."""
        return tuple(sum(layer.bytes_by_group.values()) for layer in self.layers)

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes really allocated for "window", "csa", "hca" and "state"."""
        totals = {"window": 0, "csa": 0, "hca": 0, "state": 0}
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            for group, count in layer.bytes_by_group.items():
                if count:
                    totals[kind if group == "entries" else group] += count
        return totals

    @property
    def allocated_bytes(self) -> int:
        """Bytes really allocated."""
        return sum(self.bytes_by_layer)


def _allocate(
    kind: str,
    layers: CompressedLayers,
    formats: CompressedFormats,
    blocks: GroupBlocks,
    device: torch.device,
) -> CompressedLayerCache:
    dtype = getattr(torch, formats.dtype)
    dim, size = layers.head_dim, blocks.block_size
    ring = torch.empty((blocks.slots, 1, layers.window_tokens, dim), dtype=dtype, device=device)
    if kind == "window":
        return CompressedLayerCache(ring)
    count = blocks.csa if kind == "csa" else blocks.hca
    slots = blocks.slots * layers.state_tokens(kind)

    def pages(int8: bool, width: int, exact: int) -> PagedVectors:
        shape = (count, 1, size)
        if not int8:
            return PagedVectors(torch.empty((*shape, width), dtype=dtype, device=device))
        return PagedVectors(
            torch.empty((*shape, width - exact), dtype=torch.int8, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((*shape, exact), dtype=dtype, device=device) if exact else None,
        )

    def state(channels: int) -> Tensor:
        return torch.empty((slots, 2, channels), dtype=torch.float32, device=device)

    entries = pages(formats.entries == "int8", dim, layers.rotary_dim)
    if kind == "hca":
        return CompressedLayerCache(ring, entries, state=state(dim))
    return CompressedLayerCache(
        ring,
        entries,
        index_keys=pages(formats.index_keys == "int8", layers.index_dim, 0),
        state=state(2 * dim),
        index_state=state(2 * layers.index_dim),
    )


def _flat(pages: Tensor) -> Tensor:
    """``[K, 1, S, D]`` as ``[K * S, D]``."""
    return pages.view(-1, pages.shape[3])
