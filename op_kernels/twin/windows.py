"""``hca_compress`` and ``hca_decompress`` on the twin; see ``operators``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .host import DEFAULT, ELEMENTS, Limits, Run, launch_all, poisoned
from .launch import inp, out
from .tilings import CompressTiling, DecompressTiling, run_tiling

Tensor = torch.Tensor


def tile_compress(
    windows: int,
    sequences: int,
    dim: int,
    ratio: int,
    overlap: bool,
    bias: bool,
    norm: bool,
    rotary_dim: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    norm_eps: float = 1e-6,
    limits: Limits = DEFAULT,
) -> CompressTiling:
    """Of ``hca_compress``."""
    sizes = [windows, sequences, dim, ratio, overlap, bias, norm, rotary_dim]
    sizes += [ELEMENTS[dtype], ELEMENTS[out_dtype], round(norm_eps * 1e9)]
    return run_tiling("hca_compress", CompressTiling, sizes, limits.cores, limits.ub_bytes)


def hca_compress(
    kv: Tensor,
    gate: Tensor,
    lengths: Sequence[int],
    ratio: int,
    *,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    first_windows: Sequence[int] | None = None,
    previous_kv: Tensor | None = None,
    previous_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    rotary_table: Tensor | None = None,
    rotary_dim: int = 0,
    dtype: torch.dtype | None = None,
    limits: Limits = DEFAULT,
) -> tuple[Tensor, Run]:
    """One launch."""
    dim = kv.shape[1] // 2 if overlap else kv.shape[1]
    windows = sum(n // ratio for n in lengths)
    bias, norm = position_bias is not None, norm_weight is not None
    t = tile_compress(
        windows, len(lengths), dim, ratio, overlap, bias, norm, rotary_dim, kv.dtype,
        dtype or kv.dtype, norm_eps, limits,
    )  # fmt: skip
    entries = poisoned((windows, dim), dtype or kv.dtype)
    table = inp(_sequences(lengths, ratio, first_windows or [0] * len(lengths)))
    bias_in, kv_before, gate_before, weight, rotary = (
        None if x is None else inp(x.contiguous())
        for x in (position_bias, previous_kv, previous_gate, norm_weight, rotary_table)
    )
    inputs = inp(kv.contiguous()), inp(gate.contiguous()), table, bias_in, kv_before, gate_before
    work = out(poisoned((t.workspace_bytes // 4,), torch.float32)) if t.joint else None
    call = "hca_compress", t.cores, *inputs, weight, rotary, work, out(entries)
    calls = [call] if t.cores else []
    return entries, launch_all("hca_compress", t, calls, limits)


def hca_decompress(
    entries: Tensor, lengths: Sequence[int], ratio: int, *, limits: Limits = DEFAULT
) -> tuple[Tensor, Run]:
    """One launch."""
    count, dim = entries.shape
    sizes = [count, dim, ratio, entries.element_size()]
    t = run_tiling("hca_decompress", DecompressTiling, sizes, limits.cores, limits.ub_bytes)
    rows = poisoned((count * ratio, dim), entries.dtype)
    calls = [("hca_decompress", t.cores, inp(entries.contiguous()), out(rows))] if t.cores else []
    return rows, launch_all("hca_decompress", t, calls, limits)


def _sequences(lengths: Sequence[int], ratio: int, first_windows: Sequence[int]) -> Tensor:
    """The table of sequences: first token, first entry, number of the first window."""
    rows, token, entry = [], 0, 0
    for length, first in zip(lengths, first_windows):
        rows.append([token, entry, first, 0])
        token, entry = token + length, entry + length // ratio
    return torch.tensor(rows, dtype=torch.int32)
