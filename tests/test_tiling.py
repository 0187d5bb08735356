"""The kernels' tilings by themselves: thousands of random sizes through the compiled functions.

What must hold for any sizes: UB is enough, the limits of a copy are kept, all work is given out
once, no core is launched for nothing, and where there is work for all cores all of them have some.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from kernel_harness import (
    GRANULARITIES,
    UB_BYTES,
    core_of,
    core_range,
    needs_compiler,
    run_tiling,
    tilings,
    usable_ub,
)

CompressTiling, DecompressTiling = tilings.CompressTiling, tilings.DecompressTiling
LoadTiling, QuantizeTiling, StoreTiling = (
    tilings.LoadTiling,
    tilings.QuantizeTiling,
    tilings.StoreTiling,
)
pytestmark = needs_compiler

HEAD_DIMS = [1, 8, 17, 40, 64, 72, 80, 96, 128, 192, 256, 512]
MAX_COPY_BLOCKS = 4095
MAX_COPY_BYTES = 2097151


def draw_tokens(draw: random.Random) -> int:
    return draw.choice([draw.randrange(1, 50), draw.randrange(1, 5000), draw.randrange(1 << 24)])


def draw_limits(draw: random.Random) -> tuple[int, int]:
    return draw.choice([1, 7, 40, 48, 50, 64]), draw.choice([UB_BYTES, UB_BYTES, 160 * 1024])


def check_ub(t: Any, ub_bytes: int) -> None:
    assert 0 < t.ub_bytes <= usable_ub(ub_bytes)


def test_core_ranges_cover_everything_once() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        cores, granule = draw.randrange(1, 65), draw.choice([1, 1, 8])
        units = draw_tokens(draw)
        ranges = [core_range(units, cores, c, granule) for c in range(cores)]
        assert ranges[0][0] == 0 and ranges[-1][1] == units
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        sizes = [end - begin for begin, end in ranges]
        assert max(sizes) - min(sizes) <= 2 * granule - 1
        if granule == 1:
            unit = draw.randrange(units) if units else 0
            if units:
                begin, end = ranges[core_of(units, cores, unit)]
                assert begin <= unit < end


def test_ranges_of_parts_cover_everything_once() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        windows, parts = draw.randrange(1, 5000), draw.choice([1, 2, 3, 4, 8, 12, 16, 32])
        cores = min(draw.randrange(1, 65), windows * parts)
        ranges = [tilings.parts_range(windows, parts, cores, c) for c in range(cores)]
        assert ranges[0][0] == 0 and ranges[-1][1] == windows * parts
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        sizes = [end - begin for begin, end in ranges]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
        touched = sum((end - 1) // windows - begin // windows + 1 for begin, end in ranges)
        assert touched <= parts + cores - math.gcd(parts, cores)


def quantize_items(t: QuantizeTiling) -> tuple[int, int]:
    """Tiles of a group, and of all groups, where groups lie on several tiles."""
    length, tile = (t.cols, t.tile_cols) if t.mode == 1 else (t.tokens, t.tile_rows)
    tiles = -(-length // tile)
    return tiles, tiles * t.groups


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_kv_cache_quantize(granularity: str) -> None:
    draw = random.Random(granularity)
    number = GRANULARITIES.index(granularity)
    for _ in range(1500):
        dim = draw.choice(HEAD_DIMS)
        batch, heads = draw.randrange(1, 65), draw.choice([1, 2, 7, 8, 32, 128])
        tokens, (cores, ub) = draw_tokens(draw), draw_limits(draw)
        group = draw.choice([g for g in (1, 8, 16, 32, 64, 128) if dim % g == 0])
        static, element = draw.random() < 0.3, draw.randrange(3)
        sizes = [batch, heads, tokens, dim, number, group, element, True, static]
        t = run_tiling("kv_cache_quantize", QuantizeTiling, sizes, cores, ub)
        if tokens == 0:
            assert t.cores == 0
            continue
        check_ub(t, ub)
        assert 1 <= t.cores <= cores and t.passes in ((1,) if static else (1, 3))
        assert t.cols * 4 <= MAX_COPY_BYTES or t.mode == 1
        assert t.tile_rows <= MAX_COPY_BLOCKS
        if t.mode in (1, 3):
            tiles, items = quantize_items(t)
            assert t.cores == min(cores, items)
            check_shares(draw, t, tiles, items)
        if tokens * heads * batch >= 16 * 1024 and dim >= 64:
            assert t.cores == cores


def check_shares(draw: random.Random, t: QuantizeTiling, tiles: int, items: int) -> None:
    """A group never lies on more cores than the workspace has places for."""
    for group in {0, t.groups - 1, draw.randrange(t.groups)}:
        first = core_of(items, t.cores, group * tiles)
        last = core_of(items, t.cores, (group + 1) * tiles - 1)
        assert last - first + 1 <= t.share
    lanes = 1 if t.mode == 1 else t.stride
    assert t.workspace_bytes == 3 * t.groups * t.share * lanes * 4


def test_kv_cache_store() -> None:
    draw = random.Random(1)
    for _ in range(6000):
        dim, heads = draw.choice(HEAD_DIMS), draw.choice([1, 2, 7, 8, 32, 128])
        tokens, (cores, ub) = draw_tokens(draw), draw_limits(draw)
        mode, sides = draw.randrange(5), draw.choice([1, 2])
        element = draw.randrange(3)
        cache = element if mode == 0 else (element + 1) % 3 if mode == 1 else 3
        stride = heads * dim * draw.choice([1, 3])
        sizes = [
            tokens,
            heads,
            dim,
            draw.choice([1, 16, 128]),
            stride,
            stride,
            mode,
            element,
            cache,
        ]
        sizes += [draw.random() < 0.5, False, True, draw.choice([0, 4, 8]), sides]
        t = run_tiling("kv_cache_store", StoreTiling, sizes, cores, ub)
        if tokens == 0:
            assert t.cores == 0
            continue
        check_ub(t, ub)
        parts = 1 if mode == 3 else -(-heads // t.tile_heads)
        assert t.cores == min(cores, sides * parts * tokens)
        assert 1 <= t.tile_heads <= heads and 1 <= t.tile_tokens <= MAX_COPY_BLOCKS
        width = t.stride * (4 if cache == 2 else 1 if cache == 3 else 2)
        assert t.tile_heads * -(-width // 32) <= MAX_COPY_BLOCKS  # a token leaves in one copy
        assert t.tile_heads * t.stride * 4 <= MAX_COPY_BYTES


def test_kv_cache_load() -> None:
    draw = random.Random(2)
    for _ in range(6000):
        mode, offset = draw.randrange(5), draw.choice([0, 0, 1, 2])
        dim = draw.choice([d for d in HEAD_DIMS if not offset or d % 16 == 0])
        heads, batch = draw.choice([1, 2, 7, 8, 32, 128]), draw.randrange(1, 65)
        block, length = draw.choice([1, 16, 128, 512]), draw_tokens(draw)
        cores, ub = draw_limits(draw)
        element = draw.randrange(3)
        offset = 0 if mode == 0 else offset
        cache = element if mode == 0 else (element + 1) % 3 if mode == 1 else 3
        sizes = [batch, heads, dim, block, -(-length // block), length, mode, element, cache]
        sizes += [draw.random() < 0.5, False, True, offset, 2]
        t = run_tiling("kv_cache_load", LoadTiling, sizes, cores, ub)
        if length == 0:
            assert t.cores == 0
            continue
        check_ub(t, ub)
        check_block_tiles(t)
        parts = -(-heads // t.tile_heads)
        items = 2 * parts * batch * -(-length // block) * t.tiles_a_block
        assert t.cores == min(cores, items)
        # The busiest core has at most twice the rows of an even share of whole blocks, and a few.
        rows = 2 * batch * heads * -(-length // block) * min(block, length)
        busiest = -(-items // t.cores) * t.tile_tokens * t.tile_heads
        assert busiest <= 2 * rows / cores + 16 * t.tile_heads
        if cores == 48 and 48 % (2 * parts * batch) == 0 and 48 <= length <= block:
            assert t.cores == cores


def check_block_tiles(t: Any) -> None:
    """The tiles of a block cover it, none empty, none larger than its buffer."""
    tokens = min(t.block_size, t.length)
    starts = [
        n * tokens // t.tiles_a_block // t.alignment * t.alignment for n in range(t.tiles_a_block)
    ]
    ends = [*starts[1:], tokens]
    assert starts[0] == 0
    assert all(0 < b - a <= t.tile_tokens for a, b in zip(starts, ends, strict=True))


def test_hca_compress() -> None:
    draw = random.Random(3)
    for _ in range(6000):
        dim = draw.choice([64, 72, 80, 128, 192, 256, 512])
        ratio = draw.choice([2, 3, 4, 8, 16, 64, 128, 129, 500, 1000])
        windows, (cores, ub) = draw_tokens(draw), draw_limits(draw)
        overlap, bias = draw.random() < 0.5, draw.random() < 0.7
        sizes = [windows, draw.randrange(1, 65), dim, ratio, overlap, bias, True]
        sizes += [draw.choice([0, 64]), draw.randrange(3), draw.randrange(3), 1000]
        t = run_tiling("hca_compress", CompressTiling, sizes, cores, ub)
        if windows == 0:
            assert t.cores == 0
            continue
        check_ub(t, ub)
        parts = -(-dim // t.chunk)
        assert t.cores == min(cores, windows * parts)
        assert t.cores == cores or t.chunk == narrowest_part(dim, ratio)
        assert (t.joint == 1) == (parts > 1)
        assert parts == 1 or t.chunk % 16 == dim % 16 == 0
        assert t.fold == (64 // t.chunk if parts > 1 and t.chunk < 64 else 1)
        assert t.tile_rows % ratio == 0 or t.tile_rows < ratio
        assert t.tile_rows % t.fold == ratio % t.fold == 0
        assert t.tile_windows == max(1, t.tile_rows // ratio) <= t.finish_rows
        assert t.tile_rows <= MAX_COPY_BLOCKS
        check_rounds(t, parts)


def narrowest_part(dim: int, ratio: int) -> int:
    """Channels: whole sectors and vectors, of tokens side by side if a window has enough."""
    if dim % 16:
        return dim
    widths = [c for c in (16, 32) if dim % c == 0 and ratio % (64 // c) == 0 and ratio * c >= 512]
    return min([*widths, 64, dim])


def check_rounds(t: Any, parts: int) -> None:
    """All windows in few rounds; each core has room for its rows of a round."""
    rounds = -(-t.windows // t.round_windows)
    assert t.joint or rounds == 1
    pitch = -(-t.round_windows // 8) * 8
    assert t.workspace_bytes == (4 * (parts + 1) * pitch if t.joint else 0)
    ranges = [tilings.parts_range(t.round_windows, parts, t.cores, c) for c in range(t.cores)]
    busiest = max(end - begin for begin, end in ranges)
    assert t.kept_rows == (busiest if t.joint else t.tile_windows)
    # A round is as long as 32 KiB of rows allow, but for a row more and for equal rounds.
    assert rounds == 1 or 2 * (busiest + 1) * t.stride * 4 >= 32 * 1024


def test_hca_decompress() -> None:
    draw = random.Random(4)
    for _ in range(2000):
        entries, ratio = draw_tokens(draw), draw.choice([1, 2, 4, 128, 1000])
        cores, ub = draw_limits(draw)
        dim, size = draw.choice(HEAD_DIMS), draw.choice([2, 4])
        t = run_tiling("hca_decompress", DecompressTiling, [entries, dim, ratio, size], cores, ub)
        if entries == 0:
            assert t.cores == 0
            continue
        check_ub(t, ub)
        assert t.cores == min(cores, entries * t.parts) and 1 <= t.copies <= ratio
        starts = [n * ratio // t.parts for n in range(t.parts + 1)]
        assert all(a < b for a, b in itertools.pairwise(starts))
        if entries * ratio >= cores:
            assert t.cores == cores


def test_sizes_too_large_for_ub_are_reported() -> None:
    """Nothing is launched with a tile of nothing: the host has to look."""
    sizes = [5, 1, 100000, 16, 100000, 100000, 2, 0, 3, True, False, True, 0, 2]
    assert run_tiling("kv_cache_store", StoreTiling, sizes, 48, UB_BYTES).tile_tokens == 0
    sizes = [1, 1, 100000, 16, 1, 16, 2, 0, 3, True, False, True, 0, 2]
    assert run_tiling("kv_cache_load", LoadTiling, sizes, 48, UB_BYTES).tile_tokens == 0
    sizes = [5, 1, 100008, 4, False, True, True, 0, 0, 0, 1000]
    assert run_tiling("hca_compress", CompressTiling, sizes, 48, UB_BYTES).chunk == 0
    sizes = [1, 1, 100, 100000, GRANULARITIES.index("channel"), 0, 0, True, False]
    quantize = run_tiling("kv_cache_quantize", QuantizeTiling, sizes, 48, UB_BYTES)
    assert quantize.tile_rows == 0
