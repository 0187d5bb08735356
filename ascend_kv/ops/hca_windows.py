"""What the reference of ``hca_compress`` does with windows: finding, gathering, turning them.

``hca_compress`` states the formula; W is a number of windows of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Windows(NamedTuple):
    """Where some windows are, int64 ``[W]`` each."""

    rows: Tensor  # of kv: the window's first token
    first: Tensor  # bool: the sequence's first window in this call
    numbers: Tensor  # of the window, counted from the sequence's beginning
    sequences: Tensor


class Source(NamedTuple):
    """Values or gates ``[T, C]``, and what belongs to them."""

    tokens: Tensor
    previous: Tensor | None  # [B, ratio, D]
    bias: Tensor | None  # [ratio, C]
    absent: float  # stands in for what window 0 has no predecessor to give


def place_windows(
    lengths: Sequence[int],
    ratio: int,
    first_windows: Sequence[int] | None,
    device: torch.device,
) -> Windows:
    """All full windows of the sequences."""
    counts = [length // ratio for length in lengths]
    firsts = first_windows or [0] * len(lengths)
    table = [counts, list(firsts), _starts(lengths), _starts(counts)]
    each, numbers, rows, entries = torch.tensor(table, dtype=torch.int64, device=device)
    total = sum(counts)  # known here, so that a device need not be asked
    owners = torch.arange(len(lengths), device=device)
    sequences = torch.repeat_interleave(owners, each, output_size=total)
    inside = torch.arange(total, device=device) - entries[sequences]
    return Windows(
        rows[sequences] + ratio * inside, inside == 0, numbers[sequences] + inside, sequences
    )


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][: len(counts)]


def gather_slots(source: Source, windows: Windows, ratio: int, overlap: bool) -> Tensor:
    """What the windows mix, float32: ``[W, ratio, D]``, with overlap ``[W, 2 * ratio, D]``."""
    x, bias = source.tokens, source.bias
    count = len(windows.rows)
    rows = windows.rows[:, None] + torch.arange(ratio, device=x.device)
    halves, dim = (2, x.shape[1] // 2) if overlap else (1, x.shape[1])
    slots = x.new_empty((count, halves * ratio, dim), dtype=torch.float32)

    own = slots[:, -ratio:]
    own.copy_(_take(x[:, -dim:], rows))
    if bias is not None:
        own += bias[:, -dim:]
    if overlap:
        before = slots[:, :ratio]
        before.copy_(_take(x[:, :dim], (rows - ratio).clamp_(min=0)))
        if source.previous is not None:
            theirs = source.previous.index_select(0, windows.sequences).to(torch.float32)
            before.copy_(torch.where(windows.first[:, None, None], theirs, before))
        if bias is not None:
            before += bias[:, :dim]
        before.masked_fill_((windows.numbers == 0)[:, None, None], source.absent)
    return slots


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.view(-1)).view(*rows.shape, -1)


def turn(rows: Tensor, table: Tensor) -> None:
    """Turn the pairs of ``[W, rotary_dim]`` in place by the angles ``[W, rotary_dim / 2, 2]``."""
    cosine, sine = table.to(torch.float32).unbind(-1)
    first, second = rows.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), -1)
    rows.copy_(turned.flatten(-2))
