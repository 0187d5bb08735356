"""The kernels of ``kv_cache_quantize`` on the twin, against ``ascend_kv.formats``, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_harness import (
    HALF_TYPES,
    UB_BYTES,
    needs_compiler,
    operators,
    poison_some,
    random_values,
    same,
    sectors,
)
from quantize_kernel import (
    DIMS,
    GRANULARITIES,
    Quantized,
    quantize,
    random_shape,
    scale_shape,
)

from ascend_kv.formats import INT8

pytestmark = needs_compiler


def reference(
    x: torch.Tensor, granularity: str, symmetric: bool, group_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if granularity == "group":
        grouped = x.unflatten(3, (-1, group_size))
        found = INT8.encode(grouped, (4,), symmetric)
        zero_point = None if found.zero_point is None else found.zero_point.squeeze(4)
        assert found.scale is not None
        return found.codes.flatten(3), found.scale.squeeze(4), zero_point
    found = INT8.encode(x, DIMS[granularity], symmetric)
    assert found.scale is not None
    return found.codes, found.scale, found.zero_point


def check(
    x: torch.Tensor,
    granularity: str,
    symmetric: bool,
    group_size: int = 0,
    cores: int = 48,
    ub_bytes: int = UB_BYTES,
    seed: int = 0,
) -> Quantized:
    found = quantize(
        x, granularity, symmetric, group_size=group_size, cores=cores, ub_bytes=ub_bytes, seed=seed
    )
    codes, scale, zero_point = reference(x, granularity, symmetric, group_size)
    same(found.scale, scale)
    if zero_point is not None and found.zero_point is not None:
        same(found.zero_point, zero_point)
    same(found.codes, codes)
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_equals_the_reference(granularity: str, symmetric: bool) -> None:
    draw = random.Random(granularity + str(symmetric))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    for attempt in range(9):
        shape, group_size = random_shape(draw, granularity)
        dtype = draw.choice([*HALF_TYPES, *HALF_TYPES, torch.float32])
        x = random_values(generator, shape, dtype)
        if attempt % 3 == 2:
            x = poison_some(generator, x)
        cores = draw.choice([1, 3, 8, 40, 48])
        # A small UB cuts small tensors into many tiles.
        ub_bytes = draw.choice([UB_BYTES, 64 * 1024, 48 * 1024])
        check(x, granularity, symmetric, group_size, cores, ub_bytes, seed=attempt)


@pytest.mark.parametrize("granularity", ["layer", "head", "channel"])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_scales_across_cores(granularity: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = random_values(generator, (1, 3, 301, 72), dtype)
    x[0, 1, 200, 5] = float("nan")
    for symmetric in (True, False):
        found = check(x, granularity, symmetric, cores=7)
        assert found.tiling.passes == 3
        assert all(core["write_bytes"] for r in found.results[::2] for core in r.cores)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_longer_than_a_repeat_stride_reaches(symmetric: bool) -> None:
    """Several rows of more than 255 blocks in one tile."""
    generator = torch.Generator().manual_seed(10)
    for tokens in (41, 50, 64):
        x = torch.randn(2, 3, tokens, 64, generator=generator).half()
        found = check(x, "head", symmetric, cores=1)
        assert found.tiling.tile_rows > 1 and found.tiling.stride > 255 * 8


def test_token_with_more_heads_than_a_tile() -> None:
    generator = torch.Generator().manual_seed(2)
    x = random_values(generator, (2, 61, 5, 64), torch.bfloat16)
    found = check(x, "token", False, cores=3, ub_bytes=48 * 1024)
    assert found.tiling.tile_heads < 61


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_given_scales(granularity: str, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = random_values(generator, (2, 3, 50, 64), torch.float16)
    group_size = 32 if granularity == "group" else 0
    shape = scale_shape(tuple(x.shape), granularity, group_size)
    scale = torch.rand(shape, generator=generator) * 0.05
    odd = torch.tensor([0.0, -0.25, float("nan")])  # such scales give codes 0
    picked = torch.randperm(scale.numel(), generator=generator)[: min(3, scale.numel() - 1)]
    scale.view(-1)[picked] = odd[: len(picked)]
    zero_point = None if symmetric else torch.randn(shape, generator=generator)
    found = quantize(x, granularity, symmetric, scale, zero_point, group_size, cores=5)
    wide, wide_zero = scale, zero_point
    if group_size:
        wide = scale.repeat_interleave(group_size, 3)
        wide_zero = None if zero_point is None else zero_point.repeat_interleave(group_size, 3)
    same(found.codes, INT8.encode_static(x, wide, wide_zero).codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_ties_and_extremes(symmetric: bool) -> None:
    """Halves between two codes go to the even one, and nothing is rounded twice."""
    steps = torch.arange(-255, 256) / 2.0  # scale 1 (symmetric): every tie there is
    row = torch.cat([steps, torch.tensor([127.0])]).view(1, 1, 4, 128)
    row[..., 0] = 127.0
    nearly = torch.nextafter(row.float(), torch.tensor(0.0))
    for x in (row.half(), row.bfloat16(), row.float(), nearly):
        check(x, "token_head", symmetric)
    limits = torch.finfo(torch.float32)
    odd = torch.tensor([limits.max, -limits.max, limits.tiny, 1e-45, 180e-45, 0.0, -0.0, 1.0])
    for rows in (odd.view(1, 1, 1, 8), odd.view(1, 1, 8, 1).expand(1, 1, 8, 8).contiguous()):
        check(rows, "token_head", symmetric)
    check(odd[3:5].view(1, 1, 1, 2), "token_head", symmetric)


def test_nothing_to_do() -> None:
    for shape in ((1, 2, 0, 64), (0, 2, 3, 64)):
        for granularity in GRANULARITIES:
            found = operators.tile_quantize(
                "kv_cache_quantize", shape, torch.float16, granularity, group_size=32
            )
            assert found.cores == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_traffic_and_balance(granularity: str, dim: int) -> None:
    """Sectors against the least: x (twice where a scale spans cores) and the outputs."""
    generator = torch.Generator().manual_seed(4)
    shape = (1, 8, 520, dim)
    x = random_values(generator, shape, torch.float16)
    found = check(x, granularity, True, group_size=32 if granularity == "group" else 0)
    reads = 2 if found.tiling.passes == 3 else 1
    least = reads * sectors(x) + sectors(found.codes, found.scale)
    moved = sum(r.total["read_sectors"] + r.total["write_sectors"] for r in found.results)
    assert moved <= 1.05 * least
    busy = found.results[-1].cores
    assert len(busy) == 48 and all(core["write_bytes"] for core in busy)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_core_idle_from_48_tokens(granularity: str) -> None:
    for tokens in (48, 49, 100):
        x = torch.ones(1, 8, tokens, 128, dtype=torch.float16)
        found = quantize(x, granularity, group_size=64 if granularity == "group" else 0)
        assert all(core["write_bytes"] for core in found.results[-1].cores)
        assert len(found.results[-1].cores) == 48
