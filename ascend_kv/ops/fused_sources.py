"""Where an argument of the fused attention comes from: our tensors, and what is done to them.

A plan holds these instead of tensors. ``tensor`` makes one from the tensors of a call, which go
by the names of ``paged_attention``'s arguments. None of them looks at a value on the host, so
none waits for the device. Letters as in ``fused_request``; b sequences of a part, Q the most
queries of one, W columns of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ascend_kv.ops.fused_request import Layout, Part, Request

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
Spans = tuple[tuple[int, int], ...]

# The side of the mask that the device wants with sparse modes 2 to 4, whatever the lengths.
TRIANGLE = 2048


class Source(Protocol):
    """One argument, to be made."""

    def tensor(self, have: Tensors) -> Tensor: ...


@dataclass(frozen=True)
class Named:
    """A tensor as it is, contiguous."""

    name: str

    def tensor(self, have: Tensors) -> Tensor:
        return have[self.name].contiguous()


@dataclass(frozen=True)
class Rows:
    """A cache ``[K, S, N, D]`` with its heads side by side: ``[K, S, N * D]``."""

    name: str

    def tensor(self, have: Tensors) -> Tensor:
        return have[self.name].contiguous().flatten(2)


@dataclass(frozen=True)
class Packed:
    """The queries of some sequences, zeros behind the shorter ones.

    ``[b, Q, H, D]``, or ``[b, H, Q, D]`` with the heads first.
    """

    name: str
    spans: Spans
    heads_first: bool

    def tensor(self, have: Tensors) -> Tensor:
        packed = pack(have[self.name], self.spans)
        return (packed.transpose(1, 2) if self.heads_first else packed).contiguous()


@dataclass(frozen=True)
class Table:
    """The block table of some sequences, from the first block each reads: int32 ``[b, W]``.

    What follows a sequence's blocks may be anything in ours; here every entry names a block.
    """

    rows: tuple[int, ...]
    first_blocks: tuple[int, ...]
    width: int
    num_blocks: int

    def tensor(self, have: Tensors) -> Tensor:
        table = take_rows(have["block_tables"], self.rows)
        if any(self.first_blocks):
            firsts = on_device(self.first_blocks, table.device)
            columns = firsts[:, None] + torch.arange(self.width, device=table.device)
            table = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        return table[:, : self.width].clamp(0, self.num_blocks - 1).to(torch.int32)


@dataclass(frozen=True)
class StaticScale:
    """A static scale of one side in a shape the device takes; its offset is 0, always."""

    side: str
    expanded: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: bool = False

    def tensor(self, have: Tensors) -> Tensor:
        scale = have[f"{self.side}_scale"].expand(self.expanded).reshape(self.shape)
        scale = scale.to(self.dtype).contiguous()
        return torch.zeros_like(scale) if self.offset else scale


@dataclass(frozen=True)
class PagedScale:
    """A token's scales of one side as they lie: ``[K, N, S]``, or ``[K, S]`` if heads share."""

    side: str
    shared: bool

    def tensor(self, have: Tensors) -> Tensor:
        scale = have[f"{self.side}_scale"]
        return (scale[:, 0] if self.shared else scale).contiguous()


@dataclass(frozen=True)
class GatheredScale:
    """A token's scales (or offsets) of one side, gathered by the table.

    ``[b, N, W * S]`` where ``heads`` is N; ``[1, b, W * S]`` or, for the NZ layout,
    ``[b, W * S]`` where it is None.
    """

    side: str
    table: Table
    heads: int | None
    leading: bool
    offset: bool = False

    def tensor(self, have: Tensors) -> Tensor:
        scale = have[f"{self.side}_scale"]
        blocks = self.table.tensor(have)
        zero_point = have.get(f"{self.side}_zero_point")
        value = self._gather(scale, blocks)
        if zero_point is None:
            value = torch.zeros_like(value) if self.offset else value
        else:  # a constant row has the scale 0, the codes 0 and its value as the zero point
            value = torch.where(value == 0, 1.0, value)
            value = self._gather(zero_point, blocks) / value if self.offset else value
        return value[None] if self.leading else value

    def _gather(self, parameter: Tensor, blocks: Tensor) -> Tensor:
        taken = parameter.index_select(0, blocks.flatten()).unflatten(0, blocks.shape)
        if self.heads is None:
            return taken[:, :, 0].flatten(1).contiguous()
        taken = taken.expand(-1, -1, self.heads, -1)
        return taken.transpose(1, 2).flatten(2).contiguous()


