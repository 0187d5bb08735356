"""A confidence interval for the mean of paired, correlated differences.

The same tokens are scored with both caches, so the text's own spread (which is large) cancels
and only the difference per token counts. Neighbouring tokens share their context, hence their
errors: they are treated as clusters, and only clusters as independent (Liang and Zeger, 1986,
for a mean: the sandwich estimator).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple


class MeanInterval(NamedTuple):
    """A mean with its two-sided confidence interval."""

    mean: float
    low: float
    high: float
    clusters: int


def clustered_mean(clusters: Sequence[Sequence[float]], confidence: float = 0.95) -> MeanInterval:
    """The mean over all values, its interval from the spread between clusters.

    With G clusters, n values, mean m and cluster sums of residuals
    ``u_g = sum(x - m for x in cluster g)``, the standard error is
    ``sqrt(G / (G - 1) * sum(u_g ** 2)) / n``; the quantile is Student's with G - 1 degrees.
    """
    count = len(clusters)
    assert count >= 2, "one cluster has no spread"
    total = sum(len(cluster) for cluster in clusters)
    mean = math.fsum(math.fsum(cluster) for cluster in clusters) / total
    residuals = [math.fsum(cluster) - mean * len(cluster) for cluster in clusters]
    spread = math.fsum(residual * residual for residual in residuals)
    error = math.sqrt(count / (count - 1) * spread) / total
    reach = student_quantile(0.5 + confidence / 2, count - 1) * error
    return MeanInterval(mean, mean - reach, mean + reach, count)


def most_where_none(count: int, confidence: float = 0.95) -> float:
    """The largest share that still gives 0 hits in ``count`` independent trials so often.

    The one-sided bound of Clopper and Pearson (1934) at 0 hits: ``1 - (1 - confidence) ** (1/n)``.
    """
    return float(1 - (1 - confidence) ** (1 / count))


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t from the normal one; error under 0.5 % from 4 degrees on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))
