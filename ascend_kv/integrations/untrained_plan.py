"""What a step does with tokens and entries of layers that compress: host lists made into tensors.

Block tables have a gap (``cache.untrained_tables``), so a token that is the p-th of its sequence is
the p'-th of those held: p' = p in the blocks of the sinks, p' = p - gap after them. All tables,
lengths and lists here count held tokens. A query is *early* where its sequence is still below
``csa_from`` at it: it attends to everything, as without compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ascend_kv.cache.untrained_tables import slots_of
from ascend_kv.engine.batch import Batch
from ascend_kv.untrained_compression import CSA_RATIO, FINE_IN_COARSE, Compression

Tensor = torch.Tensor


class Span(NamedTuple):
    """One sequence's part of a step: tokens ``start`` to ``stop`` - 1."""

    number: int  # in the batch
    first_row: int  # of the packed tokens
    start: int
    stop: int

    def late_start(self, policy: Compression) -> int:
        """The first token whose query is not early; at most ``stop``."""
        return min(max(self.start, policy.csa_from - 1), self.stop)


class TokensPlan(NamedTuple):
    """Where the tokens of a group go, and what of them the queries see."""

    slots: Tensor  # [T] of all tokens
    early_tables: Tensor  # [A, M] of sequences that have early queries
    early_lengths: list[int]  # A, such queries
    early_kv_lengths: list[int]
    late_tables: Tensor  # [C, M] of sequences that have others
    late_lengths: list[int]
    late_kv_lengths: list[int]
    listed: Tensor  # [late queries, E] int32: tokens out of the window that they see, or -1


class NewEntries(NamedTuple):
    """Entries to be made of units (tokens, or finer entries) that lie in pages."""

    sources: Tensor  # [units] slots
    positions: Tensor  # [units] at which the units' keys are turned
    lengths: list[int]  # units of each sequence
    targets: Tensor  # [entries] slots
    target_positions: Tensor


class EntriesPlan(NamedTuple):
    """Entries of a group, made in this step and seen by late queries."""

    new: NewEntries
    tables: Tensor  # [C, M]
    lengths: list[int]  # C, entries held
    first: list[int]  # of each late query, the first entry held that it sees
    end: list[int]  # of each late query, the entry after the last that it sees


def spans_of(batch: Batch) -> list[Span]:
    """The sequences of a batch."""
    spans, row = [], 0
    for number, (queries, stop) in enumerate(zip(batch.query_lengths, batch.kv_lengths)):
        spans.append(Span(number, row, stop - queries, stop))
        row += queries
    return spans


def plan_tokens(
    policy: Compression, group: str, spans: Sequence[Span], batch: Batch, size: int,
    device: torch.device,
) -> TokensPlan:  # fmt: skip
    """Of "window" or "full", in blocks of ``size`` tokens."""
    slots: list[int] = []
    tables: tuple[list[list[int]], list[list[int]]] = ([], [])
    lengths: tuple[list[int], list[int]] = ([], [])
    cached: tuple[list[int], list[int]] = ([], [])
    listed: list[list[int]] = []
    for span in spans:
        table = batch.group_tables[span.number][group]
        slots += slots_of(policy, group, table, span.start, range(span.start, span.stop), size)
        gap = policy.dropped_blocks(group, span.start, size) * size
        late = span.late_start(policy)
        for side, low, high in ((0, span.start, late), (1, late, span.stop)):
            if low < high:
                tables[side].append(table[: -(-(high - gap) // size)])
                lengths[side].append(high - low)
                cached[side].append(high - gap)
        for position in range(late, span.stop):
            window = position + 1 - policy.window  # where it begins
            exact = window
            if group == "full":
                exact = policy.sinks + CSA_RATIO * policy.fine(position + 1)
            seen = [*range(min(policy.sinks, window))]
            seen += [p - gap for p in range(max(exact, policy.sinks), window)]
            listed.append(seen)
    return TokensPlan(
        slots=index(slots, device),
        early_tables=pad(tables[0], device),
        early_lengths=lengths[0],
        early_kv_lengths=cached[0],
        late_tables=pad(tables[1], device),
        late_lengths=lengths[1],
        late_kv_lengths=cached[1],
        listed=pad(listed, device),
    )


def plan_entries(
    group: str,
    policy: Compression,
    spans: Sequence[Span],
    batch: Batch,
    size: int,
    device: torch.device,
) -> EntriesPlan:
    """Of "csa", whose entries are made of tokens in "full", or "hca", made of entries of "csa"."""
    if group == "csa":
        source, count, ratio, tokens, begin = "full", policy.fine, CSA_RATIO, 1, policy.sinks
    else:
        source, count, ratio, tokens, begin = "csa", policy.coarse, FINE_IN_COARSE, CSA_RATIO, 0
    origin = policy.sinks - tokens * begin  # position of unit 0
    sources: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    targets: list[int] = []
    target_positions: list[int] = []
    tables: list[list[int]] = []
    held: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for span in spans:
        blocks = batch.group_tables[span.number]
        entries = range(count(span.start), count(span.stop))
        units = range(begin + ratio * entries.start, begin + ratio * entries.stop)
        sources += slots_of(policy, source, blocks[source], span.start, units, size)
        positions += (origin + tokens * unit for unit in units)
        lengths.append(len(units))
        targets += slots_of(policy, group, blocks[group], span.start, entries, size)
        target_positions += (policy.sinks + tokens * ratio * entry for entry in entries)
        late = span.late_start(policy)
        if late == span.stop:
            continue
        gap = policy.dropped_blocks(group, span.start, size) * size
        held.append(count(span.stop) - gap)
        tables.append(blocks[group][: -(-held[-1] // size)])
        for n in range(late + 1, span.stop + 1):
            low = FINE_IN_COARSE * policy.coarse(n) if group == "csa" else 0
            first.append(low - gap)
            last.append(count(n) - gap)
    made = index(sources, device), index(positions, device), lengths
    new = NewEntries(*made, index(targets, device), index(target_positions, device))
    return EntriesPlan(new, pad(tables, device), held, first, last)


def late_rows(policy: Compression, spans: Sequence[Span], device: torch.device) -> Tensor:
    """Packed rows of the queries that are not early."""
    rows: list[int] = []
    for span in spans:
        offset = span.first_row - span.start
        rows += range(span.late_start(policy) + offset, span.stop + offset)
    return index(rows, device)


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[rows, longest]`` int32, padded with -1."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), width)


def index(values: Sequence[int], device: torch.device) -> Tensor:
    """``[n]`` int64."""
    return torch.tensor(values, dtype=torch.int64, device=device)
