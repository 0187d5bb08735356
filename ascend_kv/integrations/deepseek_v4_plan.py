"""What a step does in each cache group, as host lists made into tensors once for all layers.

Letters: T packed tokens of B sequences, W of the window, r tokens of an entry, P tokens of the
state (``CompressedLayers.state_tokens``), S entries of a block. A sequence has the tokens of
positions ``start`` to ``stop`` - 1 in this step, and lives in one slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ascend_kv.compressed_layers import CompressedLayers
from ascend_kv.engine.batch import Batch

Tensor = torch.Tensor


class Span(NamedTuple):
    """One sequence's part of a step."""

    number: int
    first_row: int  # of the packed tokens
    start: int
    stop: int
    slot: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def row(self, position: int) -> int:
        """The packed token at ``position``."""
        return self.first_row + position - self.start


class WindowPlan(NamedTuple):
    """The ring, and attention to it.

    A token alone attends to the ring itself. Several of one sequence would overwrite what the
    first of them still see, so they attend to pages of this step: old rows of the ring, then
    their own keys, each position p at row p % W of its page.
    """

    written_rows: Tensor  # of the packed tokens, the latest W of each sequence
    written_places: Tensor  # of the ring, slot * W + position % W
    num_decodes: int  # leading sequences with one token
    decode_tables: Tensor  # [decodes, 1] slots
    decode_lengths: list[int]
    page_count: int
    page_tables: Tensor  # [prefills, M]
    page_lengths: list[int]  # rows of the pages up to the last key
    first_pages: list[int]  # position // W of the first page
    query_lengths: list[int]  # of the prefills
    old_places: Tensor  # of the ring
    old_targets: Tensor  # of the pages
    new_targets: Tensor  # of the pages, for the packed tokens after the decodes


class CompressPlan(NamedTuple):
    """Windows of tokens that fill in this step; the same for entries and indexer keys."""

    kept_places: Tensor  # of the state: tokens of earlier steps
    order: Tensor  # of (kept, then packed) tokens: those of the windows, sequence by sequence
    lengths: list[int]  # of the sequences that fill a window
    first_windows: list[int]
    previous_places: Tensor  # [sequences, r] of the state: the window before
    entry_slots: Tensor  # where the entries go
    written_rows: Tensor  # of the packed tokens, the latest P of each sequence
    written_places: Tensor  # of the state, slot * P + position % P


class EntriesPlan(NamedTuple):
    """Attention to entries. Query t sees entry j where j < (t + 1) // r."""

    tables: Tensor  # [B, M] int32
    lengths: list[int]  # entries of each sequence
    last_seen: Tensor  # [T] int32, number of the last entry a query sees, -1 for none
    counts: list[int]  # of entries that each query sees


def spans_of(batch: Batch) -> list[Span]:
    """The sequences of a batch."""
    spans, row = [], 0
    for number, (queries, stop) in enumerate(zip(batch.query_lengths, batch.kv_lengths)):
        (slot,) = batch.block_tables[number]
        spans.append(Span(number, row, stop - queries, stop, slot))
        row += queries
    return spans


