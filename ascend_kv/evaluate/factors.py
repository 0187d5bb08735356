"""What the schemes' throughputs say about each cause on its own: quotients of two schemes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascend_kv.evaluate.results import Factor, SchemeResult


def find_factors(schemes: Sequence[SchemeResult]) -> list[Factor]:
    """All quotients for which both schemes were run.

    The first scheme is the baseline. ``format alone`` changes nothing but the cache's type,
    ``paging alone`` nothing but the allocator, ``together`` both; ``batch too large`` compares
    the scheme that takes every request at once with the same cache at its planned batch.
    """
    first = schemes[0]
    planned = [scheme for scheme in schemes if scheme.batch == "planned"]
    same_format = [s for s in planned if s.kv_cache_dtype == first.kv_cache_dtype]
    other_format = [s for s in planned if s.kv_cache_dtype != first.kv_cache_dtype]
    together = _other_allocator(other_format, first)
    factors = [
        _factor("format alone", _same_allocator(other_format, first), first),
        _factor("paging alone", _other_allocator(same_format, first), first),
        _factor("together", together, first),
    ]
    for scheme in schemes:
        if scheme.batch == "all":
            twin = _first(s for s in planned if _cache(s) == _cache(scheme))
            factors.append(_factor("batch too large", scheme, twin))
    return [factor for factor in factors if factor is not None]


def _factor(name: str, scheme: SchemeResult | None, baseline: SchemeResult | None) -> Factor | None:
    if scheme is None or baseline is None:
        return None
    ratio = scheme.measured.tokens_per_second / baseline.measured.tokens_per_second
    return Factor(name, scheme.name, baseline.name, ratio)


def _same_allocator(schemes: Iterable[SchemeResult], first: SchemeResult) -> SchemeResult | None:
    return _first(s for s in schemes if s.allocator == first.allocator)


def _other_allocator(schemes: Iterable[SchemeResult], first: SchemeResult) -> SchemeResult | None:
    return _first(s for s in schemes if s.allocator != first.allocator)


def _first(schemes: Iterable[SchemeResult]) -> SchemeResult | None:
    return next(iter(schemes), None)


def _cache(scheme: SchemeResult) -> tuple[str, str]:
    return scheme.allocator, scheme.kv_cache_dtype
