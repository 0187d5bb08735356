"""A batch of one sequence in blocks of its own: what scoring and the sweep hand to a model."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_kv.cache.residual_tables import RESIDUAL
from ascend_kv.cache.tables import SequenceTables
from ascend_kv.engine.batch import Batch


def single_sequence(
    token_ids: Sequence[int], block_size: int, start: int = 0, last_logits: bool = False
) -> Batch:
    """Tokens at positions ``start`` and on, in a cache whose block i is the sequence's i-th.

    Args:
        token_ids: what this step brings.
        block_size: tokens a block.
        start: tokens that are in the cache already.
        last_logits: whether only the last token's logits are wanted, not every token's.
    """
    count = len(token_ids)
    stop = start + count
    return Batch(
        token_ids=list(token_ids),
        positions=list(range(start, stop)),
        slot_mapping=list(range(start, stop)),
        block_tables=[list(range(-(-stop // block_size)))],
        query_lengths=[count],
        kv_lengths=[stop],
        logits_indices=[count - 1] if last_logits else list(range(count)),
        group_tables=[{RESIDUAL: [0]}],
    )


def sequence_in_tables(tables: SequenceTables, token_ids: Sequence[int], start: int) -> Batch:
    """The same for a cache that gives blocks back as a sequence grows: its tables say which.

    Args:
        tables: with room for the sequence and for no other; ``start`` 0 begins a new one.
        token_ids: what this step brings.
        start: tokens that are in the cache already.
    """
    name, stop = "the sequence", start + len(token_ids)
    if start == 0 and tables.holds(name):
        tables.release(name)
    reserved = tables.reserve(name, stop)
    assert reserved, "the cache was made for one sequence of this length"
    return Batch(
        token_ids=list(token_ids),
        positions=list(range(start, stop)),
        slot_mapping=tables.write(name, start, stop),
        block_tables=[tables.table(name)],
        query_lengths=[len(token_ids)],
        kv_lengths=[stop],
        logits_indices=list(range(len(token_ids))),
        group_tables=[tables.group_tables(name)],
    )