def plan_window(spans: Sequence[Span], window: int, device: torch.device) -> WindowPlan:
    """Of ``window`` = W tokens."""
    decodes = [span for span in spans if span.length == 1]
    prefills = spans[len(decodes) :]
    assert all(span.length > 1 for span in prefills), "decodes come first"
    rows, places = _latest(spans, window)
    old_places: list[int] = []
    old_targets: list[int] = []
    new_targets: list[int] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    firsts: list[int] = []
    pages = 0
    for span in prefills:
        old = range(max(0, span.start - window + 1), span.start)
        firsts.append(old.start // window)
        shift = (pages - firsts[-1]) * window  # from a position to its row
        old_places += [span.slot * window + position % window for position in old]
        old_targets += (position + shift for position in old)
        new_targets += range(span.start + shift, span.stop + shift)
        lengths.append(span.stop - firsts[-1] * window)
        taken = -(-lengths[-1] // window)
        tables.append(list(range(pages, pages + taken)))
        pages += taken
    return WindowPlan(
        written_rows=_index(rows, device),
        written_places=_index(places, device),
        num_decodes=len(decodes),
        decode_tables=pad_rows([[span.slot] for span in decodes], device),
        decode_lengths=[min(span.stop, window) for span in decodes],
        page_count=pages,
        page_tables=pad_rows(tables, device),
        page_lengths=lengths,
        first_pages=firsts,
        query_lengths=[span.length for span in prefills],
        old_places=_index(old_places, device),
        old_targets=_index(old_targets, device),
        new_targets=_index(new_targets, device),
    )


def plan_compression(
    spans: Sequence[Span], batch: Batch, group: str, layers: CompressedLayers, block_size: int,
    device: torch.device,
) -> CompressPlan:  # fmt: skip
    """The windows of ``group`` that fill, and the state that stays."""
    ratio, kept_tokens = layers.ratio(group), layers.state_tokens(group)
    closing = [span for span in spans if span.stop // ratio > span.start // ratio]

    def places(span: Span, positions: Iterable[int]) -> list[int]:
        return [span.slot * kept_tokens + position % kept_tokens for position in positions]

    kept = [places(span, range(span.start // ratio * ratio, span.start)) for span in closing]
    kept_count = sum(map(len, kept))
    order: list[int] = []
    previous: list[list[int]] = []
    slots: list[int] = []
    done = 0
    for span, held in zip(closing, kept, strict=True):
        first, last = span.start // ratio, span.stop // ratio
        order += range(done, done + len(held))
        order += (kept_count + span.row(p) for p in range(span.start, last * ratio))
        done += len(held)
        before = range(first * ratio - ratio, first * ratio) if first else [0] * ratio
        previous.append(places(span, before))
        table = batch.group_tables[span.number][group]
        slots += (table[e // block_size] * block_size + e % block_size for e in range(first, last))
    rows, written = _latest(spans, kept_tokens)
    return CompressPlan(
        kept_places=_index([place for held in kept for place in held], device),
        order=_index(order, device),
        lengths=[span.stop // ratio * ratio - span.start // ratio * ratio for span in closing],
        first_windows=[span.start // ratio for span in closing],
        previous_places=torch.tensor(previous, dtype=torch.int64, device=device),
        entry_slots=_index(slots, device),
        written_rows=_index(rows, device),
        written_places=_index(written, device),
    )


def plan_entries(
    spans: Sequence[Span], batch: Batch, group: str, ratio: int, block_size: int,
    device: torch.device,
) -> EntriesPlan:  # fmt: skip
    """Which entries of ``group`` the queries see, and where they lie."""
    lengths = [span.stop // ratio for span in spans]
    used = [
        tables[group][: -(-length // block_size)]
        for tables, length in zip(batch.group_tables, lengths, strict=True)
    ]
    counts = [(p + 1) // ratio for span in spans for p in range(span.start, span.stop)]
    last_seen = torch.tensor(counts, dtype=torch.int32, device=device) - 1
    return EntriesPlan(pad_rows(used, device), lengths, last_seen, counts)


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Block tables as ``[B, M]`` int32, padded with -1."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), width)


def _latest(spans: Sequence[Span], kept: int) -> tuple[list[int], list[int]]:
    """The latest ``kept`` tokens of each sequence: packed rows, and places in its ring."""
    pairs = list(_latest_pairs(spans, kept))
    return [row for row, _ in pairs], [place for _, place in pairs]


def _latest_pairs(spans: Sequence[Span], kept: int) -> Iterator[tuple[int, int]]:
    for span in spans:
        for position in range(max(span.start, span.stop - kept), span.stop):
            yield span.row(position), span.slot * kept + position % kept


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
