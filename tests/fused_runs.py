"""Runs of paged_attention through the fused attention's plan and the stand-in for torch_npu.

What is expected of a run is the reference's own result over what the device can hold: keys and
scales rounded to the types it wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from compare import assert_rounded, assert_within, largest
from npu_stand_in import StandIn

from ascend_kv.formats import format_of
from ascend_kv.ops import fused_execute
from ascend_kv.ops.fused_attention import plan
from ascend_kv.ops.fused_request import Layout, request_of
from ascend_kv.ops.registration import REFERENCE_NAMESPACE, operator

Tensor = torch.Tensor
HALF = [torch.float16, torch.bfloat16]
SCALE = 0.2
# Decodes and prefills between one another, a sequence without queries, one block exactly.
MIXED = ([1, 5, 0, 1, 33, 1, 17, 1], [20, 5, 9, 160, 140, 1, 130, 128])
DECODES = ([1, 1, 1, 1], [33, 7, 160, 1])
PREFILLS = ([5, 33, 17], [9, 140, 17])


def arrange(cache: Tensor, layout: Layout) -> Tensor:
    """A cache ``[K, N, S, D]`` in memory as a layout wants it."""
    if layout == "BSND":
        return cache.transpose(1, 2).contiguous()
    if layout == "NZ":
        return cache.unflatten(3, (-1, 32)).transpose(2, 3).contiguous()
    return cache.contiguous()


def tensors_of(cache: Any, query: Tensor, layout: str = "BNSD", **options: Tensor) -> Any:
    """The tensors of a call, the caches as they lie in the layout."""
    key, value = (arrange(x, layout) for x in cache.tensors)  # type: ignore[arg-type]
    named = {"query": query, "key_cache": key, "value_cache": value, "block_tables": cache.tables}
    return named | cache.scales | options


class Run:
    """A call through plan and stand-in: results, plan, and what the stand-in was told."""

    def __init__(self, cache: Any, query: Tensor, queries: list[int], **options: Any) -> None:
        names = ("causal", "window", "cache_layout", "paged_scales", "log_sum_exp")
        asked = {name: options.pop(name) for name in names if name in options}
        tensors = tensors_of(cache, query, asked.get("cache_layout", "BNSD"), **options)
        request = request_of(tensors, queries, cache.kv_lengths, SCALE, **asked)
        self.plan = plan(request)
        library = StandIn()
        before = {name: x.clone() for name, x in tensors.items()}
        self.output, self.lse = fused_execute.execute(self.plan, tensors, library)
        for name, x in tensors.items():  # NaN where there is none, so no plain comparison
            torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
        self.calls = library.calls

    @property
    def told(self) -> dict[str, Any]:
        """The arguments of the only call."""
        ((_, arguments),) = self.calls
        return arguments

    @property
    def routes(self) -> list[str]:
        return [call.route for call in self.plan.calls]


def reference(cache: Any, query: Tensor, queries: list[int], **options: Any) -> Any:
    return operator("paged_attention", REFERENCE_NAMESPACE)(
        query.float(),
        *cache.tensors,
        cache.tables,
        queries,
        cache.kv_lengths,
        SCALE,
        **cache.scales,
        **options,
    )


def rounded_scales(cache: Any, dtype: torch.dtype) -> Any:
    """Static scales as the device holds them."""
    scales = {
        name: x.to(dtype).float() if x.dim() == 4 and name.endswith("scale") else x
        for name, x in cache.scales.items()
    }
    return cache._replace(scales=scales)


def rounded_cache(cache: Any, dtype: torch.dtype) -> Any:
    """What kv_cache_load makes of a cache: its values in a half type."""
    if not cache.scales:
        return cache
    sides = []
    for side, codes in zip(("key", "value"), cache.tensors, strict=True):
        scale, zero = (cache.scales.get(f"{side}_{x}") for x in ("scale", "zero_point"))
        values = format_of(codes.dtype).codes_as_floats(codes)
        if scale is not None:
            values = values * _for_each_channel(scale, values.shape[3])
        if zero is not None:
            values = values + _for_each_channel(zero, values.shape[3])
        sides.append(values.to(dtype))
    return cache._replace(tensors=tuple(sides), scales={})


def _for_each_channel(x: Tensor, dim: int) -> Tensor:
    if x.dim() == 3:
        return x[..., None]
    return x if x.shape[3] in (1, dim) else x.repeat_interleave(dim // x.shape[3], 3)


def expected(run: Run, cache: Any, query: Tensor, queries: list[int], **options: Any) -> Any:
    """The reference's result over what each call of the run holds, unrounded."""
    options = {k: v for k, v in options.items() if k in ("causal", "window", "sinks", "score_bias")}
    output, lse = torch.zeros(query.shape), torch.full(query.shape[:2], -math.inf)
    if "sinks" in options:
        lse[:] = options["sinks"]
    for call in run.plan.calls:
        held = (rounded_scales if call.route == "paged" else rounded_cache)(cache, query.dtype)
        part_output, part_lse = reference(held, query, queries, **options)
        for start, count in call.finish.spans:
            output[start : start + count] = part_output[start : start + count]
            lse[start : start + count] = part_lse[start : start + count]
    return output, lse


def check(cache: Any, query: Tensor, queries: list[int], **options: Any) -> Run:
    """Run, and compare with the reference to the rounding of the results."""
    run = Run(cache, query, queries, **options)
    output, lse = expected(run, cache, query, queries, **options)
    assert run.output.dtype is query.dtype and run.lse.dtype is torch.float32
    # sinks and zero points of values are applied to rounded results, so those round twice
    zero_point = cache.scales.get("value_zero_point")
    static = zero_point is not None and zero_point.dim() == 4
    zero_points = [largest(zero_point)] if static else []
    twice = "sinks" in options or zero_points
    scale = largest(output) + sum(zero_points)
    slack = 2e-6 + (0.6 * torch.finfo(query.dtype).eps * scale if twice else 0)
    assert_rounded(run.output, output, slack)
    if options.get("log_sum_exp", True):
        assert_within(run.lse, lse, 3e-5)
    return run


def draw(queries: list[int], heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(queries), heads, dim).to(dtype)


def int8_cache(cache_with: Any, lengths: list[int], key: str, value: str, **options: Any) -> Any:
    """An int8 cache with the scales of two, where keys and values want different ones."""
    torch.manual_seed(1)
    cache = cache_with(lengths, granularity=key, block_size=32, dim=32, **options)
    torch.manual_seed(1)  # the same tables
    other = cache_with(lengths, granularity=value, block_size=32, dim=32, **options)
    assert torch.equal(cache.tables, other.tables)
    values = {name: x for name, x in other.scales.items() if name.startswith("value")}
    return cache._replace(
        tensors=(cache.tensors[0], other.tensors[1]), scales=cache.scales | values
    )


def names(fallbacks: Iterable[Any]) -> list[str]:
    """The rules that fallbacks name."""
    return [fallback.rule for fallback in fallbacks]
