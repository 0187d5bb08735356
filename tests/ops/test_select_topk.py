"""select_topk: which entries are taken, and in which order, when scores tie."""

from __future__ import annotations

import math
from typing import Any

import oracle_more
import pytest
import torch

from ascend_kv import ops
from ascend_kv.errors import UsageError

NAN, INF = math.nan, math.inf


def check(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> None:
    given = ops.select_topk(scores, k, lengths=lengths)
    counts = None if lengths is None else lengths.tolist()
    assert given.dtype == torch.int32 and given.is_contiguous()
    assert given.tolist() == oracle_more.select(scores.tolist(), k, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("entries", "k"), [(1, 1), (40, 7), (40, 40), (7, 40), (0, 3)])
def test_selects_the_largest(dtype: torch.dtype, entries: int, k: int) -> None:
    check(torch.randn(5, entries).to(dtype), k)


@pytest.mark.parametrize("k", [1, 5, 30, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_index(k: int, dtype: torch.dtype) -> None:
    """As an indexer has them: many scores are exactly 0, and some others are alike too."""
    check((torch.randn(20, 64).relu() * 2).round().to(dtype), k)
    check(torch.zeros(3, 2000).to(dtype), k)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths(dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 1, 6, 7, 40, 2**31 - 1, -3], dtype=dtype)
    scores = torch.randn(7, 40).relu()
    for row, length in enumerate(lengths.tolist()):
        scores[row, max(length, 0) :] = NAN
    check(scores, 7, lengths)


def test_what_is_defined_of_special_values() -> None:
    scores = torch.tensor([[1.0, NAN, 2.0, INF, -INF, NAN, -0.0, 0.0, -1.0]])
    assert ops.select_topk(scores, 9).tolist() == [[1, 5, 3, 2, 0, 6, 7, 8, -1]]
    negative_nan = -torch.tensor([[NAN, 1.0]])
    assert ops.select_topk(negative_nan, 2).tolist() == [[0, 1]]
    check(scores, 4)
    assert ops.select_topk(torch.full((1, 3), -INF), 2).tolist() == [[-1, -1]]


def test_same_as_transformers_where_nothing_ties() -> None:
    """Query t sees entry j exactly when j < (t + 1) // 4."""
    scores = torch.randn(50, 12)
    lengths = (torch.arange(50) + 1) // 4
    hidden = torch.arange(12) >= lengths[:, None]
    theirs = scores.masked_fill(hidden, -INF).topk(5, -1).indices
    theirs = torch.where(theirs >= lengths[:, None], -1, theirs)
    assert torch.equal(ops.select_topk(scores, 5, lengths=lengths), theirs.to(torch.int32))


def test_strided_and_empty() -> None:
    scores = torch.randn(40, 6).t()
    assert torch.equal(ops.select_topk(scores, 3), ops.select_topk(scores.contiguous(), 3))
    assert ops.select_topk(torch.empty(0, 8), 3).shape == (0, 3)
    lengths = torch.empty(0, dtype=torch.int32)
    assert ops.select_topk(torch.empty(0, 0), 3, lengths=lengths).shape == (0, 3)


def test_opcheck(opcheck: Any) -> None:
    for entries in (2, 9):
        opcheck("select_topk", torch.randn(5, entries), 4)
        opcheck("select_topk", torch.randn(5, entries).half(), 4, lengths=torch.arange(5))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("scores", {"scores": torch.randn(5)}),
        ("scores", {"scores": torch.empty(5, 2**31, device="meta")}),
        ("scores", {"scores": torch.zeros(5, 8, dtype=torch.int32)}),
        ("k", {"k": 0}),
        ("lengths", {"lengths": torch.zeros(4, dtype=torch.int32)}),
        ("lengths", {"lengths": torch.zeros(5)}),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        ops.select_topk(**{"scores": torch.randn(5, 8), "k": 3, **change})
    assert error.value.field == field
