"""The kernel of ``hca_decompress`` on the twin: every token gets its window's entry."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_harness import (
    HALF_TYPES,
    UB_BYTES,
    Limits,
    check_run,
    needs_compiler,
    operators,
    same,
    sectors,
    twin,
)

pytestmark = needs_compiler


def decompress(
    entries: torch.Tensor, ratio: int, cores: int = 48, ub_bytes: int = UB_BYTES, seed: int = 0
) -> tuple[torch.Tensor, twin.Result | None]:
    lengths, limits = [len(entries) * ratio], Limits(cores, ub_bytes, seed)
    rows, run = operators.hca_decompress(entries, lengths, ratio, limits=limits)
    check_run(run, ub_bytes)
    return rows, run.launches[0] if run.launches else None


def test_equals_repeat() -> None:
    draw = random.Random(0)
    for attempt in range(30):
        dtype = draw.choice([*HALF_TYPES, torch.float32])
        shape = (draw.choice([1, 2, 7, 60]), draw.choice([8, 40, 64, 72, 512]))
        entries = torch.randn(shape).to(dtype)
        entries[0, 0] = float("nan")
        ratio = draw.choice([1, 2, 4, 5, 33, 128])
        found, _ = decompress(
            entries, ratio, draw.choice([1, 3, 48]), draw.choice([UB_BYTES, 28 * 1024]), attempt
        )
        same(found, entries.repeat_interleave(ratio, 0))


def test_nothing_to_do() -> None:
    assert decompress(torch.empty(0, 64), 4)[1] is None


@pytest.mark.parametrize("ratio", [4, 128])
def test_traffic_and_balance(ratio: int) -> None:
    for count in (12, 48, 49):
        entries = torch.ones(count, 512, dtype=torch.bfloat16)
        rows, result = decompress(entries, ratio)
        assert result is not None
        moved = result.total["read_sectors"] + result.total["write_sectors"]
        # Where there are fewer entries than cores, several read the same one.
        reads = -(-48 // count) * sectors(entries)
        assert moved <= 1.02 * (reads + sectors(rows))
        assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)
