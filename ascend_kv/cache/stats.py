"""What a KV cache holds at one moment, in blocks and tokens."""

from __future__ import annotations

from typing import NamedTuple


class CacheStats(NamedTuple):
    """Counts of one cache group; a tuple, so that it is cheap to record at every step.

    Of a cache with several groups it counts the fullest one, and ``groups`` has all of them.
    There a block of "window" or "state" is the slot of a sequence, and the tokens of "csa" and
    "hca" are entries.
    """

    num_blocks: int
    """Blocks the cache has."""
    used_blocks: int
    """Blocks that a sequence holds, shared ones counted once."""
    block_size: int
    """Tokens a block has room for."""
    used_tokens: int
    """Token slots that hold a key and a value."""
    num_sequences: int
    """Sequences that hold at least one block."""
    groups: tuple[tuple[str, CacheStats], ...] = ()
    """Name and counts of each group where there are several."""

    @property
    def utilisation(self) -> float:
        """Share of the held token slots that hold a token, 0 to 1; 1 when none is held."""
        held_tokens = self.used_blocks * self.block_size
        return self.used_tokens / held_tokens if held_tokens else 1.0
