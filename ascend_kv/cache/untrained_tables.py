"""Tables of a cache that compresses dense layers: blocks by group, with those in between gone.

A sequence holds in each group the blocks of its sinks and of the latest tokens or entries, side by
side in one list: ``Compression.dropped_blocks`` says how many are missing between them. Blocks that
a sequence will need before its reserved tokens are there are held in reserve, so that a prompt that
has been admitted never has to wait.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping

from ascend_kv.cache.blocks import BlockPool
from ascend_kv.cache.stats import CacheStats
from ascend_kv.cache.tables import SequenceTables
from ascend_kv.untrained_compression import Compression


class _Holding:
    """The blocks of one sequence in one group."""

    def __init__(self) -> None:
        self.table: list[int] = []
        self.spare: list[int] = []
        self.dropped = 0
        self.used = 0

    @property
    def count(self) -> int:
        return len(self.table) + len(self.spare)


class _Group:
    """One pool of blocks and what every sequence holds of it."""

    def __init__(
        self, name: str, policy: Compression, num_blocks: int, block_size: int, step: int
    ) -> None:
        self.name, self.policy, self.block_size, self.step = name, policy, block_size, step
        self.pool = BlockPool(num_blocks)
        self.holdings: dict[str, _Holding] = {}
        self.used_tokens = 0

    def needed(self, start: int, stop: int) -> int:
        return self.policy.most_blocks(self.name, start, stop, self.step, self.block_size)

    def missing(self, sequence: str, start: int, stop: int) -> int:
        holding = self.holdings.get(sequence)
        return self.needed(start, stop) - (0 if holding is None else holding.count)

    def reserve(self, sequence: str, start: int, stop: int) -> None:
        """Drop what steps from ``start`` on do not need, and hold what they do up to ``stop``."""
        holding = self.holdings.setdefault(sequence, _Holding())
        kept = self.policy.sink_blocks(self.name, self.block_size)
        dropped = self.policy.dropped_blocks(self.name, start, self.block_size)
        gone = slice(kept, kept + dropped - holding.dropped)
        holding.spare += holding.table[gone]
        del holding.table[gone]
        holding.dropped = dropped
        needed = self.needed(start, stop)
        while holding.count > needed:
            self.pool.release(holding.spare.pop())
        while holding.count < needed:
            holding.spare.append(self.pool.allocate())

    def write(self, sequence: str, stop: int) -> None:
        """Take blocks for ``stop`` tokens out of the reserve."""
        holding = self.holdings[sequence]
        high = self.policy.high(self.name, stop)
        while (holding.dropped + len(holding.table)) * self.block_size < high:
            holding.table.append(holding.spare.pop(0))
        used = max(0, high - holding.dropped * self.block_size)
        self.used_tokens += used - holding.used
        holding.used = used

    def release(self, sequence: str) -> None:
        holding = self.holdings.pop(sequence)
        self.used_tokens -= holding.used
        for block in reversed(holding.table + holding.spare):
            self.pool.release(block)

    def stats(self) -> CacheStats:
        return CacheStats(
            self.pool.num_blocks,
            self.pool.num_used,
            self.block_size,
            self.used_tokens,
            len(self.holdings),
        )


class UntrainedTables(SequenceTables):
    """Hands out all that a sequence needs in every group, or nothing.

    As a ``SequenceTables`` it is the group "full": ``table`` are its blocks, and ``write`` gives
    the slots of tokens there.
    """

    def __init__(
        self, policy: Compression, blocks: Mapping[str, int], block_size: int, step: int
    ) -> None:
        """Every block is free.

        Args:
            policy: when and how far.
            blocks: by group, the blocks there are.
            block_size: tokens, or entries, a block.
            step: the most tokens of a sequence in one step.

        Raises:
            UsageError: a group without blocks.
        """
        super().__init__(blocks["full"], block_size)
        self._policy, self._step = policy, step
        self._groups = {
            name: _Group(name, policy, count, block_size, step) for name, count in blocks.items()
        }
        self._full = self._groups["full"]
        self._reserved: dict[str, int] = {}

    @property
    def max_sequence_tokens(self) -> int:
        return bisect_right(range(sys.maxsize), False, key=lambda n: not self._fits_alone(n)) - 1

    def _fits_alone(self, tokens: int) -> bool:
        return all(g.needed(0, tokens) <= g.pool.num_blocks for g in self._groups.values())

    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        return all(
            group.needed(0, num_tokens) + headroom_blocks * group.pool.num_blocks // self.num_blocks
            <= group.pool.num_free
            for group in self._groups.values()
        )

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        start = self._tokens.get(sequence, 0)
        stop = max(num_tokens, self._reserved.get(sequence, 0))
        groups = self._groups.values()
        if any(group.missing(sequence, start, stop) > group.pool.num_free for group in groups):
            return False
        for group in groups:
            group.reserve(sequence, start, stop)
        self._tokens[sequence], self._reserved[sequence] = start, stop
        return True

    def write(self, sequence: str, start: int, stop: int) -> list[int]:
        assert start == self._tokens[sequence], "what is compressed cannot be written again"
        assert stop <= self._reserved[sequence], "write() past what reserve() made room for"
        assert stop - start <= self._step, "more tokens than a step may have"
        self._tokens[sequence] = stop
        for group in self._groups.values():
            group.write(sequence, stop)
        return slots_of(
            self._policy, "full", self.table(sequence), start, range(start, stop), self.block_size
        )

    def table(self, sequence: str) -> list[int]:
        return self._full.holdings[sequence].table

    def group_tables(self, sequence: str) -> dict[str, list[int]]:
        return {name: group.holdings[sequence].table for name, group in self._groups.items()}

    def holds(self, sequence: str) -> bool:
        return sequence in self._tokens

    def release(self, sequence: str) -> None:
        for group in self._groups.values():
            group.release(sequence)
        del self._tokens[sequence], self._reserved[sequence]

    def stats(self) -> CacheStats:
        groups = {name: group.stats() for name, group in self._groups.items()}
        fullest = max(groups.values(), key=lambda one: one.used_blocks / one.num_blocks)
        return fullest._replace(groups=tuple(groups.items()))


def slots_of(
    policy: Compression, group: str, table: list[int], start: int, held: range, block_size: int
) -> list[int]:
    """Where tokens, or entries, lie in a group during a step.

    Args:
        table: the sequence's blocks in that group.
        start: the step's first token.
        held: their numbers.
    """
    gap = policy.dropped_blocks(group, start, block_size) * block_size
    places = range(held.start - gap, held.stop - gap)
    return [table[place // block_size] * block_size + place % block_size for place in places]
