"""The engine for asyncio: many callers, one loop that steps while anyone waits.

The engine itself belongs to one thread. Between two steps, never during one, the loop takes what
callers want (add, abort); a step runs in a worker thread so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ascend_kv.engine.engine import Engine
from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.engine.params import SamplingParams


class AsyncEngine:
    """Streams of outputs over one ``Engine``; belongs to one event loop."""

    def __init__(self, engine: Engine, others: Callable[[RequestOutput], object]) -> None:
        """Stream from ``engine``, which must not be stepped by anyone else meanwhile.

        ``others`` is called with the outputs of requests that were queued in another way.
        """
        self._engine = engine
        self._others = others
        self._wishes: list[Callable[[], Any]] = []
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they grow; the last one is finished.

        Leaving the iteration early, or cancelling the task, aborts the request.

        Raises:
            UsageError: what ``Engine.add_request`` refuses.
        """
        stream: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt_token_ids, params, prompt)
                self._streams[request_id] = stream
            except Exception as error:
                stream.put_nowait(error)

        self._wish(add)
        try:
            while True:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            if self._wishes and add in self._wishes:  # not even taken yet
                self._wishes.remove(add)
            elif self._streams.get(request_id) is stream:
                self._wish(lambda: self._leave(request_id, stream))

    def _leave(self, request_id: str, stream: asyncio.Queue[RequestOutput | Exception]) -> None:
        if self._streams.get(request_id) is stream:  # else it has come to its end meanwhile
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _wish(self, action: Callable[[], Any]) -> None:
        self._wishes.append(action)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._serve()
        except asyncio.CancelledError:  # the event loop ends, and with it every reader
            self._grant_wishes()
            self._drop_streams()
            raise

    async def _serve(self) -> None:
        while self._wishes or self._streams:
            self._grant_wishes()
            try:
                outputs = await self._step()
            except Exception as error:  # nobody else will hear of it
                self._report(error)
                continue
            for output in outputs:
                if output.request_id not in self._streams:
                    self._others(output)
                    continue
                self._streams[output.request_id].put_nowait(output)
                if output.finished:
                    del self._streams[output.request_id]

    async def _step(self) -> list[RequestOutput]:
        step = self._worker.submit(self._engine.step)
        try:
            return await asyncio.wrap_future(step)
        except asyncio.CancelledError:
            wait([step])  # whoever comes next finds the engine between two steps
            raise

    def _report(self, error: Exception) -> None:
        """Tell the readers of the requests that the engine gave up in a step that failed."""
        lost = [name for name in self._streams if not self._engine.has_request(name)]
        for request_id in lost:
            self._streams.pop(request_id).put_nowait(error)
        if not lost:  # it did not come as far as that, so no later step will do better
            for stream in self._streams.values():
                stream.put_nowait(error)
            self._drop_streams()

    def _grant_wishes(self) -> None:
        while self._wishes:
            self._wishes.pop(0)()

    def _drop_streams(self) -> None:
        for request_id in self._streams:
            self._engine.abort_request(request_id)
        self._streams.clear()
