#!/usr/bin/env python3
"""What the engine itself costs: time a step outside the model, and the block pool's operations.

The model is a stand-in that returns prepared logits at once, so that scheduling, batch building,
sampling and bookkeeping are all that is measured. The block pool is timed at sizes from 10^3 to
10^6 blocks in the same run: its cost an operation must not grow with the pool.

    python tools/bench_engine.py
    python tools/bench_engine.py --batch 32 256 --context 4096 --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from ascend_kv.cache.blocks import BlockPool
from ascend_kv.cache.tables import PagedTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import UsageError
from ascend_kv.user_values import at_least_one

BLOCK_SIZE = 16
WARM_UP_STEPS = 5
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)


class PreparedLogits:
    """Stands in for a model: no arithmetic, the same logits at every step."""

    def __init__(self, rows: int, vocab: int) -> None:
        # As peaked as a language model's: a nucleus of 0.9 holds a few hundred tokens.
        self._logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._logits[: len(batch.logits_indices)]


def engine_milliseconds(
    batch: int, context: int, vocab: int, steps: int, params: SamplingParams
) -> dict[str, float]:
    """Milliseconds a decode step spends outside the model, median and 95th percentile."""
    length = context + WARM_UP_STEPS + steps + 1
    tables = PagedTables(batch * -(-length // BLOCK_SIZE) + batch, BLOCK_SIZE)
    config = SchedulerConfig(
        max_model_len=length, max_num_seqs=batch, max_num_batched_tokens=batch * context
    )
    engine = Engine(PreparedLogits(batch, vocab), tables, config, vocab_size=vocab)
    for index in range(batch):
        engine.add_request(str(index), [index % vocab] * context, params)
    while engine.has_unfinished_requests():
        engine.step()
    # The first step is the prefill of all, the next ones warm up, the last one frees the blocks.
    records = list(engine.stats.steps)[WARM_UP_STEPS:-1]
    assert all(record.num_decodes == batch for record in records), "not a steady decode"
    own = sorted((record.step_seconds - record.model_seconds) * 1e3 for record in records)
    return {
        "batch": batch,
        "context_tokens": context,
        "steps": len(own),
        "median_ms": statistics.median(own),
        "p95_ms": own[int(0.95 * (len(own) - 1))],
    }


def pool_nanoseconds(num_blocks: int, operations: int) -> float:
    """Nanoseconds of one allocate or release in a pool that is half full, in random order."""
    pool = BlockPool(num_blocks)
    held = [pool.allocate() for _ in range(num_blocks // 2)]
    random.Random(0).shuffle(held)
    held = held[:1000]
    started = time.perf_counter()
    for turn in range(operations // 2):
        index = turn % len(held)
        pool.release(held[index])
        held[index] = pool.allocate()
    return (time.perf_counter() - started) / (operations // 2 * 2) * 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens a sequence (512)")
    parser.add_argument("--vocab", type=int, default=49152, help="columns of the logits (49152)")
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured (100)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        for name in ("context", "vocab", "steps"):
            at_least_one(f"--{name}", getattr(options, name))
        for batch in options.batch:
            at_least_one("--batch", batch)
    except UsageError as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return error.exit_code
    _measure(options)
    return 0


def _measure(options: argparse.Namespace) -> None:
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=10**6),
        "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, seed=0, max_tokens=10**6),
    }
    engine = [
        engine_milliseconds(batch, options.context, options.vocab, options.steps, params)
        | {"sampling": name}
        for name, params in kinds.items()
        for batch in options.batch
    ]
    pool_nanoseconds(1000, 100_000)  # warm up
    rows = [(size, pool_nanoseconds(size, 400_000)) for size in POOL_SIZES]
    pool = [
        {"num_blocks": size, "nanoseconds": cost, "ratio_to_first": cost / rows[0][1]}
        for size, cost in rows
    ]
    if options.json:
        print(json.dumps({"engine": engine, "pool": pool}, indent=2))
        return
    print(f"Engine's own time a decode step (measured; vocabulary {options.vocab})")
    print(f"{'sampling':>10} {'batch':>6} {'context':>8} {'median ms':>10} {'p95 ms':>8}")
    for row in engine:
        print(
            f"{row['sampling']:>10} {row['batch']:>6} {row['context_tokens']:>8} "
            f"{row['median_ms']:>10.3f} {row['p95_ms']:>8.3f}"
        )
    print("\nBlock pool, one allocate or release (measured)")
    print(f"{'blocks':>10} {'ns':>8} {'ratio':>6}")
    for item in pool:
        print(
            f"{item['num_blocks']:>10} {item['nanoseconds']:>8.0f} {item['ratio_to_first']:>6.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
