"""The arguments of one call of attention, and what a query sees and is biased by.

Shared by all ways to cut the work into tiles; ``paged_attention`` states the formula. Letters
beyond geometry.py: b sequences of a tile, Q queries of each, P tokens gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ascend_kv.errors import UsageError
from ascend_kv.ops.attention_offset import lacking_at

Tensor = torch.Tensor


class Operands(NamedTuple):
    """The tensors of one call, named as in ``paged_attention``; queries are scaled float32."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    key_zero_point: Tensor | None
    value_zero_point: Tensor | None
    sinks: Tensor | None
    score_bias: Tensor | None
    key_positions: Tensor | None
    query_positions: Tensor | None
    causal: bool
    window: int
    key_offset: Tensor | None = None
    rotary_frequencies: Tensor | None = None
    offset_query: Tensor | None = None

    @property
    def ordered(self) -> bool:
        """Whether the n-th cached token is at position n, known without looking."""
        return self.key_positions is None and self.query_positions is None

    @property
    def sees_a_key(self) -> bool:
        """Whether every query is known to see one, at least itself."""
        return self.ordered and self.score_bias is None and self.key_offset is None

    @property
    def codes_may_be_nan(self) -> bool:
        """Whether what no token has written may be NaN whatever its scale: FP8 and floats."""
        return self.value_cache.dtype.is_floating_point

    def first_seen(self, query_position: int) -> int:
        """The first key that a query at this position may see, where ``ordered``."""
        if self.window == 0 or not self.ordered:
            return 0
        return max(0, query_position + 1 - self.window)

    def heads(self, low: int, high: int) -> Operands:
        """The same call for KV heads ``low`` to ``high`` and their queries."""
        group = self.query.shape[1] // self.key_cache.shape[1]

        def kv(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[1] == 1 else x[:, low:high]

        queries = slice(low * group, high * group)
        return self._replace(
            query=self.query[:, queries],
            key_cache=self.key_cache[:, low:high],
            value_cache=self.value_cache[:, low:high],
            key_scale=kv(self.key_scale),
            value_scale=kv(self.value_scale),
            key_zero_point=kv(self.key_zero_point),
            value_zero_point=kv(self.value_zero_point),
            sinks=None if self.sinks is None else self.sinks[queries],
            score_bias=None if self.score_bias is None else self.score_bias[:, queries],
            key_positions=kv(self.key_positions),
            key_offset=None if self.key_offset is None else self.key_offset[low:high],
            offset_query=None if self.offset_query is None else self.offset_query[:, queries],
        )


def unseen(o: Operands) -> Tensor:
    """Log-sum-exp of queries that see nothing."""
    if o.sinks is None:
        return o.query.new_full(o.query.shape[:2], -math.inf)
    return o.sinks.to(torch.float32).expand(o.query.shape[:2]).clone()


def hide(o: Operands, positions: Tensor, asked: Tensor, hidden: Tensor | None) -> Tensor | None:
    """Which keys at ``positions`` [b, N or 1, P] the queries at ``asked`` [b, Q] do not see.

    ``[b, N or 1, 1, Q, P]``, joined with what is ``hidden`` already.
    """
    distance = asked[:, None, None, :, None] - positions[:, :, None, None]
    if o.causal:
        later = distance < 0
        hidden = later if hidden is None else hidden | later
    if o.window:
        too_early = distance >= o.window
        hidden = too_early if hidden is None else hidden | too_early
    return hidden


def bias_of(
    o: Operands,
    take: Callable[[Tensor], Tensor],
    positions: Tensor,
    first: int | None,
    outside: Tensor | None,
) -> Tensor | None:
    """What is added to the scores of a tile, ``[b, H, Q, P]``, or None.

    ``take`` brings what is ``[T, ...]`` to the tile's ``[b, Q, ...]``; the rest as in ``bias_at``.
    """
    if o.score_bias is not None:
        return bias_at(take(o.score_bias), positions, first, outside)
    if o.key_offset is None or o.rotary_frequencies is None:
        return None
    query = take(o.query if o.offset_query is None else o.offset_query)
    return lacking_at(query, o.key_offset, o.rotary_frequencies, positions)


def bias_at(rows: Tensor, positions: Tensor, first: int | None, outside: Tensor | None) -> Tensor:
    """Bias ``[b, Q, H, any]`` at ``positions`` [b, N or 1, P]: ``[b, H, Q, P]``.

    ``first`` is given when the positions are first, first + 1, ... in every sequence.
    """
    rows = rows.transpose(1, 2)
    count = positions.shape[2]
    if first is not None:
        rows = rows[..., first : first + count]
        return pad(rows, (0, count - rows.shape[3]))
    if outside is not None:
        positions = positions.masked_fill(outside[:, None], 0)
    b, heads, queries, width = rows.shape
    if (
        rows.device.type == "cpu"
        and not 0 <= int(positions.amin()) <= int(positions.amax()) < width
    ):
        given = f"positions for {width} keys"
        raise UsageError("score_bias", given, f"more than {int(positions.amax())}, every position")
    at = positions.repeat_interleave(heads // positions.shape[1], 1)
    return rows.gather(3, at[:, :, None].expand(b, heads, queries, count))
