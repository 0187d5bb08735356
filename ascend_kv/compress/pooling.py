"""Windows of one side's tokens to entries, level by level, with the same bits however many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ascend_kv import ops
from ascend_kv.compress.rotation import Rotation
from ascend_kv.compress.weights import LevelWeights, SideWeights

Tensor = torch.Tensor

_PIECE_ELEMENTS = 1 << 20
"""Numbers of a piece of work; bounds what a call needs beside its input and its result."""


class Tokens(NamedTuple):
    """Tokens of ``S`` sequences and, where the caller has them, the logits of their gates."""

    values: Tensor  # [S, T, D]
    gates: Tensor | None  # [S, T, C]

    def cut(self, start: int, stop: int | None = None) -> Tokens:
        """Tokens ``start`` to ``stop`` - 1."""
        gates = None if self.gates is None else self.gates[:, start:stop]
        return Tokens(self.values[:, start:stop], gates)

    def join(self, later: Tokens) -> Tokens:
        """These and then the later ones."""
        gates = None
        if self.gates is not None and later.gates is not None:
            gates = torch.cat((self.gates, later.gates), 1)
        return Tokens(torch.cat((self.values, later.values), 1), gates)

    @property
    def length(self) -> int:
        """T."""
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.values.nbytes + (0 if self.gates is None else self.gates.nbytes)


class Pooling(NamedTuple):
    """How one side is pooled.

    Attributes:
        ratios: of the levels; their product is the ratio of tokens to entries.
        weights: of this side.
        series: 1, or 2 where windows overlap: one for the next window, one for a window's own.
        two_vectors: the tokens bring a vector for each of the series.
        norm_eps: of the RMSNorm.
        rotation: of the entries; None for none.
    """

    ratios: tuple[int, ...]
    weights: SideWeights
    series: int
    two_vectors: bool
    norm_eps: float
    rotation: Rotation | None

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return math.prod(self.ratios)

    def entry_dim(self, channels: int) -> int:
        """Channels of an entry of tokens with ``channels``."""
        return channels // 2 if self.two_vectors else channels

    def pool(self, tokens: Tokens, first_window: int, previous: Tokens | None) -> Tensor:
        """Entries ``[S, windows, E]`` of full windows, in the tokens' type.

        Args:
            tokens: full windows.
            first_window: number of the first of them, counted from the sequence's beginning.
            previous: where windows overlap, the tokens of the window before; None for window 0.
        """
        sequences, count, channels = tokens.values.shape
        dim = self.entry_dim(channels)
        windows = count // self.ratio
        entries = tokens.values.new_empty((sequences, windows, dim))
        width = max(1, sequences * self.ratio * self.series * dim)
        step = max(1, _PIECE_ELEMENTS // width)
        for low in range(0, windows, step):
            high = min(low + step, windows)
            piece = tokens.cut(low * self.ratio, high * self.ratio)
            pooled = self._pool_piece(piece, previous)
            if self.rotation is not None:
                numbers = torch.arange(low, high, device=entries.device) + first_window
                self.rotation.turn(pooled, self.ratio * numbers)
            entries[:, low:high] = pooled
            if self.series == 2:
                previous = piece.cut(piece.length - self.ratio)
        return entries

    def _pool_piece(self, tokens: Tokens, previous: Tokens | None) -> Tensor:
        values, gates = tokens
        for number, (ratio, weights) in enumerate(zip(self.ratios, self.weights.levels)):
            last = number == len(self.ratios) - 1
            if gates is None:
                gates = self._gates(values, ratio, weights)
            values = self._pool_level(values, gates, ratio, weights, previous, last)
            gates = None
        return values

    def _gates(self, values: Tensor, ratio: int, weights: LevelWeights) -> Tensor:
        """Logits ``[S, T, C]``, computed window by window: a product's bits vary with its size."""
        sequences, count, channels = values.shape
        if weights.gate is None:
            width = channels if self.two_vectors else self.series * channels
            return values.new_zeros(()).expand(sequences, count, width)
        gate = weights.gate.to(values.device)
        rows = values.to(torch.float32).split(ratio, 1)
        return torch.cat([linear(row.contiguous(), gate) for row in rows], 1)

    def _pool_level(
        self,
        values: Tensor,
        gates: Tensor,
        ratio: int,
        weights: LevelWeights,
        previous: Tokens | None,
        last: bool,
    ) -> Tensor:
        """One level in float32, ``[S, T / ratio, E]``."""
        sequences, count, channels = values.shape
        dim = self.entry_dim(channels)
        dtype = torch.promote_types(values.dtype, gates.dtype)
        options: dict[str, Tensor | Sequence[int] | None] = {}
        if previous is not None:
            before = previous.gates
            if before is None:
                before = self._gates(previous.values, ratio, weights)
            options = {
                "previous_kv": previous.values[..., :dim].to(dtype),
                "previous_gate": before[..., :dim].to(dtype),
                "first_windows": [1] * sequences,  # any but window 0, which has no predecessor
            }
        device = values.device
        bias, norm = weights.position_bias, self.weights.norm if last else None
        entries = ops.hca_compress(
            self._slots(values, dtype),
            gates.reshape(sequences * count, -1).to(dtype),
            [count] * sequences,
            ratio,
            position_bias=None if bias is None else bias.to(device),
            overlap=self.series == 2,
            norm_weight=None if norm is None else norm.to(device),
            norm_eps=self.norm_eps,
            dtype=torch.float32,
            **options,  # type: ignore[arg-type]
        )
        return entries.view(sequences, count // ratio, dim)

    def _slots(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        rows = values.reshape(-1, values.shape[2]).to(dtype)
        return torch.cat((rows, rows), 1) if self.series == 2 and not self.two_vectors else rows
