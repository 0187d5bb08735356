"""hca_decompress: row t is the entry of window t // ratio, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ascend_kv import ops
from ascend_kv.errors import UsageError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 4, 5])
def test_every_token_gets_its_entry(dtype: torch.dtype, ratio: int) -> None:
    lengths = [9, 0, 4, 3, 17]
    entries = torch.randn(sum(n // ratio for n in lengths), 7).to(dtype)
    entries[1, 2:5] = torch.tensor([math.nan, math.inf, -math.inf])
    tokens = ops.hca_decompress(entries, lengths, ratio)
    expected, first = [], 0
    for length in lengths:
        expected += [entries[first + t // ratio] for t in range(length // ratio * ratio)]
        first += length // ratio
    assert tokens.dtype == dtype and tokens.is_contiguous()
    assert tokens.view(torch.uint8).equal(torch.stack(expected).view(torch.uint8))
    assert tokens.data_ptr() != entries.data_ptr()


def test_strided_and_empty() -> None:
    entries = torch.randn(7, 3).t()
    assert ops.hca_decompress(entries, [6], 2).equal(entries.repeat_interleave(2, 0))
    for lengths in ([], [3, 0]):
        assert ops.hca_decompress(torch.empty(0, 7), lengths, 4).shape == (0, 7)


def test_takes_back_what_compress_averaged() -> None:
    kv = torch.randn(2, 7).repeat_interleave(4, 0)
    entries = ops.hca_compress(kv, torch.randn(8, 7), [8], 4)
    torch.testing.assert_close(ops.hca_decompress(entries, [8], 4), kv)


def test_opcheck(opcheck: Any) -> None:
    for ratio in (1, 3):
        opcheck("hca_decompress", torch.randn(6 // ratio, 5), [6], ratio)
    opcheck("hca_decompress", torch.randn(5, 3).t().half(), [4, 1, 3], 2)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("entries", {"entries": torch.randn(3, 5)}),
        ("entries", {"entries": torch.randn(2, 5, 1)}),
        ("entries", {"entries": torch.zeros(2, 5, dtype=torch.int8)}),
        ("lengths", {"lengths": [9, -1]}),
        ("ratio", {"ratio": 0}),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    legal = {"entries": torch.randn(2, 5), "lengths": [5, 4], "ratio": 4}
    with pytest.raises(UsageError) as error:
        ops.hca_decompress(**{**legal, **change})
    assert error.value.field == field
