"""The kernel of ``kv_cache_load`` on the twin, against the operator's reference."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from kernel_harness import (
    HALF_TYPES,
    SECTOR_BYTES,
    UB_BYTES,
    Limits,
    check_run,
    needs_compiler,
    operators,
    random_values,
    same,
    tilings,
    twin,
)

from ascend_kv import ops

pytestmark = needs_compiler

MODES, OFFSETS = operators.MODES, operators.OFFSETS
FLOATS = (*HALF_TYPES, torch.float32)


@dataclasses.dataclass
class Case:
    """One call of the operator over a cache of random codes or values."""

    lengths: list[int]
    heads: int
    dim: int
    block_size: int
    mode: str
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype = torch.int8
    symmetric: bool = True
    nz: bool = False
    offset: str = "none"
    wide_tables: bool = False
    cores: int = 48
    ub_bytes: int = UB_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        needed = [-(-n // self.block_size) for n in self.lengths]
        blocks = sum(needed) + 2
        # Entries past a sequence's tokens name no block: they must not be followed.
        self.tables = torch.full((len(needed), max(needed, default=0) + 1), 1 << 30)
        order = torch.randperm(blocks, generator=g)
        for row, count in enumerate(needed):
            first = sum(needed[:row])
            self.tables[row, :count] = order[first : first + count]
        self.tables = self.tables.to(torch.int64 if self.wide_tables else torch.int32)
        shape = (blocks, self.heads, self.block_size, self.dim)
        if self.cache_dtype is torch.int8:
            pair = torch.randint(-128, 128, (2, *shape), generator=g, dtype=torch.int8)
        else:
            pair = random_values(g, (2, *shape), self.cache_dtype)
        self.caches = list(pair)
        rows = 1 if self.mode == "token" else self.heads
        scales = (blocks, rows, self.block_size)
        if self.mode == "static":
            scales = (1, self.heads, 1, self.dim)
        self.scales = list(torch.rand(2, *scales, generator=g))
        self.scales[0].view(-1)[::7] = float("nan")
        self.zeros = list(torch.randn(2, *scales, generator=g))
        longest = max(self.lengths, default=0)
        self.key_offset = torch.randn(self.heads, self.dim, generator=g) * 100
        angles = torch.rand(longest + 9, self.dim // 2, generator=g) * 6
        self.rotary = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
        self.positions = torch.randint(0, longest + 9, shape[:3], generator=g, dtype=torch.int32)

    def tile(self) -> tilings.LoadTiling:
        return operators.tile_load(
            self.caches[0], self.tables, self.lengths, self.dtype, self.mode, self.symmetric,
            self.offset, limits=Limits(self.cores, self.ub_bytes),
        )  # fmt: skip

    def expect(self) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = self.cache_dtype is torch.int8
        zeros = quantized and not self.symmetric
        rotated = self.offset != "none"
        return ops.kv_cache_load(
            *self.caches, self.tables, self.lengths,
            key_scale=self.scales[0] if quantized else None,
            value_scale=self.scales[1] if quantized else None,
            key_zero_point=self.zeros[0] if zeros else None,
            value_zero_point=self.zeros[1] if zeros else None,
            key_offset=self.key_offset if rotated else None,
            rotary_table=self.rotary if rotated else None,
            key_positions=self.positions if self.offset == "at_positions" else None,
            dtype=self.dtype,
        )  # fmt: skip

    def run(self, seed: int = 0) -> tuple[tuple[torch.Tensor, torch.Tensor], twin.Result]:
        quantized = self.cache_dtype is torch.int8
        caches, none = self.caches, [None, None]
        if self.nz:
            piece = 32 // caches[0].element_size()
            caches = [c.unflatten(3, (-1, piece)).transpose(2, 3).contiguous() for c in caches]
        scales = self.scales if quantized else none
        zeros = self.zeros if quantized and not self.symmetric else none
        rotated = self.offset != "none"
        results, run = operators.kv_cache_load(
            *caches, self.tables, self.lengths,
            key_scale=scales[0], value_scale=scales[1],
            key_zero_point=zeros[0], value_zero_point=zeros[1],
            key_offset=self.key_offset if rotated else None,
            rotary_table=self.rotary if rotated else None,
            key_positions=self.positions if self.offset == "at_positions" else None,
            dtype=self.dtype,
            nz=self.nz, mode=self.mode, limits=Limits(self.cores, self.ub_bytes, seed),
        )  # fmt: skip
        check_run(run, self.ub_bytes)
        (result,) = run.launches
        return results, result

    def check(self, seed: int = 0) -> twin.Result:
        found, result = self.run(seed)
        for one, wanted in zip(found, self.expect(), strict=True):
            same(one, wanted)
        return result


def random_case(draw: random.Random, mode: str, **settings: object) -> Case:
    dtype = draw.choice(FLOATS)
    cache_dtype = torch.int8
    if mode == "copy":
        cache_dtype = dtype
    elif mode == "convert":
        cache_dtype = draw.choice(FLOATS)
    lengths = [draw.choice([0, 1, 5, 16, 33, 140, 300]) for _ in range(draw.choice([1, 2, 5]))]
    lengths[draw.randrange(len(lengths))] = draw.choice([3, 130])
    case = {
        "lengths": lengths,
        "heads": draw.choice([1, 2, 5, 8]),
        "dim": draw.choice([8, 40, 64, 80, 128, 192]),
        "block_size": draw.choice([1, 16, 24, 128]),
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "symmetric": draw.random() < 0.5,
        "wide_tables": draw.random() < 0.5,
        "cores": draw.choice([1, 3, 8, 40, 48]),
        "ub_bytes": draw.choice([UB_BYTES, 64 * 1024, 48 * 1024]),
        "seed": draw.randrange(1 << 30),
        **settings,
    }
    return Case(mode=mode, **case)


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference(mode: str) -> None:
    draw = random.Random(mode)
    for attempt in range(30):
        random_case(draw, mode).check(seed=attempt)


@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("mode", MODES[1:])
def test_key_offset(mode: str, offset: str) -> None:
    draw = random.Random(mode + offset)
    for dim in (16, 64, 80, 128, 256):
        random_case(draw, mode, offset=offset, dim=dim).check()


@pytest.mark.parametrize("mode", MODES)
def test_nz(mode: str) -> None:
    draw = random.Random(mode)
    for dim in (64, 128):
        random_case(draw, mode, nz=True, dim=dim).check()


def test_nothing_to_do() -> None:
    for lengths in ([], [0, 0]):
        assert Case(lengths, 2, 64, 16, "token_head").tile().cores == 0


def test_cache_beyond_2_31_bytes() -> None:
    """A sequence in the last blocks of 2.3 GB; only the pages that are touched exist."""
    case = Case([140], 2, 256, 128, "token_head")
    blocks = 36000
    assert blocks * 2 * 128 * 256 > 1 << 31
    wanted = case.expect()
    for pair in (case.caches, case.scales):
        for side in range(2):
            few, many = (
                pair[side],
                torch.empty(blocks, *pair[side].shape[1:], dtype=pair[side].dtype),
            )
            many[-few.shape[0] :] = few
            pair[side] = many
    case.tables[:, :2] += blocks - 4
    found, _ = case.run()
    for one, expected in zip(found, wanted, strict=True):
        same(one, expected)


def unavoidable_sectors(case: Case, results: tuple[torch.Tensor, ...]) -> int:
    """Codes and scales of the cached tokens, static scales by core, and the results."""
    tokens = sum(case.lengths)
    count = 2 * tokens * case.heads * case.dim * case.caches[0].element_size() // SECTOR_BYTES
    if case.mode == "static":
        count += case.tile().cores * case.heads * case.dim * 4 // SECTOR_BYTES
    rows = {"token_head": case.heads, "token": 1}.get(case.mode, 0)
    count += 2 * sum(-(-n * 4 // SECTOR_BYTES) * rows for n in case.lengths)
    return count + sum(r.numel() * r.element_size() // SECTOR_BYTES for r in results)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("mode", MODES)
def test_traffic_and_balance(mode: str, heads: int, dim: int) -> None:
    kind = {"copy": torch.float16, "convert": torch.bfloat16}.get(mode, torch.int8)
    case = Case([1024, 700, 17, 1024, 300], heads, dim, 128, mode, cache_dtype=kind)
    results, result = case.run()
    moved = result.total["read_sectors"] + result.total["write_sectors"]
    assert moved <= 1.05 * unavoidable_sectors(case, results)
    assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)
    wrote = [core["write_bytes"] for core in result.cores]
    assert max(wrote) <= 1.35 * sum(wrote) / 48


@pytest.mark.parametrize("mode", MODES)
def test_no_core_idle_from_48_tokens(mode: str) -> None:
    kind = torch.float16 if mode == "copy" else torch.float32 if mode == "convert" else torch.int8
    for length in (48, 49, 100):
        _, result = Case([length], 1, 64, 128, mode, cache_dtype=kind).run()
        assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)
