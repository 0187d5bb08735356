"""Slots and blocks by group: all or nothing, counted, given back."""

from __future__ import annotations

import random

import pytest

from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.compressed_layers import CompressedLayers, GroupBlocks
from ascend_kv.errors import UsageError

LAYERS = CompressedLayers(("window", "csa", "hca"), 24, 8, 16, 4, 8, 4, 16)


def make(slots: int = 3, csa: int = 10, hca: int = 4, size: int = 2) -> GroupTables:
    return GroupTables(LAYERS, GroupBlocks(slots, csa, hca, size))


def test_a_sequence_takes_a_slot_and_blocks_as_entries_need_them() -> None:
    tables = make()
    assert tables.reserve("a", 3)
    assert tables.group_tables("a") == {"csa": [], "hca": []}
    assert tables.reserve("a", 4)
    assert tables.group_tables("a") == {"csa": [0], "hca": []}
    assert tables.reserve("a", 33)
    assert tables.group_tables("a") == {"csa": [0, 1, 2, 3], "hca": [0]}
    assert tables.table("a") == [0]
    assert tables.reserve("b", 1) and tables.table("b") == [1]


def test_places_in_the_ring() -> None:
    tables = make()
    tables.reserve("a", 1)
    tables.reserve("b", 20)
    assert tables.write("b", 0, 10) == [8, 9, 10, 11, 12, 13, 14, 15, 8, 9]
    assert tables.write("b", 10, 11) == [10]


def test_what_does_not_fit_changes_nothing() -> None:
    tables = make(slots=2, csa=4, hca=1)
    assert tables.max_sequence_tokens == 4 * 2 * 4 + 3  # a ninth entry of "csa" has no place
    assert tables.reserve("a", 16) and tables.reserve("b", 8)
    before = tables.stats()
    assert not tables.reserve("a", 32)  # two blocks of "csa", one is left
    assert not tables.reserve("c", 0)  # no slot
    assert not tables.can_admit(1)
    tables.release("a")
    assert not tables.can_admit(32) and tables.can_admit(24)
    assert not tables.can_admit(24, headroom_blocks=1)
    assert tables.reserve("a", 16) and tables.stats() == before


def test_the_group_that_is_short_decides() -> None:
    tables = make(slots=3, csa=100, hca=1)
    assert tables.max_sequence_tokens == 2 * 16 + 15
    assert tables.reserve("a", 16)
    assert not tables.reserve("b", 16) and tables.reserve("b", 15)
    assert not tables.reserve("b", 16)


def test_statistics_by_group() -> None:
    tables = make(slots=4, csa=10, hca=4)
    tables.reserve("a", 21)
    tables.write("a", 0, 20)
    stats = tables.stats()
    groups = dict(stats.groups)
    assert set(groups) == {"window", "csa", "hca", "state"}
    assert groups["window"][:5] == (4, 1, 8, 8, 1)
    assert groups["csa"][:5] == (10, 3, 2, 5, 1)
    assert groups["hca"][:5] == (4, 1, 2, 1, 1)
    assert groups["state"][:5] == (4, 1, 1, 1, 1)
    assert stats[:5] == groups["csa"][:5]  # 3 of 10 is more than 1 of 4
    assert groups["csa"].utilisation == 5 / 6


def test_layers_with_a_window_only() -> None:
    layers = CompressedLayers(("window",), 24, 8, 16, 4, 8)
    tables = GroupTables(layers, GroupBlocks(2, 0, 0, 16))
    assert tables.max_sequence_tokens > 2**40 and tables.num_blocks == 2
    assert tables.reserve("a", 1000) and tables.group_tables("a") == {}
    with pytest.raises(UsageError):
        make(csa=0)


def test_any_order_of_calls_gives_everything_back() -> None:
    tables, rng, held = make(slots=5, csa=30, hca=6), random.Random(0), {}
    for _ in range(2000):
        name = str(rng.randrange(8))
        if name in held and rng.random() < 0.3:
            tables.release(name)
            del held[name]
            continue
        tokens = held.get(name, 0) + rng.randrange(1, 30)
        if tables.reserve(name, tokens):
            tables.write(name, held.get(name, 0), tokens)
            held[name] = tokens
        elif name not in held:
            assert not tables.holds(name)
        groups = dict(tables.stats().groups)
        assert groups["csa"].used_tokens == sum(n // 4 for n in held.values())
        assert groups["csa"].used_blocks == sum(-(-(n // 4) // 2) for n in held.values())
        assert groups["window"].used_tokens == sum(min(n, 8) for n in held.values())
        assert len({tables.table(name)[0] for name in held}) == len(held)
    for name in list(held):
        tables.release(name)
    assert all(one.used_blocks == one.used_tokens == 0 for _, one in tables.stats().groups)
