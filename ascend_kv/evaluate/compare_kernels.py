"""How far a kernel's result is from the reference's: anomalies first, then codes and ulps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor

MAX_ULPS = 1.0
"""One rounding: what a device may differ by where its division or root is not exact."""
MAX_CODES = 1
MAX_POOLED_ULPS = 1.1
"""Of an entry's largest channel: one rounding, and float32 sums in another order."""


class Difference(NamedTuple):
    """The largest of a call.

    Attributes:
        codes: of integers.
        ulps: of floats, in steps of their type at the reference's value; by rows, at the largest
            value of the row.
        anomaly: NaN or infinity where there should be none, or none where there should; "" if not.
    """

    codes: int = 0
    ulps: float = 0.0
    anomaly: str = ""

    def larger(self, other: Difference) -> Difference:
        """The larger of both, part by part."""
        anomaly = self.anomaly or other.anomaly
        return Difference(max(self.codes, other.codes), max(self.ulps, other.ulps), anomaly)

    def complaint(self, exact: bool, pooled: bool) -> str:
        """What is wrong with it; empty if nothing.

        Args:
            exact: codes, scales and values have to be the reference's, bit for bit.
            pooled: the result is a float32 sum whose order is free.
        """
        ulps = MAX_POOLED_ULPS if pooled else 0.0 if exact else MAX_ULPS
        codes = 0 if exact else MAX_CODES
        found = [self.anomaly] if self.anomaly else []
        if self.codes > codes:
            found.append(f"{self.codes} codes off, allowed {codes}")
        if self.ulps > ulps:
            found.append(f"{self.ulps:.3g} ulps off, allowed {ulps:g}")
        return ", ".join(found)


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor], by_rows: bool) -> Difference:
    """All results of a call with those of the reference."""
    if len(found) != len(wanted):
        return Difference(anomaly=f"{len(found)} results instead of {len(wanted)}")
    difference = Difference()
    for one, other in zip(found, wanted, strict=True):
        difference = difference.larger(_compare(one, other, by_rows))
    return difference


def _compare(found: Tensor, wanted: Tensor, by_rows: bool) -> Difference:
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        kinds = [f"{list(x.shape)} {x.dtype}" for x in (found, wanted)]
        return Difference(anomaly=f"{kinds[0]} instead of {kinds[1]}")
    if not wanted.numel():
        return Difference()
    if not wanted.is_floating_point():
        return Difference(codes=int((found.to(torch.int64) - wanted.to(torch.int64)).abs().max()))
    odd = (found.isnan() != wanted.isnan()) | (
        (found != wanted) & ~wanted.isfinite() & ~wanted.isnan()
    )
    odd |= ~found.isfinite() & wanted.isfinite()
    if odd.any():
        where = tuple(int(i) for i in odd.nonzero()[0])
        pair = f"{found[where].item()} instead of {wanted[where].item()}"
        return Difference(anomaly=f"{int(odd.sum())} of {odd.numel()}, first at {where}: {pair}")
    limits = torch.finfo(wanted.dtype)
    size = wanted.double().abs().nan_to_num(0.0, 0.0, 0.0)
    if by_rows:
        size = size.amax(-1, keepdim=True)
    size = size.clamp(min=limits.smallest_normal)  # below, steps no longer shrink
    step = torch.ldexp(torch.full_like(size, limits.eps), torch.frexp(size).exponent - 1)
    error = (found.double() - wanted.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    return Difference(ulps=float((error / step).max()))
