"""Decode throughput against batch: why a larger batch is worth memory at all.

Only the model's forward is timed, with every sequence at the same context length. The context is
computed once and copied into blocks of each sequence's own, so that attention reads as much
memory as it would in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.residual_tables import RESIDUAL
from ascend_kv.engine.batch import Batch
from ascend_kv.evaluate.recipe import WARM_UP_STEPS, BenchRecipe
from ascend_kv.evaluate.results import Sweep, SweepPoint
from ascend_kv.evaluate.schemes import roomy_llm
from ascend_kv.evaluate.single_sequence import single_sequence
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM
from ascend_kv.ops import platform


def run_sweep(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    block_size: int,
    text_token_ids: Sequence[int],
    advance: Callable[[int], None],
) -> Sweep:
    """Time ``sweep.steps`` decode steps at each of ``sweep.batches``.

    Args:
        recipe: its ``sweep`` section says what to run.
        loaded: the weights.
        block_size: tokens a block.
        text_token_ids: the context is cut from their beginning.
        advance: called with 1 after every batch size.
    """
    sweep = recipe.sweep
    length = sweep.longest
    blocks = -(-length // block_size)
    llm = roomy_llm(recipe, loaded, sweep.kv_cache_dtype, block_size, max(sweep.batches), length)
    context = list(text_token_ids[: sweep.context_tokens])
    fill(llm, context, blocks, max(sweep.batches))
    points = []
    for batch in sweep.batches:
        seconds = [
            decode(llm, batch, context[-1], position, blocks, block_size)
            for position in range(len(context), length)
        ][WARM_UP_STEPS:]
        step_seconds = sum(seconds) / len(seconds)
        points.append(SweepPoint(batch, batch / step_seconds, step_seconds))
        advance(1)
    return Sweep(sweep.kv_cache_dtype, len(context), points)


def fill(llm: LLM, context: list[int], blocks: int, sequences: int) -> None:
    """Store the context once, then give every sequence a copy in its own blocks."""
    llm.model.forward(single_sequence(context, llm.block_size, last_logits=True))
    assert isinstance(llm.cache, PagedKVCache), "a budget by tokens was planned for it"
    for layer in llm.cache.layers:
        for tensor in layer.block_tensors:
            copies = tensor[: blocks * sequences].unflatten(0, (sequences, blocks))
            copies[1:] = copies[:1].clone()
        for tensor in layer.slot_tensors:
            tensor[1:] = tensor[:1].clone()


def decode(llm: LLM, batch: int, token: int, position: int, blocks: int, block_size: int) -> float:
    """Seconds of one step in which ``batch`` sequences bring the token at ``position``."""
    starts = [sequence * blocks for sequence in range(batch)]
    work = Batch(
        token_ids=[token] * batch,
        positions=[position] * batch,
        slot_mapping=[start * block_size + position for start in starts],
        block_tables=[list(range(start, start + blocks)) for start in starts],
        query_lengths=[1] * batch,
        kv_lengths=[position + 1] * batch,
        logits_indices=list(range(batch)),
        group_tables=[{RESIDUAL: [sequence]} for sequence in range(batch)],
    )
    platform.synchronize(llm.device)
    started = time.perf_counter()
    llm.model.forward(work)
    platform.synchronize(llm.device)
    return time.perf_counter() - started
