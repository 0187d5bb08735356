"""How the reference of ``paged_attention`` cuts a batch into tiles, and attends over one tile.

Decodes (one query a sequence) are sorted by the blocks they read and taken in groups: large
enough that the cost of the calls is spread, small enough that the padded, converted keys stay
in the caches of the CPU. Everything else goes sequence by sequence, tiled over its queries.

Letters beyond geometry.py: b sequences of a tile, Q queries of each, P tokens gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ascend_kv.ops.attention_math import Side, Weighing, combine, gather_side, weigh
from ascend_kv.ops.attention_operands import Operands, bias_of, hide, unseen
from ascend_kv.ops.paged import gather

Tensor = torch.Tensor

# In elements; measured on two Xeon cores with 4 MiB of second-level cache. A group of decodes
# costs as much in calls as converting PADDING_ELEMENTS, so it is closed before padding wastes
# more.
GROUP_ELEMENTS = 1 << 21
PADDING_ELEMENTS = 1 << 18
# The scores of one tile of a prefill, but no less than MIN_TILE_QUERIES queries.
SCORE_ELEMENTS = 1 << 19
MIN_TILE_QUERIES = 16
# Converted keys of one sequence; above it, KV heads are taken a few at a time.
SEQUENCE_ELEMENTS = 1 << 24


class Decode(NamedTuple):
    """A sequence with one query: what it reads. Sorts by the number of blocks."""

    num_blocks: int
    row: int
    start: int
    kv_length: int
    first_block: int


class Placed(NamedTuple):
    """Where a group of decodes reads."""

    starts: Tensor  # [b] rows of the queries
    blocks: Tensor  # [b, n]
    positions: Tensor  # [b, N or 1, P] of the keys; anything where no token is
    outside: Tensor | None  # [b, P], no token of the sequence; None: all are
    hidden: Tensor | None  # [b, N or 1, 1, 1, P], outside or not seen; None: all are seen


def attend_all(
    o: Operands, block_tables: Tensor, query_lengths: Sequence[int], kv_lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]`` and log-sum-exp ``[T, H]`` of the whole batch, both float32."""
    _, kv_heads, block_size, _ = o.key_cache.shape
    head_dim = o.query.shape[2]
    longest = max(kv_lengths, default=0)
    if kv_heads > 1 and kv_heads * longest * head_dim > SEQUENCE_ELEMENTS:
        step = max(1, SEQUENCE_ELEMENTS // (longest * head_dim))
        parts = [
            attend_all(o.heads(low, low + step), block_tables, query_lengths, kv_lengths)
            for low in range(0, kv_heads, step)
        ]
        outputs, sums = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(sums, 1)

    output = torch.zeros_like(o.query, memory_format=torch.contiguous_format)
    log_sum_exp = unseen(o)
    decodes = []
    start = 0
    for row, (queries, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        if queries == 1 and cached:
            first = o.first_seen(cached - 1) // block_size
            decodes.append(Decode(-(-cached // block_size) - first, row, start, cached, first))
        elif queries and cached:
            rows = slice(start, start + queries)
            _prefill(o, block_tables[row : row + 1], rows, cached, output, log_sum_exp)
        start += queries
    for group in decode_groups(decodes, kv_heads * block_size * head_dim):
        _decode(o, block_tables, group, output, log_sum_exp)
    return output, log_sum_exp


def decode_groups(decodes: list[Decode], block_elements: int) -> Iterator[list[Decode]]:
    """Cut into groups of like length, longest first; ``block_elements`` is N * S * D."""
    group: list[Decode] = []
    padding = 0
    for decode in sorted(decodes, reverse=True):
        if group:
            padding += group[0].num_blocks - decode.num_blocks
            size = (len(group) + 1) * group[0].num_blocks
            if (
                size * block_elements > GROUP_ELEMENTS
                or padding * block_elements > PADDING_ELEMENTS
            ):
                yield group
                group, padding = [], 0
        group.append(decode)
    if group:
        yield group


def _decode(
    o: Operands, block_tables: Tensor, group: list[Decode], output: Tensor, log_sum_exp: Tensor
) -> None:
    """Fill in the rows of one group of decodes."""
    starts, blocks, positions, outside, hidden = _place(o, block_tables, group)
    in_order = o.key_positions is None and not any(d.first_block for d in group)
    bias = bias_of(
        o,
        lambda x: x.index_select(0, starts)[:, None],
        positions,
        0 if in_order else None,
        outside,
    )
    query = o.query.index_select(0, starts)[:, None]

    # one side at a time: the values take the keys' place in the CPU's caches
    key = gather_side(o.key_cache, o.key_scale, o.key_zero_point, blocks)
    weighing = weigh(query, key, hidden, bias, o.sinks, o.sees_a_key)
    del key
    value = gather_side(o.value_cache, o.value_scale, o.value_zero_point, blocks)
    if outside is not None:
        _clear(value, outside, group, o)
    output.index_copy_(0, starts, combine(weighing, value, 1)[:, 0])
    log_sum_exp.index_copy_(0, starts, weighing.log_sum_exp.view(len(group), -1))


def _place(o: Operands, block_tables: Tensor, group: list[Decode]) -> Placed:
    device = o.query.device
    block_size = o.key_cache.shape[2]
    longest = group[0].num_blocks
    numbers = [number for decode in group for number in decode]
    lists = torch.tensor(numbers, dtype=torch.int64, device=device).view(len(group), -1)
    counts, rows, starts, lengths, firsts = lists.unbind(1)
    columns = torch.arange(longest, device=device)[None]
    if group[-1].num_blocks < longest:  # pad with a block of the sequence's own
        columns = torch.where(columns < counts[:, None], columns, 0)
    blocks = block_tables[rows[:, None], columns + firsts[:, None]]

    index = torch.arange(longest * block_size, device=device) + (firsts * block_size)[:, None]
    outside = hidden = None
    if any(d.kv_length != (d.first_block + longest) * block_size for d in group):
        outside = index >= lengths[:, None]
        hidden = outside[:, None, None, None]
    positions = index[:, None]
    if o.key_positions is not None:
        positions = gather(o.key_positions, blocks, torch.int64)
    if o.window or not o.ordered:
        asked = lengths - 1
        if o.query_positions is not None:
            asked = o.query_positions.index_select(0, starts)
        hidden = hide(o, positions, asked[:, None], hidden)
    return Placed(starts, blocks, positions, outside, hidden)


class Tile(NamedTuple):
    """Some queries of one sequence, and the tokens that any of them may see."""

    rows: slice  # of the queries
    first: int
    last: int  # exclusive
    weighing: Weighing  # over these tokens


def sequence_tiles(o: Operands, table: Tensor, rows: slice, kv_length: int) -> Iterator[Tile]:
    """The weights of the queries ``rows`` of one sequence, ``table`` being its row alone."""
    device = o.query.device
    count = rows.stop - rows.start
    before = kv_length - count  # cached before this step
    base, blocks = _blocks_read(o, table, rows, kv_length)
    length = kv_length - base
    key = gather_side(o.key_cache, o.key_scale, o.key_zero_point, blocks).tokens(0, length)
    positions = torch.arange(base, kv_length, device=device)[None, None]
    if o.key_positions is not None:
        positions = gather(o.key_positions, blocks, torch.int64)[:, :, :length]
    step = max(MIN_TILE_QUERIES, SCORE_ELEMENTS // (o.query.shape[1] * length))
    for low in range(0, count, step):
        high = min(low + step, count)
        tile = slice(rows.start + low, rows.start + high)
        # tokens that none of the tile's queries sees are left out
        left = max(0, o.first_seen(before + low) - base)
        right = before + high - base if o.causal and o.ordered else length
        seen = positions[:, :, left:right]
        bias = bias_of(
            o,
            partial(_one_sequence, tile),
            seen,
            base + left if o.key_positions is None else None,
            None,
        )
        hidden = None
        if o.causal or o.window:
            if o.query_positions is None:
                asked = torch.arange(before + low, before + high, device=device)[None]
            else:
                asked = o.query_positions[tile][None]
            # in order and without a window, only the diagonal at the end can be hidden
            diagonal = high - low if o.ordered and not o.window else right - left
            hidden = hide(o, seen[:, :, -diagonal:], asked, None)
        weighing = weigh(
            o.query[tile][None], key.tokens(left, right), hidden, bias, o.sinks, o.sees_a_key
        )
        yield Tile(tile, base + left, base + right, weighing)


def _one_sequence(tile: slice, x: Tensor) -> Tensor:
    return x[tile][None]


def _blocks_read(o: Operands, table: Tensor, rows: slice, kv_length: int) -> tuple[int, Tensor]:
    """The first token read, at the beginning of a block, and the blocks ``[1, n]`` from there."""
    block_size = o.key_cache.shape[2]
    first = o.first_seen(kv_length - (rows.stop - rows.start)) // block_size
    return first * block_size, table[:, first : -(-kv_length // block_size)]


def _prefill(
    o: Operands, table: Tensor, rows: slice, kv_length: int, output: Tensor, log_sum_exp: Tensor
) -> None:
    """Fill in the rows of one sequence, tiled over its queries."""
    base, blocks = _blocks_read(o, table, rows, kv_length)
    value = gather_side(o.value_cache, o.value_scale, o.value_zero_point, blocks)
    for tile, first, last, weighing in sequence_tiles(o, table, rows, kv_length):
        queries = tile.stop - tile.start
        output[tile] = combine(weighing, value.tokens(first - base, last - base), queries)[0]
        log_sum_exp[tile] = weighing.log_sum_exp.view(-1, queries).transpose(0, 1)


def _clear(value: Side, outside: Tensor, group: list[Decode], o: Operands) -> None:
    """Zero what belongs to no token of its sequence: a weight of 0 times NaN would be NaN."""
    for scale in (value.scale, value.zero_point):
        if scale is not None and scale.dim() == 3:
            scale.masked_fill_(outside[:, None], 0.0)
    if value.scale is None or o.codes_may_be_nan:
        # a call for each sequence: masking all values costs far more
        for values, decode in zip(value.values, group, strict=True):
            values[:, decode.kv_length - decode.first_block * o.value_cache.shape[2] :] = 0.0
