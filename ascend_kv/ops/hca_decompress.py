"""``hca_decompress``: every token of a full window gets its window's entry.

The way back of ``hca_compress``, for looking at what compression keeps: row ``t`` of a
sequence's part is the entry of window ``t // ratio``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.ops.hca_compress import check_windows
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = "hca_decompress(Tensor entries, SymInt[] lengths, SymInt ratio) -> Tensor"


def hca_decompress(entries: Tensor, lengths: Sequence[int], ratio: int) -> Tensor:
    """Repeat each entry for the tokens of its window.

    Args:
        entries: ``[sum(length // ratio), D]``, float32, float16 or bfloat16, the entries of B
            sequences one after another.
        lengths: B host ints, tokens of each sequence; those that fill no window have no entry
            and get no row.
        ratio: tokens of a window.

    Returns:
        ``[sum(length // ratio * ratio), D]``, type of ``entries``.

    Raises:
        UsageError: shapes, types or lengths that disagree.
    """
    check_windows(lengths, ratio)
    count = sum(length // ratio for length in lengths)
    if entries.dim() != 2 or entries.shape[0] != count:
        raise UsageError("entries", tuple(entries.shape), f"[{count}, head_dim], as lengths")
    if entries.dtype not in FLOAT_DTYPES:
        raise UsageError("entries", entries.dtype, FLOAT_DTYPES)
    tokens: Tensor = _op(entries, lengths, ratio)
    return tokens


def _reference(entries: Tensor, lengths: Sequence[int], ratio: int) -> Tensor:
    return entries.repeat_interleave(ratio, 0)


def _fake(entries: Tensor, lengths: Sequence[int], ratio: int) -> Tensor:
    return entries.new_empty((entries.shape[0] * ratio, entries.shape[1]))


_op = register(SCHEMA, _reference, _fake)
