"""Scheduler and engine with the stand-in model of slot_model.py: batches, limits, records."""

from __future__ import annotations

import pytest
from slot_model import (
    expected,
    greedy,
    make_engine,
    random_prompts,
    run,
)

from ascend_kv.cache.tables import ContiguousTables, PagedTables, SequenceTables
from ascend_kv.engine.batch import Batch
from ascend_kv.errors import UsageError


@pytest.mark.parametrize(
    ("tables", "preempts"),
    [
        (PagedTables(num_blocks=128, block_size=4), False),
        (PagedTables(num_blocks=17, block_size=4), True),
        (PagedTables(num_blocks=64, block_size=1), True),
        (ContiguousTables(num_blocks=48, block_size=4, max_model_len=64), False),
    ],
    ids=["roomy", "tight", "block of one", "contiguous"],
)
@pytest.mark.parametrize("budget", [8, 13, 64])
def test_tokens_do_not_depend_on_batching(
    tables: SequenceTables, preempts: bool, budget: int
) -> None:
    engine, model = make_engine(tables, max_num_batched_tokens=budget)
    work = random_prompts(30, seed=budget)
    for index, (prompt, max_tokens) in enumerate(work):
        engine.add_request(str(index), prompt, greedy(max_tokens))
    outputs = run(engine)
    for index, (prompt, max_tokens) in enumerate(work):
        assert outputs[str(index)].outputs[0].token_ids == expected(prompt, max_tokens)
        assert outputs[str(index)].outputs[0].finish_reason == "length"
    assert (engine.stats.preemptions > 0) == preempts
    assert (engine.stats.recomputed_tokens > 0) == preempts
    assert engine.stats.generated_tokens == sum(count for _, count in work)
    assert tables.stats().used_blocks == tables.stats().used_tokens == 0
    assert max(len(batch.token_ids) for batch in model.batches) <= budget
    assert max(len(batch.query_lengths) for batch in model.batches) <= 8


def test_decodes_come_first_and_share_the_step_with_prefill_chunks() -> None:
    engine, model = make_engine(PagedTables(64, 4), max_num_batched_tokens=10)
    engine.add_request("short", [5], greedy(12))
    engine.step()
    engine.add_request("long", list(range(30)), greedy(1))
    run(engine)
    mixed = [b.query_lengths for b in model.batches if len(b.query_lengths) == 2]
    assert mixed[:4] == [[1, 9], [1, 9], [1, 9], [1, 3]]


def test_batch_counts_its_decodes() -> None:
    batch = Batch(
        [1, 2, 3, 4], [0, 0, 0, 1], [0, 4, 8, 9], [[0], [1], [2]], [1, 1, 2], [1, 1, 2], [0]
    )
    assert batch.num_decodes == 2


def test_first_come_first_served_also_after_preemption() -> None:
    engine, _ = make_engine(PagedTables(9, 4), max_num_batched_tokens=64)
    for name in "abc":
        engine.add_request(name, [1] * 8, greedy(16))
    order: list[str] = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert engine.stats.preemptions > 0
    assert order == ["a", "b", "c"]


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    engine, model = make_engine(
        PagedTables(64, 4), max_num_batched_tokens=64, enable_chunked_prefill=False
    )
    for index in range(4):
        engine.add_request(str(index), [index] * 30, greedy(2))
    run(engine)
    assert {n for batch in model.batches for n in batch.query_lengths} == {1, 30}


def test_generation_ends_at_max_model_len_and_at_the_size_of_the_cache() -> None:
    for tables, longest in [(PagedTables(64, 4), 64), (PagedTables(5, 4), 20)]:
        engine, _ = make_engine(tables)
        engine.add_request("x", [7] * 10, greedy(1000))
        completion = run(engine)["x"].outputs[0]
        assert len(completion.token_ids) == longest - 10
        assert completion.finish_reason == "length"


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        make_engine(PagedTables(64, 4), enable_chunked_prefill=False)
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        make_engine(PagedTables(64, 4), max_num_seqs=17)


def test_step_records_add_up() -> None:
    engine, model = make_engine(PagedTables(17, 4), max_num_batched_tokens=16)
    for index in range(6):
        engine.add_request(str(index), [index] * 20, greedy(10))
    run(engine)
    stats = engine.stats
    assert stats.num_steps == len(stats.steps) == len(model.batches)
    assert sum(step.preempted for step in stats.steps) == stats.preemptions > 0
    total = sum(step.num_decodes + step.prefill_tokens for step in stats.steps)
    assert total == sum(len(batch.token_ids) for batch in model.batches)
    # Each request computes all its tokens but the last, and what it lost once more.
    assert total == 6 * (20 + 10 - 1) + stats.recomputed_tokens
    assert all(0 < step.cache.utilisation <= 1 for step in stats.steps)
    assert stats.engine_seconds == pytest.approx(stats.step_seconds - stats.model_seconds)
