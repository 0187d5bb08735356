"""Tables of a cache whose layers keep entries of many tokens: slots, and blocks by group.

A sequence holds one slot of "window" and of "state" from its first token to its last, the same
number in both, and takes a block of "csa" or "hca" when an entry needs it.
"""

from __future__ import annotations

import sys

from ascend_kv.cache.stats import CacheStats
from ascend_kv.cache.tables import PagedTables, SequenceTables
from ascend_kv.compressed_layers import PAGED_GROUPS, CompressedLayers, GroupBlocks


class GroupTables(SequenceTables):
    """Hands out all that a sequence needs in every group, or nothing.

    As a ``SequenceTables`` it is the ring of the latest tokens: ``table`` is the one slot of a
    sequence, and ``write`` gives a token's place in it, ``slot * W + position % W``.
    """

    def __init__(self, layers: CompressedLayers, blocks: GroupBlocks) -> None:
        """Every slot and block is free.

        Raises:
            UsageError: no slot, or no block where there are layers that need some.
        """
        super().__init__(blocks.slots, layers.window_tokens)
        counts = {"csa": blocks.csa, "hca": blocks.hca}
        self._ratios = {group: layers.ratio(group) for group in PAGED_GROUPS if layers.count(group)}
        self._paged = {
            group: PagedTables(counts[group], blocks.block_size) for group in self._ratios
        }

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that has the most; the slots where no group has any."""
        return max((paged.num_blocks for paged in self._paged.values()), default=self._slots)

    @property
    def max_sequence_tokens(self) -> int:
        return min(
            (
                (paged.max_sequence_tokens + 1) * self._ratios[group] - 1
                for group, paged in self._paged.items()
            ),
            default=sys.maxsize,
        )

    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        return self.pool.num_free > 0 and all(
            paged.can_admit(
                num_tokens // self._ratios[group],
                headroom_blocks * paged.num_blocks // self.num_blocks,
            )
            for group, paged in self._paged.items()
        )

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        entries = {group: num_tokens // ratio for group, ratio in self._ratios.items()}
        fits = all(
            paged.can_reserve(sequence, entries[group]) for group, paged in self._paged.items()
        )
        known = sequence in self._tables
        if not fits or not (known or self.pool.num_free):
            return False
        if not known:
            self._tables[sequence] = [self.pool.allocate()]
            self._tokens[sequence] = 0
        for group, paged in self._paged.items():
            paged.reserve(sequence, entries[group])
        return True

    def write(self, sequence: str, start: int, stop: int) -> list[int]:
        assert start <= self._tokens[sequence], "write() must leave no gap"
        (slot,), ring = self._tables[sequence], self.block_size
        before = self._tokens[sequence]
        self._tokens[sequence] = max(stop, before)
        self._used_tokens += min(self._tokens[sequence], ring) - min(before, ring)
        for group, paged in self._paged.items():
            ratio = self._ratios[group]
            paged.write(sequence, start // ratio, stop // ratio)
        return [slot * ring + position % ring for position in range(start, stop)]

    def group_tables(self, sequence: str) -> dict[str, list[int]]:
        return {group: paged.table(sequence) for group, paged in self._paged.items()}

    def release(self, sequence: str) -> None:
        for paged in self._paged.values():
            paged.release(sequence)
        self._used_tokens -= min(self._tokens.pop(sequence), self.block_size)
        self.pool.release(self._tables.pop(sequence).pop())

    def stats(self) -> CacheStats:
        window = super().stats()
        # a slot of "state" is one window of tokens, whatever of it is filled at the moment
        state = window._replace(block_size=1, used_tokens=window.used_blocks)
        groups = {"window": window, "state": state}
        groups |= {group: paged.stats() for group, paged in self._paged.items()}
        fullest = max(groups.values(), key=lambda one: one.used_blocks / one.num_blocks)
        return fullest._replace(groups=tuple(groups.items()))

    @property
    def _slots(self) -> int:
        return self.pool.num_blocks
