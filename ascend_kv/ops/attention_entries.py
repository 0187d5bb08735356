"""``paged_attention`` where every query has a list of the cached tokens it may attend to.

The listed tokens are gathered for each query by itself, some queries at a time: a sparse
attention reads what it selected and not the whole sequence. Letters as in
``attention_operands``; here each query is a sequence of its own, P = E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ascend_kv.errors import UsageError
from ascend_kv.ops.attention_math import combine, read_side, weigh
from ascend_kv.ops.attention_operands import Operands, bias_of, hide, unseen
from ascend_kv.ops.paged import check_blocks, gather_tokens

Tensor = torch.Tensor

# Converted keys of a tile; stays in the caches of the CPU.
TILE_ELEMENTS = 1 << 20


class Asking(NamedTuple):
    """What is known of each query, ``[T]`` int64."""

    rows: Tensor  # of the block tables: the sequence
    positions: Tensor
    kv_lengths: Tensor


def attend_entries(
    o: Operands,
    entries: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]`` and log-sum-exp ``[T, H]`` of the whole batch, both float32."""
    output = torch.zeros_like(o.query, memory_format=torch.contiguous_format)
    log_sum_exp = unseen(o)
    tokens, columns = entries.shape
    if tokens * columns == 0:
        return output, log_sum_exp
    _, kv_heads, block_size, _ = o.key_cache.shape
    head_dim = o.query.shape[2]
    asking = _asking(o, query_lengths, kv_lengths)
    _check_entries(entries, asking.kv_lengths)
    if not any(kv_lengths):
        return output, log_sum_exp
    step = max(1, TILE_ELEMENTS // (kv_heads * columns * head_dim))
    for low in range(0, tokens, step):
        tile = slice(low, low + step)
        listed = entries[tile].to(torch.int64)
        absent = listed < 0
        listed.clamp_(min=0)
        block = block_tables[asking.rows[tile][:, None], listed // block_size]
        block = block.to(torch.int64).masked_fill_(absent, 0)
        check_blocks(block, o.key_cache.shape[0])
        place = block, listed % block_size
        _attend_tile(o, tile, listed, absent, place, asking, output, log_sum_exp)
    return output, log_sum_exp


def _asking(o: Operands, query_lengths: Sequence[int], kv_lengths: Sequence[int]) -> Asking:
    device, tokens = o.query.device, o.query.shape[0]
    counts, lengths = torch.tensor([query_lengths, kv_lengths], device=device)
    sequences = torch.arange(len(counts), device=device)
    rows = torch.repeat_interleave(sequences, counts, output_size=tokens)
    # the last query of a sequence is at its last token
    after = (counts.cumsum(0) - lengths)[rows]
    positions = torch.arange(tokens, device=device) - after
    if o.query_positions is not None:
        positions = o.query_positions.to(torch.int64)
    return Asking(rows, positions, lengths[rows])


def _check_entries(entries: Tensor, kv_lengths: Tensor) -> None:
    """On a CPU only: elsewhere it would synchronise the device."""
    if entries.device.type != "cpu":
        return
    wrong = (entries < -1) | (entries >= kv_lengths[:, None])
    if wrong.any():
        query, column = (int(i) for i in wrong.nonzero()[0])
        legal = f"0 to {int(kv_lengths[query]) - 1}, or -1, for query {query}"
        raise UsageError("entries", int(entries[query, column]), legal)


def _attend_tile(
    o: Operands,
    tile: slice,
    listed: Tensor,
    absent: Tensor,
    place: tuple[Tensor, Tensor],
    asking: Asking,
    output: Tensor,
    log_sum_exp: Tensor,
) -> None:
    """Fill in the rows of some queries; ``place`` is block and offset of each entry."""

    def read(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return gather_tokens(x, *place, dtype)

    positions = listed[:, None]
    if o.key_positions is not None:
        positions = read(o.key_positions, torch.int64)
    hidden = hide(o, positions, asking.positions[tile][:, None], absent[:, None, None, None])
    bias = bias_of(o, lambda x: x[tile][:, None], positions, None, absent)
    key = read_side(o.key_cache, o.key_scale, o.key_zero_point, read)
    weighing = weigh(o.query[tile][:, None], key, hidden, bias, o.sinks, False)
    value = read_side(o.value_cache, o.value_scale, o.value_zero_point, read)
    # what stands in for an absent entry may be NaN, and its weight of 0 would not help
    if value.scale is None or o.codes_may_be_nan:
        value.values.masked_fill_(absent[:, None, :, None], 0.0)
    for scale in (value.scale, value.zero_point):
        if scale is not None and scale.dim() == 3:
            scale.masked_fill_(absent[:, None], 0.0)
    output[tile] = combine(weighing, value, 1)[:, 0]
    log_sum_exp[tile] = weighing.log_sum_exp.flatten(1)
