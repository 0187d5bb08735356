"""``select_topk``: the k best entries for each query, the same ones on every device and every run.

Indexer scores are sums of ReLUs and tie at exactly 0, so which of the tied entries are taken
has to be said: those with the lowest index.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

_INT32_MAX = 2**31 - 1
_LOWEST = -2139095041  # the order of -inf: its bits, 0xff800000, mirrored

SCHEMA = "select_topk(Tensor scores, SymInt k, *, Tensor? lengths=None) -> Tensor"


def select_topk(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    """Indices of the k largest scores of every row.

    Args:
        scores: ``[T, E]``, float32, float16 or bfloat16. -inf says that the entry is not there.
        k: entries wanted, 1 or more.
        lengths: ``[T]`` int32 or int64, only the first ``lengths[t]`` entries are there for
            query t; more than E means all, less than 0 none. Scores past it may be anything.

    Returns:
        ``[T, k]`` int32, best first, tied entries by ascending index (0.0 and -0.0 are tied),
        -1 at the end where fewer than k are there.

    Raises:
        UsageError: shapes or types that disagree.

    NaN counts as larger than any number, infinity included, as torch's own sort has it: a
    poisoned entry is selected and stays visible in what attention makes of it.
    """
    if scores.dim() != 2 or scores.shape[1] >= 2**31:
        raise UsageError("scores", tuple(scores.shape), "[tokens, fewer than 2**31 entries]")
    if scores.dtype not in FLOAT_DTYPES:
        raise UsageError("scores", scores.dtype, FLOAT_DTYPES)
    if k < 1:
        raise UsageError("k", k, "1 or more")
    if lengths is not None:
        if lengths.shape != scores.shape[:1]:
            legal = f"[{scores.shape[0]}], one a query"
            raise UsageError("lengths", tuple(lengths.shape), legal)
        if lengths.dtype not in (torch.int32, torch.int64):
            raise UsageError("lengths", lengths.dtype, (torch.int32, torch.int64))
    entries: Tensor = _op(scores, k, lengths=lengths)
    return entries


def _reference(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    columns = scores.shape[1]
    if lengths is not None:
        index = torch.arange(columns, device=scores.device)
        scores = scores.masked_fill(index >= lengths[:, None], -torch.inf)
    if scores.device.type == "cpu" and k < columns:
        return _unique_topk(scores, k)
    best, entries = torch.sort(scores, dim=1, descending=True, stable=True)
    taken = entries[:, :k].to(torch.int32).masked_fill_(best[:, :k] == -torch.inf, -1)
    return pad(taken, (0, max(0, k - columns)), value=-1)


def _unique_topk(scores: Tensor, k: int) -> Tensor:
    """The same by ``torch.topk``, several times faster on a CPU.

    It promises nothing about ties, so there are none: whole numbers in the order of the scores
    (IEEE 754's bits, the negative ones mirrored) with the index, counted down, below them.
    """
    scores = scores.to(torch.float32) + 0.0  # -0.0 becomes 0.0
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _INT32_MAX, bits)
    ordered = ordered.masked_fill_(scores.isnan(), _INT32_MAX).to(torch.int64)
    index = torch.arange(scores.shape[1], dtype=torch.int64, device=scores.device)
    keys = torch.topk((ordered << 32) + (_INT32_MAX - index), k, dim=1).values
    entries = (_INT32_MAX - (keys & 0xFFFFFFFF)).to(torch.int32)
    return entries.masked_fill_((keys >> 32) == _LOWEST, -1)


def _fake(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


_op = register(SCHEMA, _reference, _fake)
