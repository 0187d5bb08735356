"""Comparison of results: anomalies first, then how large the error is, and against what.

A NaN or an infinity in another place than expected is a bug whatever the tolerance, and would
hide in an error that is itself NaN; so it is looked for first. The tolerance for what remains is
earned: either the error of a straightforward computation in the same precision, times a small
ratio, or half a step of the type that the result is rounded to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_float64(x: Any) -> np.ndarray:
    """A tensor or array of any type as float64."""
    if isinstance(x, torch.Tensor):
        x = x.detach().to(torch.float64).cpu().numpy()
    return np.asarray(x, dtype=np.float64)


def find_anomalies(actual: Any, expected: Any) -> str:
    """What is NaN or infinite in one of the two and not in the other; empty if nothing."""
    a, e = as_float64(actual), as_float64(expected)
    if a.shape != e.shape:
        return f"shape {a.shape}, expected {e.shape}"
    kinds = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
    found = []
    for name, kind in kinds.items():
        for what, places in (("unexpected", kind(a) & ~kind(e)), ("missing", kind(e) & ~kind(a))):
            if places.any():
                first = tuple(int(i) for i in np.argwhere(places)[0])
                found.append(f"{what} {name}: {int(places.sum())} of {a.size}, first at {first}")
    return "; ".join(found)


def max_error(actual: Any, expected: Any) -> float:
    """The largest absolute difference where both are finite; 0 when nothing is."""
    a, e = as_float64(actual), as_float64(expected)
    finite = np.isfinite(a) & np.isfinite(e)
    return float(np.abs(a[finite] - e[finite]).max(initial=0.0))


def rms_error(actual: Any, expected: Any) -> float:
    """Root mean square of the differences where both are finite; 0 when nothing is."""
    a, e = as_float64(actual), as_float64(expected)
    finite = np.isfinite(a) & np.isfinite(e)
    return float(np.sqrt(np.square(a[finite] - e[finite]).mean())) if finite.any() else 0.0


def largest(x: Any) -> float:
    """The largest finite magnitude; 0 when there is none."""
    values = as_float64(x)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def assert_within(actual: Any, expected: Any, tolerance: float) -> None:
    """No anomaly, and no absolute error above ``tolerance``."""
    anomalies = find_anomalies(actual, expected)
    assert not anomalies, anomalies
    error = max_error(actual, expected)
    assert error <= tolerance, f"max error {error:.3g} > {tolerance:.3g}"


def assert_as_good(
    actual: Any, exact: Any, baseline: Any, rms_ratio: float = 2.5, max_ratio: float = 6.0
) -> None:
    """No anomaly, and errors little above those of ``baseline``.

    Args:
        actual: the result, float32.
        exact: the same in float64.
        baseline: the same, computed in float32 in the most straightforward way. Where it
            happens to be exact, half a step of the largest result is allowed.
        rms_ratio: how much larger the root mean square of the errors may be, since another
            order of summation rounds otherwise.
        max_ratio: how much larger the largest error may be; extremes scatter more.
    """
    anomalies = find_anomalies(actual, exact)
    assert not anomalies, anomalies
    half_step = 0.5 * np.finfo(np.float32).eps * largest(exact)
    for name, measure, ratio in (("rms", rms_error, rms_ratio), ("max", max_error, max_ratio)):
        error, yardstick = measure(actual, exact), max(measure(baseline, exact), half_step)
        assert error <= ratio * yardstick, (
            f"{name} error {error:.3g} is {error / yardstick:.2f} times {yardstick:.3g}"
        )


def assert_rounded(actual: torch.Tensor, exact: Any, slack: float) -> None:
    """No anomaly, and ``actual`` is ``exact`` rounded to its type, up to ``slack``."""
    anomalies = find_anomalies(actual, exact)
    assert not anomalies, anomalies
    a, e = as_float64(actual), as_float64(exact)
    finite = np.isfinite(a) & np.isfinite(e)
    info = torch.finfo(actual.dtype)
    allowed = 0.5 * info.eps * np.abs(e) + info.smallest_normal * info.eps + slack
    excess = (np.abs(a - e) - allowed)[finite].max(initial=-np.inf)
    assert excess <= 0, f"{excess:.3g} beyond the rounding of {actual.dtype} and {slack:.3g}"
