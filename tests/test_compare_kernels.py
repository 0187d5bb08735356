"""The self-test's comparison: it sees what is wrong, and by how much."""

from __future__ import annotations

import math

import pytest
import torch

from ascend_kv.evaluate.compare_kernels import Difference, compare

NAN, INF = math.nan, math.inf


def difference(
    found: list[float], wanted: list[float], dtype: torch.dtype, by_rows: bool = False
) -> Difference:
    one, other = torch.tensor([found], dtype=dtype), torch.tensor([wanted], dtype=dtype)
    return compare([one], [other], by_rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for value in (1.0, 1.5, -3.0, limits.smallest_normal, limits.max / 2, 0.0, 1e-3):
        wanted = torch.tensor([value], dtype=dtype)
        found = torch.nextafter(wanted, torch.tensor([INF], dtype=dtype))
        assert compare([found], [wanted], False).ulps == 1
        assert compare([wanted], [wanted], False) == Difference()


def test_by_rows_the_largest_value_counts() -> None:
    found, wanted = [1024.0, 0.5], [1024.0, 0.25]
    assert difference(found, wanted, torch.float16, by_rows=True).ulps == 0.25
    assert difference(found, wanted, torch.float16).ulps == 0.25 / (2.0**-2 * 2.0**-10)


def test_codes() -> None:
    assert difference([-128, 5], [127, 5], torch.int8).codes == 255
    assert difference([3], [3], torch.int8) == Difference()
    assert difference([], [], torch.int8) == Difference()


@pytest.mark.parametrize(
    ("found", "wanted"),
    [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (-INF, INF), (NAN, INF), (INF, NAN)],
)
def test_anomalies(found: float, wanted: float) -> None:
    seen = difference([2.0, found], [2.0, wanted], torch.float16)
    assert seen.anomaly.startswith("1 of 2, first at (0, 1)")
    assert seen.complaint(exact=False, pooled=False)
    assert difference([found], [found], torch.float16) == Difference()


def test_shapes_types_and_numbers_of_results() -> None:
    x = torch.zeros(2)
    assert "instead of" in compare([x], [torch.zeros(3)], False).anomaly
    assert "instead of" in compare([x], [x.half()], False).anomaly
    assert compare([x, x], [x], False).anomaly == "2 results instead of 1"


def test_what_is_allowed() -> None:
    one = Difference(codes=1, ulps=1.0)
    assert (
        one.complaint(exact=True, pooled=False) == "1 codes off, allowed 0, 1 ulps off, allowed 0"
    )
    assert not one.complaint(exact=False, pooled=False)
    assert not Difference(ulps=1.0).complaint(exact=True, pooled=True)
    assert Difference(ulps=1.2).complaint(exact=True, pooled=True)
    assert Difference(codes=2).complaint(exact=False, pooled=False)
    assert Difference(ulps=1.5).complaint(exact=False, pooled=False)
    assert one.larger(Difference(3, 0.5, "NaN")) == Difference(3, 1.0, "NaN")
