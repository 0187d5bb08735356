"""Layers whose keys have scales by channel of a block, beside each sequence's open block.

Such scales need all tokens of a block, so the block that is not full yet, the *open* one, is kept
unquantized beside the blocks, keys and values alike, in a slot that a sequence holds from its first
token to its last::

    residual    [B, N, S, D]    16 bits; position p of its sequence at p % S
    blocks      [K, N, S, D / 2] codes, [K, N, 1, D] key scales and zero points, values as ever

When a block's last token arrives, whether alone or in a chunk that fills several blocks, its codes
are made from the 16-bit values, once; they never change. What the query at position p reads follows
from p alone, however its prompt was cut into chunks and whether it was computed again::

    positions below p - p % S    the full blocks, as they are quantized
    p - p % S to p               its own block, in 16 bits, even where it is full by now

The two attentions are joined by their log-sum-exp (``merge_attention``).

16 bits are the model's own type where that has 16. A model in float32 keeps float16: its 11
significant bits are 8 times finer than bfloat16's, and INT4's scales, halves themselves, have no
larger range. B slots, letters else: geometry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ascend_kv import ops
from ascend_kv.cache_formats import FormatSpec, LayerFormat
from ascend_kv.formats.hadamard import rotate, rotate_back

if TYPE_CHECKING:
    from ascend_kv.cache.paged import LayerCache

Tensor = torch.Tensor
Lacking = Callable[[Tensor, float, int, Tensor | None], dict[str, Any]]
"""Queries [T, H, D], scale of scores, length, the position [T] of the first key that each reads, 0
where None: keyword arguments by which ``paged_attention`` adds what scores lack."""

# That may be a score bias; of one call, in float32 elements: 64 MiB.
BIAS_ELEMENTS = 1 << 24


def residual_dtype(model_dtype: str) -> torch.dtype:
    """The 16-bit type of open blocks in a model of that type; see the module."""
    return torch.bfloat16 if model_dtype == "bfloat16" else torch.float16


class Piece(NamedTuple):
    """Consecutive tokens of one sequence in one block."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Pieces:
    """Some packed tokens of a step, cut by sequence and block; P pieces of T tokens.

    Attributes:
        rows: of the step's packed tokens.
        in_place: one token a sequence: its open block is read where it lies.
        pieces: in the order of the tokens.
        tables: ``[P, M]`` blocks of each piece's sequence.
        slots: ``[P]``. blocks: ``[P]``, where codes go.
        piece, positions: ``[T]``, of each token.
    """

    rows: slice
    in_place: bool
    block_size: int
    pieces: list[Piece]
    tables: Tensor
    slots: Tensor
    blocks: Tensor
    piece: Tensor
    positions: Tensor

    @property
    def offsets(self) -> Tensor:
        """``[T]``, of each token in its block."""
        return self.positions % self.block_size

    def before(self, piece: Piece) -> int:
        """Tokens in the full blocks before it."""
        return piece.start - piece.start % self.block_size

    def chosen(self, wanted: Callable[[Piece], bool]) -> Tensor | None:
        """Numbers of the pieces that are wanted; None: there are none."""
        numbers = [number for number, piece in enumerate(self.pieces) if wanted(piece)]
        return torch.tensor(numbers, device=self.tables.device) if numbers else None

    def cut(self, elements: int | None) -> Iterator[tuple[int, int]]:
        """Ranges of pieces whose tokens times longest sequence stay below ``elements``.

        One piece is never cut. None: all in one.
        """
        low = tokens = longest = 0
        for number, (_, start, stop) in enumerate(self.pieces):
            reach = max(longest, stop)
            if elements and number > low and (tokens + stop - start) * reach > elements:
                yield low, number
                low, tokens, reach = number, 0, stop
            tokens, longest = tokens + stop - start, reach
        yield low, len(self.pieces)


