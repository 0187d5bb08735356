"""Block tables: which blocks hold which tokens of a sequence.

Two allocators with one contract. ``PagedTables`` takes a block when a sequence grows into it.
``ContiguousTables`` reserves the longest possible sequence at once, as serving systems did
before paging; it is the baseline that people compare with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ascend_kv.cache.blocks import BlockPool
from ascend_kv.cache.stats import CacheStats
from ascend_kv.config import ALLOCATORS
from ascend_kv.errors import UsageError


class SequenceTables(ABC):
    """Maps the tokens of each sequence to slots; slot = block * block_size + offset."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise UsageError("block_size", block_size, "1 or more")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self._used_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.pool.num_blocks

    @property
    @abstractmethod
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it has the cache to itself."""

    @abstractmethod
    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        """Whether a new sequence of ``num_tokens`` fits and leaves ``headroom_blocks`` free."""

    @abstractmethod
    def reserve(self, sequence: str, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` tokens of ``sequence``, new or known.

        Returns:
            False when it does not fit; then nothing has changed.
        """

    def write(self, sequence: str, start: int, stop: int) -> list[int]:
        """Slots of tokens ``start`` to ``stop`` - 1, counted as written from now on."""
        table, size, known = self._tables[sequence], self.block_size, self._tokens[sequence]
        assert stop <= len(table) * size, "write() past what reserve() made room for"
        assert start <= known, "write() must leave no gap"
        if stop > known:
            self._used_tokens += stop - known
            self._tokens[sequence] = stop
        return [table[i // size] * size + i % size for i in range(start, stop)]

    def table(self, sequence: str) -> list[int]:
        """Blocks of ``sequence`` in token order; the caller must not change the list."""
        return self._tables[sequence]

    def group_tables(self, sequence: str) -> dict[str, list[int]]:
        """By group, where there are several: blocks of ``sequence``, not to be changed."""
        return {}

    def holds(self, sequence: str) -> bool:
        """Whether ``sequence`` has blocks."""
        return sequence in self._tables

    def release(self, sequence: str) -> None:
        """Give back all blocks of ``sequence``."""
        for block in reversed(self._tables.pop(sequence)):
            self.pool.release(block)
        self._used_tokens -= self._tokens.pop(sequence)

    def stats(self) -> CacheStats:
        """Counts at this moment, O(1)."""
        return CacheStats(
            num_blocks=self.pool.num_blocks,
            used_blocks=self.pool.num_used,
            block_size=self.block_size,
            used_tokens=self._used_tokens,
            num_sequences=len(self._tables),
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class PagedTables(SequenceTables):
    """Takes blocks one at a time as a sequence grows: at most block_size - 1 slots are wasted."""

    @property
    def max_sequence_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        return self._blocks_for(num_tokens) + headroom_blocks <= self.pool.num_free

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        known = self._tables.get(sequence)
        table = [] if known is None else known
        missing = self._blocks_for(num_tokens) - len(table)
        if missing <= 0 and known is not None:  # most steps of most sequences
            return True
        if missing > self.pool.num_free:
            return False
        if known is None:
            self._tables[sequence] = table
            self._tokens[sequence] = 0
        table.extend(self.pool.allocate() for _ in range(missing))
        return True

    def can_reserve(self, sequence: str, num_tokens: int) -> bool:
        """Whether ``reserve`` would make room; changes nothing."""
        missing = self._blocks_for(num_tokens) - len(self._tables.get(sequence, ()))
        return missing <= self.pool.num_free


class ContiguousTables(SequenceTables):
    """Reserves ``max_model_len`` tokens for every sequence: adjacent blocks, held to the end."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Cut the cache into regions of ``max_model_len`` tokens, rounded up to whole blocks.

        Raises:
            UsageError: not even one region fits.
        """
        self._region_blocks = -(-max_model_len // block_size)
        if num_blocks < self._region_blocks:
            raise UsageError(
                "max_model_len",
                max_model_len,
                f"at most {num_blocks * block_size} tokens, the size of the cache",
            )
        # Whole regions only: a remainder could never be used and must not count as free.
        super().__init__(num_blocks - num_blocks % self._region_blocks, block_size)

    @property
    def max_sequence_tokens(self) -> int:
        return self._region_blocks * self.block_size

    def can_admit(self, num_tokens: int, headroom_blocks: int = 0) -> bool:
        # No headroom is needed: a sequence that has been admitted never asks for more.
        return num_tokens <= self.max_sequence_tokens and self.pool.num_free > 0

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        if num_tokens > self.max_sequence_tokens:
            return False
        if sequence in self._tables:
            return True
        if self.pool.num_free == 0:
            return False
        # All regions have one size and are released whole, in reverse: the stack of free
        # blocks always holds whole regions in ascending order, so this one is adjacent.
        self._tables[sequence] = [self.pool.allocate() for _ in range(self._region_blocks)]
        self._tokens[sequence] = 0
        return True


def make_tables(
    allocator: str, num_blocks: int, block_size: int, max_model_len: int
) -> SequenceTables:
    """Tables of one allocator, ``paged`` or ``contiguous``.

    Raises:
        UsageError: unknown allocator, or not even one sequence fits.
    """
    if allocator not in ALLOCATORS:
        raise UsageError("kv_allocator", allocator, ALLOCATORS)
    if allocator == "contiguous":
        return ContiguousTables(num_blocks, block_size, max_model_len)
    return PagedTables(num_blocks, block_size)
