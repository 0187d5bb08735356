"""The plan: sequences at once from geometry alone, against a brute-force count and a simulation."""

from __future__ import annotations

import itertools
import random

import pytest

from ascend_kv.config import CacheConfig
from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry, format_spec
from ascend_kv.plan.capacity import Capacity, capacity, describe_formats, explain_memory
from ascend_kv.resolved_cache import resolve_formats

GEOMETRY = ModelGeometry("llama", 30, 9, 3, 64, 576, 49152, 8192, "float32", (None,) * 30)
QWEN = ModelGeometry("qwen2", 28, 28, 4, 128, 3584, 152064, 32768, "bfloat16", (None,) * 28)
HALF, INT8 = (format_spec("float16"),) * 30, (format_spec("int8"),) * 30
# What four contiguous sequences of 1,024 tokens take in float16.
BUDGET = 4 * 1024 * 30 * 2 * 3 * 64 * 2


def plan(
    allocator: str, formats: tuple = HALF, lengths: tuple = ((140, 160),), **options: int
) -> Capacity:
    arguments = {"budget_bytes": BUDGET, "block_size": 16, "max_model_len": 1024, **options}
    return capacity(
        GEOMETRY,
        formats,
        arguments["budget_bytes"],
        arguments["block_size"],
        allocator,
        arguments["max_model_len"],
        lengths,
    )


def test_contiguous_sequences_take_all_they_might_need() -> None:
    assert plan("contiguous") == Capacity(
        scheme="contiguous float16",
        token_bytes=23_040,
        block_bytes=16 * 23_040,
        num_blocks=256,
        kv_bytes=BUDGET,
        sequences_full_length=4,
        sequences_mean=4.0,
        sequences_live=4.0,
    )
    # INT8 with a float32 scale for each head and token: 12,240 bytes a token, not 11,520.
    int8 = plan("contiguous", INT8)
    assert (int8.token_bytes, int8.sequences_full_length) == (12_240, 7)
    assert int8.num_blocks == 7 * 64  # no use in the remainder of the budget
    assert int8.kv_bytes == 7 * 64 * 16 * 12_240 <= BUDGET


def test_paged_sequences_take_what_they_hold() -> None:
    # One prompt of 16 tokens and 33 to generate hold 1, 16 x 2 and 16 x 3 blocks: 81 in 33 steps.
    paged = plan("paged", lengths=((16, 33),))
    assert (paged.num_blocks, paged.kv_bytes) == (256, BUDGET)
    assert paged.sequences_full_length == 4
    assert paged.sequences_mean == 256 / 3  # the 49th token is sampled and never stored
    assert paged.sequences_live == 256 * 33 / 81


def test_int8_and_paging_multiply() -> None:
    paged = plan("paged", INT8)
    assert paged.scheme == "paged int8/token_head"
    assert paged.num_blocks == BUDGET // (16 * 12_240) == 481
    assert paged.sequences_mean == 481 / 19


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_live_sequences_against_counting_every_step(block_size: int) -> None:
    random.seed(5)
    lengths = tuple((random.randint(1, 90), random.randint(1, 90)) for _ in range(20))
    held = [
        -(-(prompt + step) // block_size) for prompt, output in lengths for step in range(output)
    ]
    got = plan("paged", lengths=lengths, block_size=block_size)
    assert got.sequences_live == pytest.approx(got.num_blocks * len(held) / sum(held), rel=1e-12)
    last = [-(-(prompt + output - 1) // block_size) for prompt, output in lengths]
    assert got.sequences_mean == pytest.approx(got.num_blocks * 20 / sum(last), rel=1e-12)


Running = list[tuple[int, int, int]]  # prompt, output and the step each sequence is at


def blocks_held(running: Running, ahead: int) -> int:
    """Blocks of 16 that the sequences still at work hold ``ahead`` steps from now."""
    return sum(-(-(p + step + ahead) // 16) for p, o, step in running if step + ahead < o)


def never_exceeds(running: Running, num_blocks: int) -> bool:
    """Checked at the last step of each sequence: between two of those the sum only grows."""
    last_steps = {o - step - 1 for _, o, step in running}
    return all(blocks_held(running, ahead) <= num_blocks for ahead in last_steps)


def test_live_sequences_against_a_simulation() -> None:
    """Keep the blocks as full as they can be without preemption: the plan's mean is approached."""
    random.seed(6)
    lengths = [(random.randint(20, 200), random.randint(50, 250)) for _ in range(50)]
    planned = plan("paged", lengths=tuple(lengths))
    queue = itertools.cycle((prompt, output, 0) for prompt, output in lengths)
    running: Running = []
    waiting = next(queue)
    counts = []
    for _ in range(3000):
        running = [(p, o, step + 1) for p, o, step in running if step + 1 < o]
        while never_exceeds([*running, waiting], planned.num_blocks):
            running.append(waiting)
            waiting = next(queue)
        counts.append(len(running))
    reached = sum(counts[500:]) / len(counts[500:])
    assert 0.9 * planned.sequences_live < reached <= planned.sequences_live


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"budget_bytes": 1000}, "kv_cache_memory_bytes", f"{1024 * 23_040}"),
        ({"lengths": ()}, "lengths", "one request or more"),
        ({"lengths": ((5, 5), (0, 5))}, "lengths", "(0, 5)"),
        ({"lengths": ((5, 0),)}, "lengths", "1 output token"),
        ({"lengths": ((1000, 25),)}, "lengths", "max_model_len = 1024"),
    ],
)
@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_plans_that_are_refused(allocator: str, options: dict, field: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(allocator, **options)
    assert caught.value.field == field
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="paged, contiguous"):
        plan("pages")


def test_formats_in_few_words() -> None:
    skip = CacheConfig("int8", symmetric=False, kv_cache_dtype_skip_layers=(0, -1))
    formats = resolve_formats(GEOMETRY, skip, "float16")
    assert describe_formats(formats) == "2 x float16, 28 x int8/token_head/asymmetric"
    assert describe_formats(INT8) == "int8/token_head"


def test_both_formulas_are_explained() -> None:
    grouped, ungrouped, chosen = explain_memory(
        QWEN, [format_spec("int8")] * 28, tokens=8192, sequences=16
    ).splitlines()
    assert "2 x 28 layers x 4 KV heads x 128 x 2 bytes = 57,344 bytes a token, 7.00 GiB" in grouped
    assert "28 heads x 128 x 2 bytes = 401,408 bytes a token, 49.00 GiB" in ungrouped
    assert "7 times too much: 7 query heads share one KV head" in ungrouped
    assert f"int8/token_head: {57_344 // 2 + 28 * 2 * 4 * 4:,} bytes a token" in chosen
    assert chosen.endswith("scales included.")
    alone = explain_memory(QWEN, [format_spec("bfloat16")] * 28)
    assert alone.endswith("float16: 57,344 bytes a token, 448.00 MiB for 1 x 8,192 tokens.")
    mha = ModelGeometry("llama", 2, 4, 4, 8, 32, 9, 9, "float32", (None, None))
    assert "no query heads share" in explain_memory(mha, [format_spec("float32")] * 2)
