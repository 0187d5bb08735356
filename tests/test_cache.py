"""Block pool, block tables, statistics and the paged tensors."""

from __future__ import annotations

import mmap
import random
import re
from pathlib import Path

import pytest
import torch

from ascend_kv.cache.blocks import BlockPool
from ascend_kv.cache.huge_pages import prefer_huge_pages
from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.stats import CacheStats
from ascend_kv.cache.tables import ContiguousTables, PagedTables, make_tables
from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry, format_spec


def test_pool_hands_out_every_block_once_and_reuses_the_last_freed() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (0, 3)
    pool.release(1)
    pool.release(0)
    assert [pool.allocate(), pool.allocate()] == [0, 1]


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (1, 0)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (0, 1)


@pytest.mark.parametrize("misuse", ["allocate", "release", "share"])
def test_pool_misuse_is_our_bug(misuse: str) -> None:
    pool = BlockPool(1)
    if misuse == "allocate":
        pool.allocate()
    with pytest.raises(AssertionError):
        getattr(pool, misuse)(*([] if misuse == "allocate" else [0]))


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(UsageError, match="num_blocks"):
        BlockPool(num_blocks)


def test_paged_tables_take_a_block_only_when_a_token_needs_it() -> None:
    tables = PagedTables(num_blocks=4, block_size=4)
    assert tables.reserve("a", 4)
    assert tables.table("a") == [0]
    assert tables.write("a", 0, 4) == [0, 1, 2, 3]
    assert tables.reserve("b", 1)
    assert tables.reserve("a", 5)
    assert tables.table("a") == [0, 2]
    assert tables.write("a", 4, 5) == [8]


def test_paged_tables_refuse_without_a_change() -> None:
    tables = PagedTables(num_blocks=2, block_size=4)
    assert tables.reserve("a", 4)
    before = tables.stats()
    assert not tables.reserve("b", 5)
    assert not tables.reserve("a", 9)
    assert tables.stats() == before
    assert tables.table("a") == [0]


def test_paged_admission_leaves_the_headroom() -> None:
    tables = PagedTables(num_blocks=3, block_size=4)
    assert tables.can_admit(8, headroom_blocks=1)
    assert not tables.can_admit(9, headroom_blocks=1)
    assert tables.can_admit(12)


def test_contiguous_tables_reserve_the_longest_sequence_in_adjacent_blocks() -> None:
    tables = ContiguousTables(num_blocks=11, block_size=4, max_model_len=17)
    assert (tables.num_blocks, tables.max_sequence_tokens) == (10, 20)  # the 11th fits no region
    assert tables.reserve("a", 1)
    assert tables.reserve("b", 20)
    assert not tables.can_admit(1)
    assert not tables.reserve("c", 1)
    tables.release("a")
    tables.release("b")
    for name in ("d", "e"):
        assert tables.reserve(name, 1)
        first = tables.table(name)[0]
        assert tables.table(name) == list(range(first, first + 5))
    assert not tables.reserve("d", 21)


def test_contiguous_regions_stay_adjacent_however_they_are_released() -> None:
    tables = ContiguousTables(num_blocks=20, block_size=2, max_model_len=8)
    rng = random.Random(0)
    held: list[str] = []
    for turn in range(300):
        if held and (rng.random() < 0.5 or len(held) == 5):
            tables.release(held.pop(rng.randrange(len(held))))
        else:
            name = str(turn)
            assert tables.reserve(name, 3)
            held.append(name)
            blocks = tables.table(name)
            assert blocks == list(range(blocks[0], blocks[0] + 4)) and blocks[0] % 4 == 0


def test_stats_count_blocks_tokens_and_waste() -> None:
    tables = PagedTables(num_blocks=10, block_size=4)
    assert tables.stats().utilisation == 1.0
    tables.reserve("a", 6)
    tables.write("a", 0, 5)
    stats = tables.stats()
    assert stats == CacheStats(10, 2, 4, 5, 1)
    assert stats.utilisation == pytest.approx(5 / 8)
    tables.release("a")
    assert tables.stats() == CacheStats(10, 0, 4, 0, 0)


def test_random_use_never_gives_a_slot_to_two_sequences() -> None:
    rng = random.Random(1)
    tables = PagedTables(num_blocks=23, block_size=3)
    lengths: dict[str, int] = {}
    owner: dict[int, tuple[str, int]] = {}
    for turn in range(2000):
        name = f"s{rng.randrange(8)}"
        if name in lengths and rng.random() < 0.2:
            tables.release(name)
            owner = {slot: who for slot, who in owner.items() if who[0] != name}
            del lengths[name]
            continue
        start = lengths.get(name, 0)
        stop = start + rng.randrange(1, 6)
        if not tables.reserve(name, stop):
            continue
        for token, slot in enumerate(tables.write(name, start, stop), start):
            assert slot not in owner, f"turn {turn}: slot {slot} has an owner"
            owner[slot] = (name, token)
        lengths[name] = stop
        stats = tables.stats()
        assert stats.used_tokens == sum(lengths.values()) == len(owner)
        assert stats.used_blocks == sum(-(-n // 3) for n in lengths.values())
    assert len(lengths) > 2


def test_unknown_allocator_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match="paged, contiguous"):
        make_tables("slab", 4, 4, 4)


def test_contiguous_cache_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="max_model_len"):
        make_tables("contiguous", 4, 4, 17)


GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=40,
    hidden_size=240,
    vocab_size=10,
    max_position_tokens=128,
    dtype="float32",
    layer_windows=(None, None),
)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("granularity", ["token", "token_head"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_allocated_bytes_equal_the_geometry(name: str, granularity: str, symmetric: bool) -> None:
    formats = (format_spec(name, granularity, symmetric), format_spec("float16"))
    cache = PagedKVCache(GEOMETRY, formats, num_blocks=5, block_size=8)
    assert cache.allocated_bytes == 5 * GEOMETRY.block_bytes(formats, 8)
    assert cache.bytes_by_layer == tuple(5 * 8 * spec.token_bytes(3, 40) for spec in formats)
    assert cache.layers[0].key.shape == (5, 3, 8, 40)


@pytest.mark.parametrize("size", [2, 5, 8, 20])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_have_the_bytes_of_the_geometry(size: int, symmetric: bool) -> None:
    formats = (format_spec("int8", "group", symmetric, group_size=size),) * 2
    cache = PagedKVCache(GEOMETRY, formats, num_blocks=5, block_size=7)
    assert cache.allocated_bytes == 5 * GEOMETRY.block_bytes(formats, 7)
    for scale in (cache.layers[0].key_scale, cache.layers[1].value_scale):
        assert scale is not None and scale.shape == (5, 3, 7, 40 // size)
    assert (cache.layers[0].value_zero_point is None) == symmetric


@pytest.mark.parametrize("granularity", ["layer", "head", "token", "token_head", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_static_scales_have_the_bytes_of_the_geometry(granularity: str, symmetric: bool) -> None:
    spec = format_spec("int8", granularity, symmetric, "static")
    shape = spec.scale_shape(3, 40, 19)
    given = {name: torch.ones(shape) for name in ("key_scale", "value_scale")}
    if not symmetric:
        given |= {name: torch.zeros(shape) for name in ("key_zero_point", "value_zero_point")}
    formats = (spec, format_spec("float16"))
    cache = PagedKVCache(GEOMETRY, formats, 5, 7, static_scales=[given, {}])
    expected = 5 * GEOMETRY.block_bytes(formats, 7) + GEOMETRY.static_bytes(formats, 19)
    assert cache.allocated_bytes == expected
    blocks = cache.layers[0].block_tensors
    assert all(len(tensor) == 5 for tensor in blocks)
    assert sum(tensor.nbytes for tensor in blocks) == 5 * 7 * spec.token_bytes(3, 40)


def test_int8_layer_holds_codes_and_scales_of_the_documented_shapes() -> None:
    formats = (format_spec("int8"), format_spec("int8", "token", symmetric=False))
    head, token = PagedKVCache(GEOMETRY, formats, num_blocks=5, block_size=8).layers
    assert head.key.dtype == torch.int8
    assert head.key_scale is not None and head.key_scale.shape == (5, 3, 8)
    assert head.key_scale.dtype == torch.float32
    assert head.key_zero_point is None
    assert token.key_scale is not None and token.key_scale.shape == (5, 1, 8)
    assert token.value_zero_point is not None and token.value_zero_point.shape == (5, 1, 8)


SMAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.is_file(), reason="Linux tells what it was told"
)
def test_large_caches_ask_for_huge_pages() -> None:
    def flags(address: int) -> list[str]:
        """What the kernel was told about the memory at ``address``."""
        found = False
        for line in SMAPS.read_text().splitlines():
            if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                found = int(match[1], 16) <= address < int(match[2], 16)
            elif found and line.startswith("VmFlags:"):
                return line.split()[1:]
        return []

    large = torch.empty(64 << 20, dtype=torch.int8)
    if "hg" in flags(large.data_ptr() + large.nbytes // 2):
        pytest.skip("torch asks for them everywhere")
    assert prefer_huge_pages(large) is large
    if "hg" not in flags(large.data_ptr() + large.nbytes // 2):
        assert not Path("/sys/kernel/mm/transparent_hugepage").is_dir()  # no kernel for it
    small = torch.empty(1000, dtype=torch.int8)
    assert prefer_huge_pages(small) is small and "hg" not in flags(small.data_ptr())