@dataclass(frozen=True)
class WindowMask:
    """What a window hides of the first block kept: bool ``[b, 1, 1, tokens]``, True is hidden."""

    hidden: tuple[int, ...]
    tokens: int

    def tensor(self, have: Tensors) -> Tensor:
        device = have["query"].device
        hidden = on_device(self.hidden, device)
        return (torch.arange(self.tokens, device=device) < hidden[:, None])[:, None, None]


@dataclass(frozen=True)
class CausalMask:
    """The mask of sparse modes 3 and 4: bool ``[2048, 2048]``, True above the diagonal."""

    def tensor(self, have: Tensors) -> Tensor:
        side = (TRIANGLE, TRIANGLE)
        return torch.ones(side, dtype=torch.bool, device=have["query"].device).triu_(1)


@dataclass(frozen=True)
class Bias:
    """The score bias of some sequences, less each query's largest, in the query's type; 0 if none.

    ``[b, H, Q, tokens]`` beside what was taken off, float32 ``[b, H, Q, 1]``; that is -inf for a
    query whose keys the bias hides all. Hidden keys, by the bias or by the rules of visibility,
    get the lowest finite number: -inf makes the device return NaN (llama.cpp-omni, pull request
    89).
    """

    spans: Spans
    first_tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    causal: bool
    window: int

    def tensors(self, have: Tensors) -> tuple[Tensor, Tensor]:
        query = have["query"]
        if "score_bias" in have:
            packed = pack(have["score_bias"], self.spans).to(torch.float32).transpose(1, 2)
            packed = _shift(packed, self.first_tokens, self.tokens)
        else:  # all the heads: one for all is reported to come out wrong (vllm-ascend issue 15503)
            packed = query.new_zeros((1, query.shape[1], 1, 1), dtype=torch.float32)
        packed = torch.where(self._visible(query.device), packed, -math.inf)
        largest = packed.amax(-1, keepdim=True)
        packed = packed - torch.where(largest == -math.inf, 0.0, largest)
        lowest = torch.finfo(query.dtype).min
        return packed.clamp_(min=lowest).to(query.dtype).contiguous(), largest

    def _visible(self, device: torch.device) -> Tensor:
        """``[b, 1, Q, tokens]``."""
        most = max(count for _, count in self.spans)
        lengths = on_device(self.lengths, device)[:, None, None, None]
        counts = on_device([count for _, count in self.spans], device)
        keys = torch.arange(self.tokens, device=device)
        asked = lengths - counts[:, None, None, None] + torch.arange(most, device=device)[:, None]
        visible = keys < lengths
        if self.causal:
            visible = visible & (keys <= asked)
        if self.window:
            visible = visible & (asked - keys < self.window)
        return visible.expand(-1, -1, most, -1)


def _shift(packed: Tensor, firsts: Sequence[int], tokens: int) -> Tensor:
    """``[b, H, Q, P]`` from the first token each sequence keeps, ``tokens`` of them."""
    if len(set(firsts)) == 1:
        kept = packed[..., firsts[0] : firsts[0] + tokens]
        return pad(kept, (0, tokens - kept.shape[-1]))
    return torch.cat(
        [_shift(packed[i : i + 1], (first,), tokens) for i, first in enumerate(firsts)]
    )


def table_of(request: Request, part: Part) -> Table:
    """The block table of a part."""
    return Table(part.rows, part.first_blocks, part.width, request.num_blocks)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Host numbers on a device, which is not waited for."""
    made = torch.tensor(numbers)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a tensor; a view where they follow one another."""
    if tuple(rows) == tuple(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return x[on_device(rows, x.device)]


def pack(x: Tensor, spans: Spans) -> Tensor:
    """Spans of the rows ``[T, ...]`` side by side, ``[b, Q, ...]``, zeros behind the shorter."""
    first, count = spans[0]
    if spans == tuple((first + i * count, count) for i in range(len(spans))):
        return x[first : first + len(spans) * count].unflatten(0, (len(spans), count))
    return pad_sequence([x[start : start + n] for start, n in spans], batch_first=True)


def unpack(packed: Tensor, spans: Spans, into: Tensor) -> None:
    """The reverse of ``pack``: ``[b, Q, ...]`` into the rows ``[T, ...]``."""
    first, count = spans[0]
    if spans == tuple((first + i * count, count) for i in range(len(spans))):
        into[first : first + len(spans) * count] = packed.flatten(0, 1)
        return
    for row, (start, n) in zip(packed, spans, strict=True):
        into[start : start + n] = row[:n]


def logical(cache: Tensor, layout: Layout) -> Tensor:
    """A cache that lies as a layout has it as ``[K, N, S, D]``: a view for BNSD and BSND."""
    if layout == "BSND":
        return cache.transpose(1, 2)
    if layout == "NZ":
        return cache.transpose(2, 3).flatten(3)
    return cache
