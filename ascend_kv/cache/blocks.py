"""A pool of equally sized cache blocks with reference counts; every operation is O(1).

Source of the idea: Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", SOSP 2023, section 4.
"""

from __future__ import annotations

from ascend_kv.errors import UsageError


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1.

    Free blocks form a stack, so the block freed last is used next and is likely still in a
    processor cache. A block is free exactly when its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free; the lowest number is handed out first.

        Raises:
            UsageError: ``num_blocks`` is below 1.
        """
        if num_blocks < 1:
            raise UsageError("num_blocks", num_blocks, "1 or more")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """Take a free block with a reference count of 1; the caller has checked ``num_free``."""
        assert self._free, "allocate() from an empty pool: the caller must check num_free"
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add one holder to a used block."""
        assert self._references[block] > 0, f"share() of free block {block}"
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one holder; the last one frees the block."""
        assert self._references[block] > 0, f"release() of free block {block}"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def references(self, block: int) -> int:
        """How many holders ``block`` has; 0 when it is free."""
        return self._references[block]
