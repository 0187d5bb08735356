"""merge_attention: parts of an attention are worth as much as the whole of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle_more
import pytest
import torch
from compare import assert_as_good, assert_rounded, assert_within

from ascend_kv import ops
from ascend_kv.errors import UsageError

Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def draw(parts: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> Parts:
    outputs = [torch.randn(5, 3, 7).to(dtype) for _ in range(parts)]
    return outputs, [torch.randn(5, 3) * spread for _ in range(parts)]


def truth(parts: Parts, dtype: type = np.float64, sinks: torch.Tensor | None = None) -> Any:
    outputs, sums = ([x.double().numpy() for x in side] for side in parts)
    return oracle_more.merge(outputs, sums, None if sinks is None else sinks.numpy(), dtype)


def check(parts: Parts, sinks: torch.Tensor | None = None) -> None:
    given = ops.merge_attention(*parts, sinks=sinks)
    exact, naive = (truth(parts, dtype, sinks) for dtype in (np.float64, np.float32))
    for result, wanted, baseline in zip(given, exact, naive, strict=True):
        assert result.dtype == torch.float32
        assert_as_good(result, wanted, baseline)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -20.0, 3.0])])
@pytest.mark.parametrize("spread", [0.0, 3.0, 40.0])
def test_parts(parts: int, sinks: torch.Tensor | None, spread: float) -> None:
    check(draw(parts, spread=spread), sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rounds_once(dtype: torch.dtype) -> None:
    parts = draw(3, dtype)
    output, log_sum_exp = ops.merge_attention(*parts)
    exact, sums = truth(parts)
    assert output.dtype == dtype and log_sum_exp.dtype == torch.float32
    assert_rounded(output, exact, slack=2e-6)
    assert_within(log_sum_exp, sums, 2e-6)


def test_large_scores() -> None:
    """Sums that are far from 0 may not cost the weights their digits."""
    outputs, sums = draw(3)
    check((outputs, [x + 3e4 for x in sums]))
    check((outputs, [x - 3e4 for x in sums]))
    output, log_sum_exp = ops.merge_attention(outputs, [torch.full((5, 3), 3e38)] * 3)
    assert_within(output, sum(outputs) / 3, 1e-6)
    assert log_sum_exp.isfinite().all()


@pytest.mark.parametrize("where", ["merged", "first", "last"])
def test_a_sink_counts_once(cache_with: Any, where: str) -> None:
    """Window and rest attended to apart, the sink given once, equal one attention over all."""
    cache = cache_with([40], dim=16, dtype=torch.float8_e4m3fn)
    query, sinks = torch.randn(1, 4, 16), torch.tensor([0.5, -3.0, 2.0, 30.0])

    def attend(table: torch.Tensor, length: int, **options: Any) -> Any:
        arguments = (query, *cache.tensors, table, [1], [length], 0.25)
        return ops.paged_attention(*arguments, **cache.scales, **options)

    wanted = attend(cache.tables, 40, sinks=sinks)
    parts = [
        attend(cache.tables[:, first:], length, **({"sinks": sinks} if where == place else {}))
        for first, length, place in ((0, 16, "first"), (1, 24, "last"))
    ]
    outputs, sums = ([part[i] for part in parts] for i in (0, 1))
    given = ops.merge_attention(outputs, sums, sinks=sinks if where == "merged" else None)
    for a, b in zip(given, wanted, strict=True):
        assert_within(a, b, 3e-6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 3.0])])
def test_parts_that_saw_nothing(sinks: torch.Tensor | None) -> None:
    outputs, sums = draw(3)
    sums[0][0] = -math.inf
    outputs[0][0] = math.nan  # whatever such a part holds
    for part in range(3):
        sums[part][1] = -math.inf
        outputs[part][1] = math.inf
    output, log_sum_exp = ops.merge_attention(outputs, sums, sinks=sinks)
    exact, exact_sums = truth((outputs, sums), sinks=sinks)
    assert_within(output, exact, 2e-6)
    assert_within(log_sum_exp, exact_sums, 2e-6)
    assert torch.equal(output[1], torch.zeros(3, 7))
    nothing = torch.full((3,), -math.inf) if sinks is None else sinks
    assert torch.equal(log_sum_exp[1], nothing)


def test_a_sink_of_minus_infinity_is_none() -> None:
    parts = draw(2)
    given = ops.merge_attention(*parts, sinks=torch.full((3,), -math.inf))
    for a, b in zip(given, ops.merge_attention(*parts), strict=True):
        assert torch.equal(a, b)


def test_one_part_is_itself() -> None:
    outputs, sums = draw(1)
    output, log_sum_exp = ops.merge_attention(outputs, sums)
    assert torch.equal(output, outputs[0]) and torch.equal(log_sum_exp, sums[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_visible(bad: float) -> None:
    outputs, sums = draw(2)
    sums[1][2, 0] = bad
    outputs[0][3, 1, 4] = math.nan
    output, log_sum_exp = ops.merge_attention(outputs, sums)
    assert output[2, 0].isnan().all() and output[3, 1, 4].isnan()
    assert int(output.isnan().sum()) == 8
    assert not log_sum_exp[2, 0].isfinite() and int(log_sum_exp.isfinite().sum()) == 14


def test_strided_and_empty() -> None:
    outputs, sums = draw(2)
    wanted = ops.merge_attention(outputs, sums)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in outputs]
    assert not turned[0].is_contiguous()
    given = ops.merge_attention(turned, [x.t().contiguous().t() for x in sums])
    for a, b in zip(given, wanted, strict=True):
        assert torch.equal(a, b) and a.is_contiguous()
    output, log_sum_exp = ops.merge_attention([x[:0] for x in outputs], [x[:0] for x in sums])
    assert output.shape == (0, 3, 7) and log_sum_exp.shape == (0, 3)


def test_opcheck(opcheck: Any) -> None:
    opcheck("merge_attention", *draw(1))
    opcheck("merge_attention", *draw(3, torch.bfloat16), sinks=torch.randn(3))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("outputs", {"outputs": [], "log_sum_exps": []}),
        ("log_sum_exps", {"log_sum_exps": [torch.zeros(5, 3)]}),
        ("outputs[0]", {"outputs": [torch.zeros(5, 21)] * 2}),
        ("outputs[0]", {"outputs": [torch.zeros(5, 3, 7, dtype=torch.int8)] * 2}),
        ("outputs[1]", {"outputs": [torch.zeros(5, 3, 7), torch.zeros(5, 3, 8)]}),
        ("outputs[1]", {"outputs": [torch.zeros(5, 3, 7), torch.zeros(5, 3, 7).half()]}),
        ("log_sum_exps[1]", {"log_sum_exps": [torch.zeros(5, 3), torch.zeros(3, 5)]}),
        ("log_sum_exps[0]", {"log_sum_exps": [torch.zeros(5, 3).half()] * 2}),
        ("sinks", {"sinks": torch.zeros(4)}),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    outputs, sums = draw(2)
    with pytest.raises(UsageError) as error:
        ops.merge_attention(**{"outputs": outputs, "log_sum_exps": sums, **change})
    assert error.value.field == field
