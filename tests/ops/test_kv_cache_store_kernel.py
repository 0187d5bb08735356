"""The kernel of ``kv_cache_store`` on the twin, against the operator's reference."""

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
    poison_some,
    poisoned,
    random_values,
    same,
    tilings,
    twin,
)

from ascend_kv import ops
from ascend_kv.formats import INT8

pytestmark = needs_compiler

MODES = operators.MODES
FLOATS = (*HALF_TYPES, torch.float32)


@dataclasses.dataclass
class Case:
    """One call of the operator, with everything that is written poisoned."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    mode: str
    blocks: int
    block_size: int
    cache_dtype: torch.dtype = torch.int8
    symmetric: bool = True
    nz: bool = False
    positions: torch.Tensor | None = None
    sides: int = 2
    cores: int = 48
    ub_bytes: int = UB_BYTES

    def __post_init__(self) -> None:
        _, self.heads, self.dim = self.key.shape
        shape = (self.blocks, self.heads, self.block_size, self.dim)
        self.caches = [poisoned(shape, self.cache_dtype) for _ in range(2)]
        rows = 1 if self.mode == "token" else self.heads
        scales = poisoned((self.blocks, rows, self.block_size), torch.float32)
        self.scales = [scales.clone() for _ in range(2)]
        if self.mode == "static":
            given = [torch.rand(1, self.heads, 1, self.dim) * 0.05 for _ in range(2)]
            given[0][0, -1] = 0.0
            self.scales = given
        self.zeros = [torch.randn(s.shape) for s in self.scales]
        self.key_positions = poisoned(shape[:3], torch.int32)

    def tile(self) -> tilings.StoreTiling:
        value, cache = self.value if self.sides == 2 else None, self.layout(self.caches[0])
        return operators.tile_store(
            self.key, value, cache, self.slots, self.mode, self.symmetric, self.positions, self.nz,
            Limits(self.cores, self.ub_bytes),
        )  # fmt: skip

    def expect(self) -> Case:
        """What the reference makes of it."""
        expected = dataclasses.replace(self)
        for name in ("caches", "scales", "zeros"):
            setattr(expected, name, [x.clone() for x in getattr(self, name)])
        expected.key_positions = self.key_positions.clone()
        quantized = self.cache_dtype is torch.int8
        for side, tensor in enumerate((self.key, self.value)[: self.sides]):
            other = torch.empty_like(expected.caches[side])
            scale = expected.scales[side] if quantized else None
            zero_point = expected.zeros[side] if quantized and not self.symmetric else None
            positions = self.positions if side == 0 else None
            ops.kv_cache_store(
                tensor, tensor, expected.caches[side], other, self.slots,
                key_scale=scale, key_zero_point=zero_point,
                value_scale=None if scale is None else scale.clone(),
                value_zero_point=None if zero_point is None else zero_point.clone(),
                key_positions=None if positions is None else expected.key_positions,
                positions=positions, dynamic=self.mode != "static",
            )  # fmt: skip
        return expected

    def layout(self, cache: torch.Tensor) -> torch.Tensor:
        """As the kernel sees it."""
        if not self.nz:
            return cache
        piece = 32 // cache.element_size()
        return cache.unflatten(3, (-1, piece)).transpose(2, 3).contiguous()

    def run(self, seed: int = 0) -> twin.Result:
        """Launch the kernel; the caches hold what it wrote, as [K, N, S, D]."""
        caches = [self.layout(c) for c in self.caches]
        quantized = self.cache_dtype is torch.int8
        none: list[torch.Tensor | None] = [None, None]
        scales = self.scales if quantized else none
        zeros = self.zeros if quantized and not self.symmetric else none
        sides = [[self.key, self.value], caches, scales, zeros]
        if self.sides == 1:
            sides = [[side[0], None] for side in sides]
        values, caches_given, scales, zeros = sides
        _, run = operators.kv_cache_store(
            *values, *caches_given, self.slots,
            key_scale=scales[0], value_scale=scales[1],
            key_zero_point=zeros[0], value_zero_point=zeros[1],
            key_positions=None if self.positions is None else self.key_positions,
            positions=self.positions,
            nz=self.nz, mode=self.mode, limits=Limits(self.cores, self.ub_bytes, seed),
        )  # fmt: skip
        check_run(run, self.ub_bytes)
        if self.nz:
            self.caches = [c.transpose(2, 3).flatten(3).contiguous() for c in caches]
        (result,) = run.launches
        return result

    def check(self, seed: int = 0) -> twin.Result:
        expected = self.expect()
        result = self.run(seed)
        for name in ("scales", "zeros", "caches"):
            for found, wanted in zip(getattr(self, name), getattr(expected, name), strict=True):
                same(found, wanted)
        same(self.key_positions, expected.key_positions)
        return result


def random_slots(draw: random.Random, tokens: int, blocks: int, block_size: int) -> torch.Tensor:
    """Runs of slots, lone slots and skipped tokens; no slot twice."""
    slots: list[int] = []
    free = list(range(blocks * block_size))
    while len(slots) < tokens:
        start = draw.choice(free)
        for slot in range(start, start + draw.choice([1, 1, 2, 7, 30])):
            if slot in free and len(slots) < tokens:
                free.remove(slot)
                slots.append(slot)
        if draw.random() < 0.3 and len(slots) < tokens:
            slots.append(-1)
    return torch.tensor(slots, dtype=draw.choice([torch.int32, torch.int64]))


def random_case(draw: random.Random, mode: str, **settings: object) -> Case:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    block_size = draw.choice([1, 16, 24, 128])
    dim = draw.choice([8, 40, 64, 96, 128, 192])
    tokens = draw.choice([1, 2, 5, 33, 70])
    heads = draw.choice([1, 2, 5, 8])
    dtype = draw.choice([*HALF_TYPES, *HALF_TYPES, torch.float32])
    blocks = 3 + 2 * tokens // block_size
    key, value = (random_values(generator, (tokens, heads, dim), dtype) for _ in range(2))
    if draw.random() < 0.5:  # as a slice of a fused projection
        fused = torch.cat([key, value, value], 1)
        key, value = fused[:, :heads], fused[:, heads : 2 * heads]
    cache_dtype = dtype if mode == "copy" else torch.int8
    if mode == "convert":
        cache_dtype = draw.choice([d for d in FLOATS if d is not dtype])
    positions = torch.arange(tokens, dtype=draw.choice([torch.int32, torch.int64])) * 3
    case = {
        "cache_dtype": cache_dtype,
        "symmetric": draw.random() < 0.5,
        "positions": draw.choice([None, positions]),
        "sides": draw.choice([1, 2, 2]),
        "cores": draw.choice([1, 3, 8, 40, 48]),
        "ub_bytes": draw.choice([UB_BYTES, 64 * 1024, 48 * 1024]),
        **settings,
    }
    slots = random_slots(draw, tokens, blocks, block_size)
    return Case(key, value, slots, mode, blocks, block_size, **case)


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference(mode: str) -> None:
    draw = random.Random(mode)
    for attempt in range(40):
        random_case(draw, mode).check(seed=attempt)


@pytest.mark.parametrize("mode", ["copy", "convert", "token_head", "token"])
def test_nan_and_infinity(mode: str) -> None:
    draw = random.Random(mode)
    generator = torch.Generator().manual_seed(5)
    for attempt in range(4):
        case = random_case(draw, mode)
        case.key, case.value = (poison_some(generator, x) for x in (case.key, case.value))
        case.check(seed=attempt)


@pytest.mark.parametrize("mode", MODES)
def test_nz(mode: str) -> None:
    draw = random.Random(mode)
    generator = torch.Generator().manual_seed(6)
    for dim in (64, 128):
        case = random_case(draw, mode, nz=True)
        shape = (case.key.shape[0], case.heads, dim)
        dtype = case.key.dtype
        case.key, case.value = (random_values(generator, shape, dtype) for _ in range(2))
        case.__post_init__()
        case.check()


@pytest.mark.parametrize("mode", MODES)
def test_more_heads_than_a_tile(mode: str) -> None:
    generator = torch.Generator().manual_seed(7)
    key, value = (random_values(generator, (7, 61, 128), torch.float16) for _ in range(2))
    slots = torch.tensor([3, 4, 5, -1, 20, 6, 7], dtype=torch.int32)
    kind = {"copy": torch.float16, "convert": torch.float32}.get(mode, torch.int8)
    case = Case(key, value, slots, mode, 2, 16, kind, symmetric=False, cores=5, ub_bytes=44 * 1024)
    case.positions = torch.arange(7)
    assert case.tile().tile_heads < 61
    case.check()


@pytest.mark.parametrize("mode", ["token", "static"])
def test_tokens_wider_than_a_repeat_stride_reaches(mode: str) -> None:
    generator = torch.Generator().manual_seed(11)
    for dim in (72, 128):
        key = torch.randn(6, 32, dim, generator=generator).bfloat16()
        slots = torch.tensor([9, 1, 2, 3, -1, 30])
        for symmetric in (True, False):
            case = Case(key, key, slots, mode, 2, 16, symmetric=symmetric, cores=1)
            assert case.tile().tile_tokens > 1
            case.check()


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 2, 64, dtype=torch.float16)
    assert Case(empty, empty, torch.empty(0), "token_head", 1, 16).tile().cores == 0
    # all tokens skipped
    key = torch.ones(50, 2, 64, dtype=torch.float16)
    Case(key, key, torch.full((50,), -1), "token_head", 1, 16).check()


def test_cache_beyond_2_31_bytes() -> None:
    """Slots in the last block of 2.3 GB; only the pages that are touched exist."""
    generator = torch.Generator().manual_seed(9)
    key = random_values(generator, (3, 2, 256), torch.float16)
    blocks = 36000
    assert blocks * 2 * 128 * 256 > 1 << 31
    slots = torch.tensor([blocks * 128 - 1, 5, (blocks - 1) * 128 + 64])
    case = Case(key, key, slots, "token_head", 1, 128, sides=1)
    case.caches[0] = torch.empty(blocks, 2, 128, 256, dtype=torch.int8)
    case.scales[0] = torch.empty(blocks, 2, 128)
    case.run()
    wanted = INT8.encode(key, (2,))
    assert wanted.scale is not None
    block, offset = slots // 128, slots % 128
    same(case.caches[0][block, :, offset], wanted.codes)
    same(case.scales[0][block, :, offset], wanted.scale.squeeze(2))


def touched_sectors(case: Case) -> int:
    """Sectors of everything that a store has to read or write, each once.

    Static scales of one head by each core: they cannot be cut further.
    """
    kept = case.slots[case.slots >= 0]
    width = case.dim * case.caches[0].element_size()
    count = 2 * case.key.numel() * case.key.element_size() // SECTOR_BYTES
    count += case.slots.numel() * case.slots.element_size() // SECTOR_BYTES
    count += 2 * len(kept) * case.heads * width // SECTOR_BYTES
    if case.mode == "static":
        times = case.tile().cores if case.heads == 1 else 2
        count += times * case.heads * case.dim * 4 // SECTOR_BYTES
    rows = {"token_head": case.heads, "token": 1}.get(case.mode, 0)
    if rows:
        scales = kept[:, None] // case.block_size * rows + torch.arange(rows)
        at = scales * case.block_size + kept[:, None] % case.block_size
        count += 2 * len((at * 4 // SECTOR_BYTES).unique())
    return count


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefill", [True, False])
def test_traffic_and_balance(mode: str, dim: int, heads: int, prefill: bool) -> None:
    """A prompt into blocks that follow each other nowhere, and a batch of single tokens."""
    tokens, block_size = (1024 if heads < 32 else 384, 128) if prefill else (96, 128)
    blocks = 10 if prefill else tokens
    key = torch.ones(tokens, heads, dim, dtype=torch.float16)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(8))
    index = torch.arange(tokens)
    slots = order[index // block_size if prefill else index] * block_size
    slots += index % block_size if prefill else index * 37 % block_size
    kind = {"copy": torch.float16, "convert": torch.bfloat16}.get(mode, torch.int8)
    case = Case(key, key, slots.int(), mode, blocks, block_size, kind)
    result = case.run()
    moved = result.total["read_sectors"] + result.total["write_sectors"]
    assert moved <= 1.05 * touched_sectors(case)
    assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)


@pytest.mark.parametrize("mode", MODES)
def test_no_core_idle_from_48_tokens(mode: str) -> None:
    for tokens in (48, 49, 100):
        key = torch.ones(tokens, 1, 64, dtype=torch.float16)
        kind = {"copy": torch.float16, "convert": torch.float32}.get(mode, torch.int8)
        result = Case(key, key, torch.arange(tokens), mode, 1, 128, kind).run()
        assert len(result.cores) == 48 and all(core["write_bytes"] for core in result.cores)
