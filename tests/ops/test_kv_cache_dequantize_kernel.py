"""The kernel of ``kv_cache_dequantize`` on the twin, against ``ascend_kv.formats``, bit for bit."""

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
from quantize_kernel import GRANULARITIES, random_shape, scale_shape

from ascend_kv.formats import INT8
from ascend_kv.formats.base import Encoded

pytestmark = needs_compiler


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
    group_size: int = 0,
    cores: int = 48,
    ub_bytes: int = UB_BYTES,
    seed: int = 0,
) -> tuple[torch.Tensor, twin.Result | None]:
    values, run = operators.kv_cache_dequantize(
        codes, scale, zero_point, group_size, dtype,
        granularity=granularity, limits=Limits(cores, ub_bytes, seed),
    )  # fmt: skip
    check_run(run, ub_bytes)
    assert run.tiling.passes <= 1
    return values, run.launches[0] if run.launches else None


def widen(scale: torch.Tensor, group_size: int) -> torch.Tensor:
    return scale.repeat_interleave(group_size, 3) if group_size else scale


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_equals_the_reference(granularity: str, symmetric: bool) -> None:
    draw = random.Random(granularity + str(symmetric))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    for attempt in range(8):
        shape, group_size = random_shape(draw, granularity)
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        groups = scale_shape(shape, granularity, group_size)
        scale = torch.randn(groups, generator=generator) * 10.0 ** draw.choice([-42, -3, 0, 3])
        odd = torch.tensor([0.0, float("nan"), 1e38])
        picked = torch.randperm(scale.numel(), generator=generator)[:3]
        scale.view(-1)[picked] = odd[: len(picked)]
        zero_point = None if symmetric else torch.randn(groups, generator=generator)
        dtype = draw.choice([*HALF_TYPES, torch.float32])
        found, _ = dequantize(
            codes, scale, zero_point, granularity, dtype, group_size,
            draw.choice([1, 3, 8, 40, 48]), draw.choice([UB_BYTES, 48 * 1024]), attempt,
        )  # fmt: skip
        wide_zero = None if zero_point is None else widen(zero_point, group_size)
        same(found, INT8.decode(Encoded(codes, widen(scale, group_size), wide_zero), dtype))


def test_token_with_more_heads_than_a_tile() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-128, 128, (2, 61, 5, 64), generator=generator, dtype=torch.int8)
    scale, zero_point = torch.randn(2, 2, 1, 5, 1, generator=generator)
    found, _ = dequantize(
        codes, scale, zero_point, "token", torch.bfloat16, cores=3, ub_bytes=48 * 1024
    )
    same(found, INT8.decode(Encoded(codes, scale, zero_point), torch.bfloat16))


def test_nothing_to_do() -> None:
    codes = torch.empty(1, 2, 0, 64, dtype=torch.int8)
    _, result = dequantize(codes, torch.empty(1, 2, 0, 1), None, "token_head", torch.float16)
    assert result is None


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_traffic_and_balance(granularity: str, dim: int) -> None:
    """Sectors against every input read once and the result written once; all cores work."""
    shape = (1, 8, 520, dim)
    group_size = 32 if granularity == "group" else 0
    codes = torch.ones(shape, dtype=torch.int8)
    scale = torch.ones(scale_shape(shape, granularity, group_size))
    values, result = dequantize(codes, scale, None, granularity, torch.float16, group_size)
    assert result is not None
    moved = result.total["read_sectors"] + result.total["write_sectors"]
    assert moved <= 1.05 * sectors(codes, scale, values)
    assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_core_idle_from_48_tokens(granularity: str) -> None:
    group_size = 64 if granularity == "group" else 0
    for tokens in (48, 49, 100):
        shape = (1, 8, tokens, 128)
        codes = torch.ones(shape, dtype=torch.int8)
        scale = torch.ones(scale_shape(shape, granularity, group_size))
        _, result = dequantize(codes, scale, None, granularity, torch.float16, group_size)
        assert result is not None and len(result.cores) == 48
        assert all(core["write_bytes"] for core in result.cores)