def cut_step(
    slots: Sequence[int],
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    block_size: int,
) -> list[Pieces]:
    """The tokens of one step: those of sequences that bring one, then those of the others.

    Args:
        slots: of each sequence.
        block_tables: ``[B, M]``.
        query_lengths, kv_lengths: as ``paged_attention``'s; lengths of 1 come first.
        block_size: S.
    """
    decodes = sum(1 for length in query_lengths if length == 1)
    assert all(length == 1 for length in query_lengths[:decodes]), "decodes come first"
    pieces: list[list[Piece]] = [[], []]
    for row, (queries, stop) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        start = stop - queries
        while start < stop:
            end = min(stop, start - start % block_size + block_size)
            pieces[row >= decodes].append(Piece(row, start, end))
            start = end
    device, found, first = block_tables.device, [], 0
    for in_place, some in zip((True, False), pieces, strict=True):
        if not some:
            continue
        rows = torch.tensor([piece.row for piece in some], device=device)
        counts = torch.tensor([piece.stop - piece.start for piece in some], device=device)
        tokens = sum(piece.stop - piece.start for piece in some)
        starts = torch.tensor([piece.start for piece in some], device=device)
        of_token = torch.repeat_interleave(counts, output_size=tokens)
        begins = (counts.cumsum(0) - counts)[of_token]
        tables = block_tables[rows]
        found.append(
            Pieces(
                rows=slice(first, first + tokens),
                in_place=in_place,
                block_size=block_size,
                pieces=some,
                tables=tables,
                slots=torch.tensor([slots[piece.row] for piece in some], device=device),
                blocks=tables.gather(1, (starts // block_size)[:, None])[:, 0].to(torch.int64),
                piece=of_token,
                positions=starts[of_token] + torch.arange(tokens, device=device) - begins,
            )
        )
        first += tokens
    return found


class ResidualLayer:
    """The storage of one layer: its full blocks, and an open block for each slot."""

    static = None

    def __init__(
        self, layer: LayerFormat, stored: LayerCache, slots: int, dtype: torch.dtype, head_dim: int
    ) -> None:
        """Allocate ``[slots, N, S, head_dim]`` of ``dtype`` twice beside ``stored``."""
        self.format = layer
        self.stored = stored
        shape = (slots, *stored.key.shape[1:3], head_dim)
        self.key = torch.empty(shape, dtype=dtype, device=stored.key.device)
        self.value = torch.empty_like(self.key)

    @property
    def block_tensors(self) -> tuple[Tensor, ...]:
        """What belongs to blocks and moves with them, ``[K, ...]`` each."""
        return self.stored.block_tensors

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        """What belongs to the slots of sequences, ``[B, ...]`` each."""
        return self.key, self.value

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the layer."""
        return self.stored.nbytes + self.key.nbytes + self.value.nbytes

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Sequence[Pieces],
        softmax_scale: float,
        window: int = 0,
        lacking: Lacking | None = None,
    ) -> Tensor:
        """Store a step's tokens and attend to what is stored then: ``[T, H, D]``, query's type.

        Args:
            query: ``[T, H, D]``. key: ``[T, N, D]``. value: alike.
            step: from ``cut_step``.
            softmax_scale, window: as ``paged_attention``'s.
            lacking: what the scores lack.
        """
        if self.format.value.hadamard:
            value = rotate(value)
        outputs = []
        for some in step:
            open_key, open_value, places = self._store(key[some.rows], value[some.rows], some)
            opened = open_key, open_value, places
            asked = query[some.rows].to(torch.float32)
            most = None if lacking is None else BIAS_ELEMENTS // query.shape[1]
            for low, high in some.cut(most):
                outputs.append(
                    self._attend(asked, some, low, high, opened, softmax_scale, window, lacking)
                )
        if not outputs:
            return torch.empty_like(query)
        output = torch.cat(outputs)
        if self.format.value.hadamard:
            output = rotate_back(output)
        return output.to(query.dtype)

    def _store(self, key: Tensor, value: Tensor, some: Pieces) -> tuple[Tensor, Tensor, Tensor]:
        """Open blocks ``[any, N, S, D]`` of keys and values, and which is each piece's ``[P]``."""
        size = some.block_size
        full = some.chosen(lambda piece: piece.stop % size == 0)
        if some.in_place:
            places, opened = some.slots, (self.key, self.value)
        else:
            places = torch.arange(len(some.pieces), device=key.device)
            shape = (len(places), *self.key.shape[1:])
            opened = self.key.new_empty(shape), self.value.new_empty(shape)
            begun = some.chosen(lambda piece: piece.start % size > 0)
            if begun is not None:
                for ours, kept in zip(opened, self.slot_tensors, strict=True):
                    ours[begun] = kept[some.slots[begun]]
        for ours, fresh in zip(opened, (key, value), strict=True):
            ours[places[some.piece], :, some.offsets] = fresh.to(ours.dtype)
        if full is not None:
            key, value = (ours[places[full]] for ours in opened)
            self._quantize(key, value, some.blocks[full])
        if not some.in_place:
            left = some.chosen(lambda piece: piece.stop % size > 0)
            if left is not None:
                for ours, kept in zip(opened, self.slot_tensors, strict=True):
                    kept[some.slots[left]] = ours[left]
        return *opened, places

    def _quantize(self, key: Tensor, value: Tensor, blocks: Tensor) -> None:
        """Write full blocks ``[n, N, S, D]`` as codes."""
        stored, spec = self.stored, self.format
        into = (stored.key, stored.key_scale, stored.key_zero_point)
        _write(key, spec.key, blocks, *into)
        into = (stored.value, stored.value_scale, stored.value_zero_point)
        _write(value, spec.value, blocks, *into)

    def _attend(
        self,
        query: Tensor,
        some: Pieces,
        low: int,
        high: int,
        opened: tuple[Tensor, Tensor, Tensor],
        softmax_scale: float,
        window: int,
        lacking: Lacking | None,
    ) -> Tensor:
        """Pieces ``low`` to ``high``; ``query`` is that of all pieces, float32."""
        pieces = some.pieces[low:high]
        counts = [piece.stop - piece.start for piece in pieces]
        first = sum(piece.stop - piece.start for piece in some.pieces[:low])
        rows = slice(first, first + sum(counts))
        query, positions, offsets = query[rows], some.positions[rows], some.offsets[rows]
        open_key, open_value, places = opened
        filled = [piece.stop - some.before(piece) for piece in pieces]
        more: dict[str, Any] = {}
        if lacking is not None:
            more = lacking(query, softmax_scale, max(filled), positions - offsets)
        output, sums = ops.paged_attention(
            query, open_key, open_value, places[low:high, None], counts, filled, softmax_scale,
            window=window, **more,
        )  # fmt: skip

        read = [number for number, piece in enumerate(pieces) if some.before(piece)]
        if not read:
            return output
        if len(read) == len(pieces):
            taken = torch.arange(len(query), device=query.device)
        else:
            kept = torch.tensor([bool(some.before(piece)) for piece in pieces], device=query.device)
            taken = kept[some.piece[rows] - low].nonzero()[:, 0]
        chosen = [low + number for number in read]
        before = [some.before(pieces[number]) for number in read]
        if lacking is not None:
            more = lacking(query[taken], softmax_scale, max(before), None)
        blocks_output, blocks_sums = ops.paged_attention(
            query[taken],
            self.stored.key,
            self.stored.value,
            some.tables[chosen],
            [counts[number] for number in read],
            before,
            softmax_scale,
            **self.stored.scales,
            causal=False,
            window=window,
            query_positions=positions[taken] if window else None,
            **more,
        )
        parts = [output[taken], blocks_output], [sums[taken], blocks_sums]
        output[taken] = ops.merge_attention(*parts)[0]
        return output


def _write(
    x: Tensor,
    spec: FormatSpec,
    blocks: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
) -> None:
    """Store full blocks ``[n, N, S, D]`` of one side."""
    if scale is None:
        cache[blocks] = x.to(cache.dtype)
        return
    assert spec.granularity is not None
    codes, scales, zeros = ops.kv_cache_quantize(
        x, spec.granularity, spec.symmetric, group_size=spec.group_size or 0, storage=spec.name
    )
    cache[blocks] = codes
    for target, made in ((scale, scales), (zero_point, zeros)):
        if target is not None:
            target[blocks] = made.view(len(blocks), *target.shape[1:])
