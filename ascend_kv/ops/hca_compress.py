"""``hca_compress``: windows of tokens → one entry each, by a gated softmax for every channel.

Serves DeepSeek-V4's HCA (windows that do not overlap) and CSA (entry w mixes what window w - 1
left for its successor with window w's own). A pure function: the tokens that fill no window, and
with overlap the last window's part for its successor, are kept by the caller.

For window w of a sequence, its tokens j = 0 .. ratio - 1, and each channel c on its own::

    without overlap   s_j = gate[w, j] + bias[j]            x_j = kv[w, j]
    with overlap      s_j = gate[w-1, j, :D] + bias[j, :D]  x_j = kv[w-1, j, :D]   ratio slots,
                      s_j = gate[w, j, D:]   + bias[j, D:]  x_j = kv[w, j, D:]     ratio slots
    pooled  = sum_j exp(s_j) x_j / sum_j exp(s_j)           window 0 has no slots of w - 1
    normed  = norm_weight * pooled / sqrt(mean_c(pooled ** 2) + norm_eps)
    entry   = the last rotary_dim channels of it turned by R(ratio * w)

R turns the pairs (2i, 2i + 1), interleaved: (a cos - b sin, b cos + a sin). Everything is
float32 until the entry is rounded, once, to its type.

Sources: DeepSeek-V4 technical report, 2.3.1 (CSA, equations 9 to 17) and 2.3.2 (HCA, 20 to 23);
``transformers``' ``models/deepseek_v4``, against which the tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.ops.hca_windows import Source, Windows, gather_slots, place_windows, turn
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "hca_compress(Tensor kv, Tensor gate, SymInt[] lengths, SymInt ratio, *, "
    "Tensor? position_bias=None, bool overlap=False, SymInt[]? first_windows=None, "
    "Tensor? previous_kv=None, Tensor? previous_gate=None, Tensor? norm_weight=None, "
    "float norm_eps=1e-6, Tensor? rotary_table=None, SymInt rotary_dim=0, "
    "ScalarType? dtype=None) -> Tensor entries"
)

# float32 elements of a tile's slots: stays in the caches of the CPU
TILE_ELEMENTS = 1 << 18


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
) -> Tensor:
    """Compress the full windows of B packed sequences.

    Args:
        kv: ``[T, C]``, float32, float16 or bfloat16, the sequences one after another; C = D, or
            2D with overlap: the channels for the next window first, then those for its own.
        gate: as ``kv``, logits.
        lengths: B host ints, tokens of each sequence here, those that the caller had kept
            included; their sum is T. Windows are counted from the first token; what fills no
            window at the end is ignored, and the caller keeps it for the next call.
        ratio: tokens of a window.
        position_bias: ``[ratio, C]``, added to the gate of the j-th token of every window.
        overlap: CSA's windows instead of HCA's.
        first_windows: B host ints, number of each sequence's first window here; None: all 0.
        previous_kv: ``[B, ratio, D]``, type of ``kv``, overlap only: the first D channels of
            the window before, for sequences whose first window here is not window 0; for the
            others it may be anything. None if there are no such sequences.
        previous_gate: as ``previous_kv``, without the bias, which is added here.
        norm_weight: ``[D]``; None for no RMSNorm.
        norm_eps: added to the mean square.
        rotary_table: ``[P, rotary_dim / 2, 2]``, cosine and sine; the row of a window is
            ratio * its number.
        rotary_dim: how many of the last channels are turned, even; 0 for none.
        dtype: of the entries; None: as ``kv``.

    Returns:
        ``[sum(length // ratio), D]``, the entries of the sequences one after another.

    Raises:
        UsageError: shapes, types or lengths that disagree.

    A gate of -inf leaves its slot out; where all slots of a channel are left out it is NaN. NaN
    or infinity in a slot makes its channel NaN (or infinite), whatever it weighs; the norm
    spreads that over the entry.
    """
    dim = _check_tokens(kv, gate, lengths, ratio, overlap)
    _check_previous(kv, lengths, ratio, overlap, first_windows, previous_kv, previous_gate)
    for name, tensor, shape in (
        ("position_bias", position_bias, (ratio, kv.shape[1])),
        ("norm_weight", norm_weight, (dim,)),
    ):
        if tensor is not None:
            _check(name, tensor, shape, FLOAT_DTYPES)
    _check_rotary(rotary_table, rotary_dim, dim, lengths, ratio, first_windows)
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UsageError("dtype", dtype, FLOAT_DTYPES)
    entries: Tensor = _op(
        kv,
        gate,
        lengths,
        ratio,
        position_bias=position_bias,
        overlap=overlap,
        first_windows=first_windows,
        previous_kv=previous_kv,
        previous_gate=previous_gate,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        rotary_table=rotary_table,
        rotary_dim=rotary_dim,
        dtype=dtype,
    )
    return entries


def _check_tokens(
    kv: Tensor, gate: Tensor, lengths: Sequence[int], ratio: int, overlap: bool
) -> int:
    """The channels of an entry."""
    if kv.dim() != 2 or (overlap and kv.shape[1] % 2):
        legal = "[tokens, 2 * head_dim]" if overlap else "[tokens, head_dim]"
        raise UsageError("kv", tuple(kv.shape), legal)
    if kv.dtype not in FLOAT_DTYPES:
        raise UsageError("kv", kv.dtype, FLOAT_DTYPES)
    _check("gate", gate, kv.shape, (kv.dtype,))
    check_windows(lengths, ratio)
    if sum(lengths) != kv.shape[0]:
        raise UsageError("lengths", f"a sum of {sum(lengths)}", f"{kv.shape[0]}, as kv")
    return kv.shape[1] // 2 if overlap else kv.shape[1]


def check_windows(lengths: Sequence[int], ratio: int) -> None:
    """Lengths are numbers of tokens, and a window has at least one."""
    if ratio < 1:
        raise UsageError("ratio", ratio, "1 or more tokens a window")
    if min(lengths, default=0) < 0:
        raise UsageError("lengths", min(lengths), "0 or more tokens")


def _check(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.shape != tuple(shape):
        raise UsageError(name, tuple(tensor.shape), f"{tuple(shape)}")
    if tensor.dtype not in dtypes:
        raise UsageError(name, tensor.dtype, dtypes)


def _check_previous(
    kv: Tensor,
    lengths: Sequence[int],
    ratio: int,
    overlap: bool,
    first_windows: Sequence[int] | None,
    previous_kv: Tensor | None,
    previous_gate: Tensor | None,
) -> None:
    if first_windows is not None:
        if len(first_windows) != len(lengths):
            given, legal = f"{len(first_windows)} numbers", f"{len(lengths)}, as lengths"
            raise UsageError("first_windows", given, legal)
        if min(first_windows, default=0) < 0:
            raise UsageError("first_windows", min(first_windows), "0 or more")
    later = overlap and any(first_windows or ())
    for name, tensor in (("previous_kv", previous_kv), ("previous_gate", previous_gate)):
        if tensor is not None and not overlap:
            raise UsageError(name, tuple(tensor.shape), "None without overlap")
        if tensor is None and later:
            raise UsageError(name, None, "a tensor, where a first window is not window 0")
        if tensor is not None:
            _check(name, tensor, (len(lengths), ratio, kv.shape[1] // 2), (kv.dtype,))
    if (previous_kv is None) != (previous_gate is None):
        name = "previous_kv" if previous_kv is None else "previous_gate"
        raise UsageError(name, None, "a tensor: previous_kv and previous_gate come together")


def _check_rotary(
    table: Tensor | None,
    rotary_dim: int,
    dim: int,
    lengths: Sequence[int],
    ratio: int,
    first_windows: Sequence[int] | None,
) -> None:
    if rotary_dim < 0 or rotary_dim > dim or rotary_dim % 2:
        raise UsageError("rotary_dim", rotary_dim, f"an even number up to {dim}")
    if table is None or not rotary_dim:
        if table is not None:
            raise UsageError("rotary_table", tuple(table.shape), "None with rotary_dim 0")
        if rotary_dim:
            raise UsageError("rotary_table", None, f"a tensor, rotary_dim is {rotary_dim}")
        return
    firsts = first_windows or [0] * len(lengths)
    counts = [(first, length // ratio) for first, length in zip(firsts, lengths)]
    last = max((first + count - 1 for first, count in counts if count), default=-1)
    needed = ratio * last + 1 if last >= 0 else 0
    shape = table.shape
    if len(shape) != 3 or shape[1:] != (rotary_dim // 2, 2) or shape[0] < needed:
        legal = f"[{needed} or more, {rotary_dim // 2}, 2]"
        raise UsageError("rotary_table", tuple(shape), legal)


def _reference(
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
) -> Tensor:
    dim = kv.shape[1] // 2 if overlap else kv.shape[1]
    windows = place_windows(lengths, ratio, first_windows, kv.device)
    num_windows = len(windows.rows)
    entries = kv.new_empty((num_windows, dim), dtype=dtype or kv.dtype)
    sources = [Source(kv, previous_kv, None, 0.0), Source(gate, previous_gate, position_bias, -inf)]
    step = max(1, TILE_ELEMENTS // max(1, ratio * kv.shape[1]))
    for low in range(0, num_windows, step):
        tile = Windows(*(x[low : low + step] for x in windows))
        slots, gates = (gather_slots(source, tile, ratio, overlap) for source in sources)
        rows = torch.softmax(gates, 1).mul_(slots).sum(1)
        if norm_weight is not None:
            rows *= torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm_eps)
            rows *= norm_weight
        if rotary_table is not None:
            turn(rows[:, dim - rotary_dim :], rotary_table[ratio * tile.numbers])
        entries[low : low + step] = rows
    return entries


def _fake(
    kv: Tensor,
    gate: Tensor,
    lengths: Sequence[int],
    ratio: int,
    *,
    overlap: bool = False,
    dtype: torch.dtype | None = None,
    **others: object,
) -> Tensor:
    dim = kv.shape[1] // 2 if overlap else kv.shape[1]
    return kv.new_empty((sum(n // ratio for n in lengths), dim), dtype=dtype or kv.dtype)


_op = register(SCHEMA, _reference, _fake)
