"""Streams over one engine: concurrent, cancelled, refused, failing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from slot_model import SlotModel, expected, greedy

from ascend_kv.cache.tables import PagedTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.async_engine import AsyncEngine
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.errors import UsageError


def make(
    max_num_seqs: int = 8, others: list[RequestOutput] | None = None
) -> tuple[AsyncEngine, Engine, PagedTables]:
    others = [] if others is None else others
    tables = PagedTables(64, 4)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    engine = Engine(SlotModel(tables), tables, config)
    return AsyncEngine(engine, others.append), engine, tables


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=30))


async def collect(engine: AsyncEngine, name: str, prompt: list[int], count: int) -> list[list[int]]:
    return [
        output.outputs[0].token_ids async for output in engine.generate(name, prompt, greedy(count))
    ]


def test_concurrent_streams_share_batches_and_grow_token_by_token() -> None:
    stream, engine, tables = make()

    async def main() -> list[list[list[int]]]:
        return await asyncio.gather(*(collect(stream, str(i), [i] * 5, 7) for i in range(6)))

    for index, lists in enumerate(run(main())):
        want = expected([index] * 5, 7)
        assert lists == [want[: n + 1] for n in range(7)]
    assert max(step.running for step in engine.stats.steps) > 1
    assert tables.stats().used_blocks == 0


def test_requests_queued_in_another_way_are_handed_on() -> None:
    others: list[RequestOutput] = []
    stream, engine, _ = make(others=others)
    engine.add_request("short", [1, 2], greedy(3))
    engine.add_request("long", [2, 3], greedy(30))
    assert len(run(collect(stream, "x", [5], 6))) == 6
    names = [output.request_id for output in others]
    assert (names.count("short"), names.count("long")) == (3, 6)
    assert engine.has_request("long")  # it goes on when someone steps


def test_leaving_early_frees_the_request_and_the_others_go_on() -> None:
    stream, engine, tables = make()

    async def leave() -> None:
        generation = stream.generate("left", [1, 2], greedy(50))
        async for _ in generation:
            break
        await generation.aclose()

    async def main() -> list[list[int]]:
        kept, _ = await asyncio.gather(collect(stream, "kept", [3], 20), leave())
        return kept

    assert run(main())[-1] == expected([3], 20)
    assert not engine.has_unfinished_requests()
    assert tables.stats().used_blocks == 0


def test_cancelling_a_task_aborts_its_request() -> None:
    stream, engine, _ = make()

    async def main() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in stream.generate("x", [1], greedy(60)):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await collect(stream, "y", [2], 3) == [expected([2], n) for n in (1, 2, 3)]

    run(main())
    assert not engine.has_unfinished_requests()


def test_when_the_event_loop_ends_nothing_is_left() -> None:
    stream, engine, tables = make()
    for _ in range(2):  # and the next loop finds all in order

        async def main() -> list[list[int]]:
            unread = [asyncio.create_task(collect(stream, f"u{i}", [i], 60)) for i in range(3)]
            got = await collect(stream, "read", [9], 4)
            assert len(unread) == 3 and engine.has_unfinished_requests()
            return got

        assert run(main())[-1] == expected([9], 4)
        assert not engine.has_unfinished_requests()
        assert tables.stats().used_blocks == 0


def test_a_refused_request_raises_where_it_was_asked_for() -> None:
    stream, _, _ = make()

    async def main() -> list[list[int]]:
        with pytest.raises(UsageError, match="an empty prompt"):
            await collect(stream, "bad", [], 3)
        return await collect(stream, "good", [5], 2)

    assert run(main())[-1] == expected([5], 2)


def test_a_step_that_fails_is_heard_of_only_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, engine, tables = make(max_num_seqs=1)
    forward = engine.model.forward

    def fail(batch: Any) -> Any:
        if 7 in batch.token_ids:
            raise RuntimeError("device lost")
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", fail)

    async def main() -> list[Any]:
        names = [("bad", [7]), ("good", [5])]
        return await asyncio.gather(
            *(collect(stream, name, prompt, 3) for name, prompt in names), return_exceptions=True
        )

    bad, good = run(main())
    assert str(bad) == "device lost"
    assert good[-1] == expected([5], 3)
    assert tables.stats().used_blocks == 0


def test_a_failing_model_is_heard_of_by_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, engine, tables = make()

    async def main() -> list[Any]:
        def fail(batch: Any) -> None:
            raise RuntimeError("device lost")

        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", fail)
            failed = await asyncio.gather(
                *(collect(stream, str(i), [i + 1], 3) for i in range(2)), return_exceptions=True
            )
        return [*failed, await collect(stream, "again", [5], 2)]

    first, second, again = run(main())
    assert str(first) == str(second) == "device lost"
    assert again[-1] == expected([5], 2)
    assert tables.stats().used_blocks == 0
