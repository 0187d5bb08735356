"""The simulation against the engine itself, and the traces it takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from refusals import refused

from ascend_kv.cache.tables import PagedTables, make_tables
from ascend_kv.config import SchedulerConfig
from ascend_kv.errors import UsageError
from ascend_kv.plan.performance import Load, StepTime
from ascend_kv.plan.simulation import percentiles, simulate
from ascend_kv.plan.traces import Arrival, lengths_of, poisson_trace, read_trace


def clock(load: Load) -> StepTime:
    seconds = 1.0 + 0.5 * load.decodes + 0.25 * load.prefill_tokens
    return StepTime(seconds, {"step": seconds}, "step")


def test_one_request_by_hand() -> None:
    tables = PagedTables(10, 4)
    found = simulate([Arrival(3.0, 5, 3)], tables, SchedulerConfig(32, 4, 4), clock)
    # a chunk of 4 (2 s); the fifth token counts as a decode (1.5 s), then two decodes
    assert (found.steps, found.output_tokens, found.requests) == (4, 3, 1)
    assert found.seconds == 2.0 + 1.5 + 1.5 + 1.5
    assert found.ttft.p50 == 3.5 and found.tpot.p50 == 1.5 and found.latency.p50 == 6.5
    # slots held and used: 4 of 8 (the prompt is reserved whole), 5 of 8, 6 of 8, 7 of 8
    used = (2.0 * 4 + 1.5 * 5 + 1.5 * 6 + 1.5 * 7) / 8 / 6.5
    assert found.utilisation == pytest.approx(used)
    assert found.occupancy == pytest.approx(0.2)
    assert tables.pool.num_free == 10


def test_the_clock_waits_for_arrivals() -> None:
    arrivals = [Arrival(0.0, 2, 1), Arrival(100.0, 2, 1)]
    found = simulate(arrivals, PagedTables(10, 4), SchedulerConfig(32, 4, 4), clock)
    assert found.seconds == 100.0 + 1.5
    assert found.ttft == (1.5, 1.5, 1.5)
    assert found.batch_peak == 1 and found.batch_mean == 1.0  # idle time is not averaged in
    assert simulate([], PagedTables(1, 4), SchedulerConfig(32, 4, 4), clock).steps == 0


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_the_same_as_the_engine(allocator: str, num_blocks: int) -> None:
    """Batches, preemptions, recomputed tokens and the use of blocks, step by step."""
    torch = pytest.importorskip("torch")
    from ascend_kv.engine.engine import Engine
    from ascend_kv.engine.params import SamplingParams

    class Model:
        def forward(self, batch):
            return torch.zeros(len(batch.logits_indices), 4)

    arrivals = poisson_trace(40, math.inf, 20, 30, 0.7, 64, seed=4)
    config = SchedulerConfig(64, 12, 32)
    engine = Engine(Model(), make_tables(allocator, num_blocks, 4, 64), config)
    for number, arrival in enumerate(arrivals):
        params = SamplingParams(max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True)
        engine.add_request(str(number), [0] * arrival.prompt_tokens, params)
    while engine.has_unfinished_requests():
        engine.step()
    seen: list[Load] = []

    def watch(load: Load) -> StepTime:
        seen.append(load)
        return StepTime(1.0, {}, "")

    found = simulate(arrivals, make_tables(allocator, num_blocks, 4, 64), config, watch)
    stats = engine.stats
    assert [(load.decodes, load.prefill_tokens) for load in seen] == [
        (step.num_decodes, step.prefill_tokens) for step in stats.steps
    ]
    assert (found.preemptions, found.recomputed_tokens) == (
        stats.preemptions, stats.recomputed_tokens
    )  # fmt: skip
    assert (found.preemptions > 0) == (allocator == "paged" and num_blocks == 24)
    assert found.output_tokens == stats.generated_tokens
    assert found.batch_peak == max(step.running for step in stats.steps)
    used = [step.cache.utilisation for step in stats.steps]
    assert found.utilisation == pytest.approx(sum(used) / len(used))


def test_what_attention_reads_is_counted() -> None:
    seen: list[Load] = []

    def watch(load: Load) -> StepTime:
        seen.append(load)
        return StepTime(1.0, {}, "")

    simulate([Arrival(0, 7, 2)], PagedTables(9, 4), SchedulerConfig(32, 4, 4), watch)
    # tokens 0-3 attend to 1 + 2 + 3 + 4, tokens 4-6 to 5 + 6 + 7, then one token to 8
    assert seen == [Load(0, 0, 4, 10, 4), Load(0, 0, 3, 18, 7), Load(1, 8)]


def test_a_request_that_can_never_run_is_refused() -> None:
    error = refused(
        UsageError, simulate, [Arrival(0, 40, 1)], PagedTables(9, 4), SchedulerConfig(64), clock
    )
    assert error.field == "prompt" and "at most 35 tokens" in str(error)


def test_percentiles() -> None:
    assert percentiles([float(x) for x in range(1, 101)]) == (50, 90, 99)
    assert percentiles([7.0]) == (7, 7, 7)
    assert percentiles([2.0, 1.0]) == (1, 2, 2)
    assert percentiles([]) == (0, 0, 0)


def test_poisson_arrivals() -> None:
    trace = poisson_trace(4000, 5.0, 80, 40, 0.5, 900, seed=1)
    assert trace == poisson_trace(4000, 5.0, 80, 40, 0.5, 900, seed=1)
    assert trace != poisson_trace(4000, 5.0, 80, 40, 0.5, 900, seed=2)
    assert trace[-1].seconds == pytest.approx(4000 / 5, rel=0.06)
    prompts, outputs = zip(*lengths_of(trace), strict=True)
    assert sum(prompts) / 4000 == pytest.approx(80, rel=0.03)
    assert sum(outputs) / 4000 == pytest.approx(40, rel=0.03)
    assert max(p + o for p, o in lengths_of(trace)) <= 900
    tight = lengths_of(poisson_trace(4000, 5.0, 80, 40, 1.0, 100, seed=1))
    assert max(p + o for p, o in tight) == 100 and min(min(each) for each in tight) >= 1
    alike = poisson_trace(3, math.inf, 80, 40, 0.0, 200)
    assert alike == [Arrival(0.0, 80, 40)] * 3


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--requests", {"requests": 0}),
        ("--simulate", {"rate": 0.0}),
        ("--simulate", {"rate": math.nan}),
        ("--sigma", {"sigma": -0.1}),
        ("--sigma", {"sigma": math.nan}),
    ],
)
def test_traces_that_cannot_be_drawn(flag: str, change: dict[str, float]) -> None:
    arguments = {"requests": 1, "rate": 1.0, "prompt_mean": 5, "output_mean": 5, "sigma": 0.0}
    error = refused(UsageError, poisson_trace, **(arguments | change), max_model_len=64)
    assert error.field == flag


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_seconds": 2, "prompt_tokens": 8, "output_tokens": 3, "user": "x"}\n\n'
        '{"prompt_tokens": 5, "output_tokens": 1}\n'
    )
    assert read_trace(path, 64) == [Arrival(0.0, 5, 1), Arrival(2.0, 8, 3)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", ":1: got 'nonsense'"),
        ("[1]", "a JSON object on each line"),
        ('{"prompt_tokens": 5}', ":1: output_tokens: got None"),
        ('{"prompt_tokens": true, "output_tokens": 1}', "prompt_tokens: got True"),
        ('{"prompt_tokens": 5.0, "output_tokens": 1}', "prompt_tokens: got 5.0"),
        ('{"prompt_tokens": 5, "output_tokens": 0}', "at least 1"),
        ('{"prompt_tokens": 60, "output_tokens": 5}', "at most --max-model-len = 64 together"),
        (json.dumps({"prompt_tokens": 1, "output_tokens": 1, "arrival_seconds": -1}), "0 or more"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "arrival_seconds": NaN}', "0 or more"),
        ("", "one request or more"),
    ],
)
def test_lines_at_fault_are_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    assert said in str(refused(UsageError, read_trace, path, 64))
    assert refused(UsageError, read_trace, tmp_path / "none", 64).field == "--trace"


def test_ten_thousand_requests() -> None:
    """The size that is promised; how long it takes is for the user's patience, not for a test."""
    arrivals = poisson_trace(10_000, 50.0, 60, 8, 0.5, 256)
    tables = PagedTables(3000, 16)
    found = simulate(
        arrivals, tables, SchedulerConfig(256, 64, 512), lambda load: StepTime(0.01, {}, "")
    )
    assert found.requests == 10_000 and tables.pool.num_free == 3000
    assert found.output_tokens == sum(arrival.output_tokens for arrival in arrivals)
