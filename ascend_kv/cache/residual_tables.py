"""Tables of a cache that keeps each sequence's partly filled block apart (``cache.residual``).

A sequence holds one slot from its first token to its last, beside its blocks: as many slots as run
at once are never short.
"""

from __future__ import annotations

from ascend_kv.cache.blocks import BlockPool
from ascend_kv.cache.stats import CacheStats
from ascend_kv.cache.tables import SequenceTables

RESIDUAL = "residual"
"""The group whose one entry is the slot of a sequence"""


class ResidualTables(SequenceTables):
    """Other tables, and a slot for each sequence that they hold."""

    def __init__(self, blocks: SequenceTables, slots: int) -> None:
        """Join them; every slot is free.

        Raises:
            UsageError: no slot.
        """
        super().__init__(blocks.num_blocks, blocks.block_size)
        self.pool = blocks.pool
        self._blocks = blocks
        self._slots = BlockPool(slots)
        self._slot_of: dict[str, int] = {}

    @property
    def max_sequence_tokens(self) -> int:
        return self._blocks.max_sequence_tokens

    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        return self._slots.num_free > 0 and self._blocks.can_admit(num_tokens, headroom_blocks)

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        known = sequence in self._slot_of
        if not known and not self._slots.num_free:
            return False
        if not self._blocks.reserve(sequence, num_tokens):
            return False
        if not known:
            self._slot_of[sequence] = self._slots.allocate()
        return True

    def write(self, sequence: str, start: int, stop: int) -> list[int]:
        return self._blocks.write(sequence, start, stop)

    def table(self, sequence: str) -> list[int]:
        return self._blocks.table(sequence)

    def group_tables(self, sequence: str) -> dict[str, list[int]]:
        return {RESIDUAL: [self._slot_of[sequence]]}

    def holds(self, sequence: str) -> bool:
        return self._blocks.holds(sequence)

    def release(self, sequence: str) -> None:
        self._blocks.release(sequence)
        self._slots.release(self._slot_of.pop(sequence))

    def stats(self) -> CacheStats:
        blocks, used = self._blocks.stats(), self._slots.num_used
        slots = CacheStats(self._slots.num_blocks, used, 1, used, blocks.num_sequences)
        return blocks._replace(groups=(("blocks", blocks), (RESIDUAL, slots)))
