"""What ``paged_attention`` is asked, without its tensors: all that the plan for the NPU looks at.

Shapes, types and host lists only, so that the plan is a pure function, is the same for every
layer of a step, and can be tested where no NPU is.

The plan covers all that the device takes. Of that, ``paged_attention`` itself reaches caches that
lie as BNSD, scales by their pages, and the log-sum-exp always: ``cache_layout``, ``paged_scales``
and ``log_sum_exp`` of a ``Request`` are at their defaults there, and only tests set them. They are
for a measurement on an NPU to choose between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ascend_kv.formats import format_of
from ascend_kv.ops.paged import is_by_block, is_grouped

Tensor = torch.Tensor

# How the paged cache lies in memory, as the fused attention names it: [K, N, S, D],
# [K, S, N, D], or [K, N, D / 32, S, 32].
Layout = Literal["BNSD", "BSND", "NZ"]
# What shares a scale. The first three are static, [1, N or 1, 1, D or 1]; the others lie beside
# the cache, [K, 1, S], [K, N, S] and, by groups of channels, [K, N, S, D / g]. "none" is an
# unquantized side.
Scales = Literal["none", "layer", "head", "channel", "token", "token_head", "group", "block"]
STATIC: tuple[Scales, ...] = ("layer", "head", "channel")


@dataclass(frozen=True)
class Request:
    """One call of ``paged_attention``; letters and arguments as there.

    Attributes:
        key, value: what shares a scale; the zero points beside them, if any, have its shape.
        positions: key or query positions are given, so that order says nothing of visibility.
        entries: each query has a list of what it attends to.
        cache_layout: how the caches lie.
        paged_scales: pass scales that lie in pages as they are, where the device allows it
            (modes 4 and 5); else gather those in use (modes 1 and 3). Both are legal; which is
            faster is for a measurement on the device to say.
        log_sum_exp: the caller wants it; ``paged_attention`` always does.
        value_dtype: of the values' cache where it is another than the keys', ``cache_dtype``.
    """

    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    num_heads: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    softmax_scale: float
    key: Scales = "none"
    value: Scales = "none"
    key_zero_point: bool = False
    value_zero_point: bool = False
    causal: bool = True
    window: int = 0
    sinks: bool = False
    score_bias: bool = False
    positions: bool = False
    entries: bool = False
    cache_layout: Layout = "BNSD"
    paged_scales: bool = True
    log_sum_exp: bool = True
    value_dtype: torch.dtype | None = None

    @property
    def quantized(self) -> bool:
        return self.cache_dtype is torch.int8

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def cache_elements(self) -> int:
        return self.num_blocks * self.kv_heads * self.block_size * self.head_dim


@dataclass(frozen=True)
class Part:
    """The sequences of a batch that go into one call: those with one query, or all others.

    With a window, blocks that no query of a sequence sees are cut from its table; what remains
    of it is counted from the first block kept.

    Attributes:
        name: ``decode`` or ``prefill``.
        rows: which sequences.
        spans: first query and number of queries of each, in the packed order.
        first_blocks: the first block kept, as a column of the table.
        lengths: tokens from the first block kept to the sequence's end.
        hidden: how many of these the first query does not see, at the beginning.
    """

    name: str
    block_size: int
    rows: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    first_blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    hidden: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def width(self) -> int:
        """Columns of the table."""
        return -(-self.longest // self.block_size)

    @property
    def queries(self) -> int:
        """Queries of the sequence with the most."""
        return max(count for _, count in self.spans)


def split(request: Request) -> tuple[Part, ...]:
    """The one or two parts of a batch; sequences without queries or tokens are in none."""
    decode: list[int] = []
    prefill: list[int] = []
    starts: list[int] = []
    start = 0
    for row, (queries, cached) in enumerate(
        zip(request.query_lengths, request.kv_lengths, strict=True)
    ):
        starts.append(start)
        start += queries
        if queries and cached:
            (decode if queries == 1 else prefill).append(row)
    named = (("decode", decode), ("prefill", prefill))
    return tuple(_part(request, name, rows, starts) for name, rows in named if rows)


def _part(request: Request, name: str, rows: Sequence[int], starts: Sequence[int]) -> Part:
    size = request.block_size
    counts = [request.query_lengths[row] for row in rows]
    cached = [request.kv_lengths[row] for row in rows]
    seen = [0] * len(rows)
    if request.window:
        firsts = (length - count for length, count in zip(cached, counts, strict=True))
        seen = [max(0, first + 1 - request.window) for first in firsts]
    blocks = [first // size for first in seen]
    return Part(
        name=name,
        block_size=size,
        rows=tuple(rows),
        spans=tuple((starts[row], count) for row, count in zip(rows, counts, strict=True)),
        first_blocks=tuple(blocks),
        lengths=tuple(n - block * size for n, block in zip(cached, blocks, strict=True)),
        hidden=tuple(first - block * size for first, block in zip(seen, blocks, strict=True)),
    )


def scales_of(scale: Tensor | None, head_dim: int) -> Scales:
    """What shares a scale, read from the shape of the scales."""
    if scale is None:
        return "none"
    if is_by_block(scale, head_dim):
        return "block"
    if is_grouped(scale, head_dim):
        return "group"
    if scale.dim() == 3:
        return "token" if scale.shape[1] == 1 else "token_head"
    if scale.shape[3] > 1:
        return "channel"
    return "head" if scale.shape[1] > 1 else "layer"


def request_of(
    tensors: Mapping[str, Tensor | None],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    cache_layout: Layout = "BNSD",
    paged_scales: bool = True,
    log_sum_exp: bool = True,
) -> Request:
    """The request that these arguments of ``paged_attention`` make; tensors by its names."""
    query, cache, values = tensors["query"], tensors["key_cache"], tensors["value_cache"]
    assert query is not None and cache is not None and values is not None
    if cache_layout == "NZ":
        blocks, kv_heads, slices, size, lane = cache.shape
        dim = slices * lane
    elif cache_layout == "BSND":
        blocks, size, kv_heads, dim = cache.shape
    else:
        blocks, kv_heads, size, _ = cache.shape
        dim = format_of(cache.dtype).head_dim(cache)

    def given(name: str) -> bool:
        return tensors.get(name) is not None

    return Request(
        query_dtype=query.dtype,
        cache_dtype=cache.dtype,
        num_heads=query.shape[1],
        kv_heads=kv_heads,
        head_dim=dim,
        num_blocks=blocks,
        block_size=size,
        query_lengths=tuple(query_lengths),
        kv_lengths=tuple(kv_lengths),
        softmax_scale=softmax_scale,
        key=scales_of(tensors.get("key_scale"), dim),
        value=scales_of(tensors.get("value_scale"), dim),
        key_zero_point=given("key_zero_point"),
        value_zero_point=given("value_zero_point"),
        causal=causal,
        window=window,
        sinks=given("sinks"),
        score_bias=given("score_bias") or given("key_offset"),
        positions=given("key_positions") or given("query_positions"),
        entries=given("entries"),
        cache_layout=cache_layout,
        paged_scales=paged_scales,
        log_sum_exp=log_sum_exp,
        value_dtype=None if values.dtype is cache.dtype else values.dtype,
    )
