"""Attention of some queries over the gathered keys and values of one tile, in float32.

The scores are multiplied by the keys' scales and the weights by the values' scales: the same as
dequantizing what was gathered, and head_dim times less work. ``paged_attention`` states the
formula, ``attention_tiles`` what makes a tile; letters as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ascend_kv.ops.paged import for_each_token, gather, is_grouped, is_paged

Tensor = torch.Tensor


class Side(NamedTuple):
    """Gathered keys or values, float32: ``[b, N, P, D]``, scales ``[b, N or 1, P]``.

    A static scale stays as it is given, ``[1, N or 1, 1, D or 1]``.
    """

    values: Tensor
    scale: Tensor | None
    zero_point: Tensor | None

    def tokens(self, low: int, high: int) -> Side:
        """The same for gathered tokens ``low`` to ``high``."""
        scales = (
            x if x is None or x.dim() == 4 else x[:, :, low:high]
            for x in (self.scale, self.zero_point)
        )
        return Side(self.values[:, :, low:high], *scales)


class Weighing(NamedTuple):
    """Softmax weights ``[b, N, G*Q, P]`` and what came of them, ``[b, N, G*Q, 1]``."""

    weights: Tensor
    log_sum_exp: Tensor
    nothing: Tensor | None  # the query sees no key; None where each is known to see one


def gather_side(
    cache: Tensor, scale: Tensor | None, zero_point: Tensor | None, blocks: Tensor
) -> Side:
    """The blocks ``[b, n]`` of one side of the cache, with their scales."""
    return read_side(cache, scale, zero_point, lambda x: gather(x, blocks))


def read_side(
    cache: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    read: Callable[[Tensor], Tensor],
) -> Side:
    """One side of the cache as ``read`` brings it, ``[K, N, S, ...]`` to ``[b, N, P, ...]``.

    Scales of groups of channels, or of a block's channels, are applied here: they cannot be taken
    out of q . k.
    """
    values = read(cache)
    dim = values.shape[3]
    scale, zero_point = (for_each_token(x, cache.shape[2], dim) for x in (scale, zero_point))
    scale, zero_point = (
        read(x) if x is not None and is_paged(x, dim) else x for x in (scale, zero_point)
    )
    if scale is None or not is_grouped(scale, dim):
        return Side(values, scale, zero_point)
    groups = values.unflatten(3, (scale.shape[3], -1))
    groups *= scale[..., None]
    if zero_point is not None:
        groups += zero_point[..., None]
    return Side(values, None, None)


def weigh(
    query: Tensor,
    key: Side,
    hidden: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    certain: bool,
) -> Weighing:
    """Softmax of the scores of ``[b, Q, H, D]`` over the gathered keys.

    Args:
        query: float32, scaled.
        key: the gathered keys.
        hidden: ``[b, N or 1, 1, Q, columns]``, what a query does not see of the last keys, as
            many as there are columns.
        bias: ``[b, H, Q, P]``, added to the scores.
        sinks: ``[H]``.
        certain: every query is known to see a key.
    """
    b, queries, heads, dim = query.shape
    _, kv_heads, tokens, _ = key.values.shape
    group = heads // kv_heads
    packed = query.view(b, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = _scores(packed.reshape(b, kv_heads, group * queries, dim), key)
    tiled = scores.view(b, kv_heads, group, queries, tokens)
    if bias is not None:
        tiled += bias.view(b, kv_heads, group, queries, tokens)
    if hidden is not None:
        tiled[..., tokens - hidden.shape[-1] :].masked_fill_(hidden, -math.inf)

    # softmax, not exp, which crawls where results are denormal; the largest weight is
    # exp(0) / sum and gives the sum back
    largest = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    log_sum_exp = largest - weights.amax(-1, keepdim=True).log_()
    nothing = None
    if not certain:
        nothing = largest == -math.inf
        log_sum_exp.masked_fill_(nothing, -math.inf)
    if sinks is not None:
        sink = sinks.to(torch.float32).view(kv_heads, group, 1).expand(-1, -1, queries)
        total = torch.logaddexp(log_sum_exp, sink.reshape(kv_heads, group * queries, 1))
        weights *= (log_sum_exp - total).exp_()
        log_sum_exp = total
    return Weighing(weights, log_sum_exp, nothing)


def combine(weighing: Weighing, value: Side, queries: int) -> Tensor:
    """Weighted values, ``[b, Q, H, D]``."""
    output = _weighted(weighing.weights, value)
    if weighing.nothing is not None:
        output.masked_fill_(weighing.nothing, 0.0)
    b, kv_heads, rows, dim = output.shape
    output = output.view(b, kv_heads, rows // queries, queries, dim).permute(0, 3, 1, 2, 4)
    return output.reshape(b, queries, -1, dim)


def _scores(query: Tensor, key: Side) -> Tensor:
    """Query ``[b, N, R, D]`` times keys: ``[b, N, R, P]``."""
    raw = query
    if key.scale is not None and key.scale.dim() == 4:
        query = query * key.scale
    scores = torch.bmm(query.flatten(0, 1), key.values.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*query.shape[:3], -1)
    if key.scale is not None and key.scale.dim() == 3:
        scores *= key.scale[:, :, None]
    if key.zero_point is None:
        return scores
    if key.zero_point.dim() == 4:
        return scores.add_((raw * key.zero_point).sum(-1, keepdim=True))
    return scores.addcmul_(raw.sum(-1, keepdim=True), key.zero_point[:, :, None])


def _weighted(weights: Tensor, value: Side) -> Tensor:
    """Weights ``[b, N, R, P]`` times values: ``[b, N, R, D]``. The weights are overwritten."""
    offset = None
    if value.zero_point is not None:
        zero_point = value.zero_point
        if zero_point.dim() == 4:
            offset = weights.sum(-1, keepdim=True) * zero_point
        else:
            offset = (weights * zero_point[:, :, None]).sum(-1, keepdim=True)
    if value.scale is not None and value.scale.dim() == 3:
        weights *= value.scale[:, :, None]
    output = torch.bmm(weights.flatten(0, 1), value.values.flatten(0, 1))
    output = output.view(*weights.shape[:3], -1)
    if value.scale is not None and value.scale.dim() == 4:
        output *= value.scale
    return output if offset is None else output.add_(offset)
