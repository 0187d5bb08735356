"""The engine's own scheduler with a clock in place of the model.

Requests, block tables and scheduler are the ones that serve; only the time of a step is computed
instead of spent. So preemptions, batches and the use of blocks are those of the engine, and only
the seconds are a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.request import Request, Status
from ascend_kv.engine.scheduler import Scheduler, Work
from ascend_kv.plan.performance import Clock, load_of
from ascend_kv.plan.traces import Arrival

PERCENTILES = (50, 90, 99)


class Percentiles(NamedTuple):
    """Of seconds: the median, and what 90 and 99 of 100 requests stay below."""

    p50: float
    p90: float
    p99: float


class Simulation(NamedTuple):
    """What a trace met.

    Attributes:
        requests: all were served.
        seconds: from the first arrival to the last token.
        steps: of the engine.
        output_tokens, tokens_per_second: generated.
        batch_mean, batch_peak: sequences with blocks, the mean over time.
        utilisation: share of the held token slots that hold a token, the mean over time.
        occupancy: share of the blocks that are held, the mean over time.
        preemptions: sequences that lost their blocks.
        recomputed_tokens: that had to be computed again for it.
        ttft: arrival to first token. tpot: between tokens of a request, its mean; of requests of
            two tokens or more. latency: arrival to last token.
    """

    requests: int
    seconds: float
    steps: int
    output_tokens: int
    tokens_per_second: float
    batch_mean: float
    batch_peak: int
    utilisation: float
    occupancy: float
    preemptions: int
    recomputed_tokens: int
    ttft: Percentiles
    tpot: Percentiles
    latency: Percentiles


def percentiles(values: Sequence[float]) -> Percentiles:
    """The smallest value that so many percent of ``values`` do not exceed."""
    ordered = sorted(values) or [0.0]
    return Percentiles(*(ordered[-(-share * len(ordered) // 100) - 1] for share in PERCENTILES))


def simulate(
    arrivals: Sequence[Arrival],
    tables: SequenceTables,
    config: SchedulerConfig,
    clock: Clock,
    advance: Callable[[int], None] = lambda finished: None,
) -> Simulation:
    """Serve a trace.

    Args:
        arrivals: in the order of their time.
        tables: block tables, all free.
        config: limits of a step.
        clock: says how long a step takes.
        advance: called with the number of requests that a step finished.

    Raises:
        UsageError: a request that could never run.
    """
    return _Simulator(arrivals, tables, config, clock).run(advance)


class _Simulator:
    """The loop of the engine, with sums in place of a model."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        tables: SequenceTables,
        config: SchedulerConfig,
        clock: Clock,
    ) -> None:
        self._arrivals, self._tables, self._clock = arrivals, tables, clock
        self._scheduler = Scheduler(config, tables)
        self._longest = self._scheduler.max_sequence_tokens
        self._now = arrivals[0].seconds if arrivals else 0.0
        self._next = 0
        self._arrived: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._ttft: list[float] = []
        self._tpot: list[float] = []
        self._latency: list[float] = []
        self._sums = {"seconds": 0.0, "batch": 0.0, "used": 0.0, "held": 0.0}
        self._steps = self._output_tokens = self._batch_peak = 0
        self._preemptions = self._recomputed_tokens = 0

    def run(self, advance: Callable[[int], None]) -> Simulation:
        scheduler = self._scheduler
        while self._next < len(self._arrivals) or scheduler.waiting or scheduler.running:
            if not scheduler.waiting and not scheduler.running:
                self._now = max(self._now, self._arrivals[self._next].seconds)
            self._take_arrivals()
            advance(self._step())
        return self._result()

    def _take_arrivals(self) -> None:
        while self._next < len(self._arrivals) and (
            self._arrivals[self._next].seconds <= self._now
        ):
            arrival = self._arrivals[self._next]
            params = SamplingParams(
                max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True
            )
            request = Request(str(self._next), [0] * arrival.prompt_tokens, params)
            self._scheduler.check(request)
            self._scheduler.add(request)
            self._arrived[request.key] = arrival.seconds
            self._next += 1

    def _step(self) -> int:
        computed = {request.key: request.num_computed for request in self._scheduler.running}
        schedule = self._scheduler.schedule()
        assert schedule.work, "requests are left, but none could be scheduled"
        self._preemptions += len(schedule.preempted)
        self._recomputed_tokens += sum(computed[request.key] for request in schedule.preempted)
        for request, start, stop in schedule.work:
            self._tables.write(request.key, start, stop)
        seconds = self._clock(load_of((item.start, item.stop) for item in schedule.work)).seconds
        self._now += seconds
        self._record(seconds)
        return sum(self._finish(item) for item in schedule.work)

    def _finish(self, item: Work) -> bool:
        request = item.request
        samples = item.samples
        request.num_computed = item.stop
        if not samples:
            return False
        request.append(0, self._longest)
        self._output_tokens += 1
        if len(request.output_token_ids) == 1:
            self._first[request.key] = self._now
            self._ttft.append(self._now - self._arrived[request.key])
        if request.status is not Status.FINISHED:
            return False
        self._scheduler.remove(request)
        first, more = self._first.pop(request.key), len(request.output_token_ids) - 1
        if more:
            self._tpot.append((self._now - first) / more)
        self._latency.append(self._now - self._arrived.pop(request.key))
        return True

    def _record(self, seconds: float) -> None:
        cache = self._tables.stats()
        self._steps += 1
        self._batch_peak = max(self._batch_peak, cache.num_sequences)
        self._sums["seconds"] += seconds
        self._sums["batch"] += seconds * cache.num_sequences
        self._sums["used"] += seconds * cache.utilisation
        self._sums["held"] += seconds * cache.used_blocks / cache.num_blocks

    def _result(self) -> Simulation:
        busy = self._sums["seconds"] or 1.0
        seconds = self._now - (self._arrivals[0].seconds if self._arrivals else 0.0)
        return Simulation(
            requests=len(self._latency),
            seconds=seconds,
            steps=self._steps,
            output_tokens=self._output_tokens,
            tokens_per_second=self._output_tokens / seconds if seconds else 0.0,
            batch_mean=self._sums["batch"] / busy,
            batch_peak=self._batch_peak,
            utilisation=self._sums["used"] / busy,
            occupancy=self._sums["held"] / busy,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            ttft=percentiles(self._ttft),
            tpot=percentiles(self._tpot),
            latency=percentiles(self._latency),
        )
