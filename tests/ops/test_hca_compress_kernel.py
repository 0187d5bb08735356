"""The kernels of ``hca_compress`` on the twin, against float64."""

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
    tilings,
    twin,
)

pytestmark = needs_compiler

FLOATS = (*HALF_TYPES, torch.float32)
EPS = 1e-6


@dataclasses.dataclass
class Case:
    """One call: random gates and values, everything that is written poisoned."""

    lengths: list[int]
    ratio: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    overlap: bool = False
    bias: bool = True
    norm: bool = True
    rotary_dim: int = 0
    first_windows: list[int] | None = None
    kv_scale: float = 1.0
    cores: int = 48
    ub_bytes: int = UB_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.out_dtype = self.out_dtype or self.dtype
        self.channels = 2 * self.dim if self.overlap else self.dim
        self.windows = [n // self.ratio for n in self.lengths]
        tokens, batch = sum(self.lengths), len(self.lengths)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=g) * scale

        self.kv = randn(tokens, self.channels, scale=self.kv_scale).to(self.dtype)
        self.gate = randn(tokens, self.channels, scale=4.0).to(self.dtype)
        self.position_bias = randn(self.ratio, self.channels)
        previous = randn(2, batch, self.ratio, self.dim, scale=2.0).to(self.dtype)
        self.previous_kv, self.previous_gate = previous
        self.weight = randn(self.dim)
        if self.first_windows is None:
            self.first_windows = [0] * batch
        last = max(
            (a + b for a, b in zip(self.first_windows, self.windows, strict=True)), default=0
        )
        angles = torch.rand(self.ratio * last + 1, self.rotary_dim // 2, generator=g) * 6
        self.rotary = torch.stack([angles.cos(), angles.sin()], -1).contiguous()

    def tile(self) -> tilings.CompressTiling:
        return operators.tile_compress(
            sum(self.windows), len(self.lengths), self.dim, self.ratio, self.overlap, self.bias,
            self.norm, self.rotary_dim, self.dtype, self.out_dtype or self.dtype, EPS,
            Limits(self.cores, self.ub_bytes),
        )  # fmt: skip

    def run(self, seed: int = 0) -> tuple[torch.Tensor, list[twin.Result]]:
        entries, run = operators.hca_compress(
            self.kv, self.gate, self.lengths, self.ratio,
            position_bias=self.position_bias if self.bias else None,
            overlap=self.overlap,
            first_windows=self.first_windows,
            previous_kv=self.previous_kv if self.overlap else None,
            previous_gate=self.previous_gate if self.overlap else None,
            norm_weight=self.weight if self.norm else None,
            norm_eps=EPS,
            rotary_table=self.rotary if self.rotary_dim else None,
            rotary_dim=self.rotary_dim,
            dtype=self.out_dtype,
            limits=Limits(self.cores, self.ub_bytes, seed),
        )  # fmt: skip
        check_run(run, self.ub_bytes)
        return entries, run.launches

    def expect(self) -> torch.Tensor:
        """Entries in float64."""
        assert self.first_windows is not None
        rows, token = [], 0
        for b, length in enumerate(self.lengths):
            for w in range(self.windows[b]):
                start = token + w * self.ratio
                rows.append(self._entry(b, w, start, self.first_windows[b] + w))
            token += length
        return torch.stack(rows) if rows else torch.empty(0, self.dim)

    def _entry(self, b: int, w: int, start: int, window: int) -> torch.Tensor:
        d, own = self.dim, slice(start, start + self.ratio)
        bias = self.position_bias.double() if self.bias else 0.0
        kv, gate = self.kv[own].double(), self.gate[own].double() + bias
        if self.overlap:
            kv, gate = kv[:, d:], gate[:, d:]
            before = None
            if w > 0:
                rows = slice(start - self.ratio, start)
                before = self.kv[rows, :d], self.gate[rows, :d]
            elif window > 0:
                before = self.previous_kv[b], self.previous_gate[b]
            if before is not None:
                first_bias = self.position_bias[:, :d].double() if self.bias else 0.0
                kv = torch.cat([before[0].double(), kv])
                gate = torch.cat([before[1].double() + first_bias, gate])
        entry = (gate.softmax(0) * kv).sum(0)
        if self.norm:
            entry = entry / (entry.square().mean() + EPS).sqrt() * self.weight.double()
        if self.rotary_dim:
            cosine, sine = self.rotary[self.ratio * window].double().unbind(-1)
            first, second = entry[-self.rotary_dim :].unflatten(0, (-1, 2)).unbind(-1)
            turned = torch.stack(
                [first * cosine - second * sine, second * cosine + first * sine], -1
            )
            entry = torch.cat([entry[: -self.rotary_dim], turned.flatten()])
        return entry

    def check(self, seed: int = 0) -> tuple[tilings.CompressTiling, list[twin.Result]]:
        found, results = self.run(seed)
        expected = self.expect()
        assert found.shape == expected.shape
        bad = ~(found.isfinite() | expected.isfinite().logical_not())
        assert not bad.any(), f"{int(bad.sum())} entries are not finite"
        # Float32 errors of a softmax and a norm, and one rounding to the entries' type.
        wanted = expected.nan_to_num(posinf=0.0, neginf=0.0)
        limits = torch.finfo(found.dtype)
        size = wanted.abs().clamp(min=limits.smallest_normal)
        tolerance = 4e-6 * size.amax(-1, keepdim=True) + 0.5001 * limits.eps * size
        error = (found.double().nan_to_num() - wanted).abs()
        assert (error <= tolerance).all(), f"error {(error / tolerance).max():.3g} of the tolerance"
        assert (found.isnan() == expected.isnan()).all()
        return self.tile(), results


def random_case(draw: random.Random, ratio: int, overlap: bool) -> Case:
    batch = draw.choice([1, 1, 2, 5])
    lengths = [draw.randrange(0, 4 * ratio + 3) for _ in range(batch)]
    lengths[draw.randrange(batch)] = draw.choice([ratio, 3 * ratio + 1])
    dim = draw.choice([64, 72, 80, 128, 192, 512])
    return Case(
        lengths, ratio, dim,
        dtype=draw.choice(FLOATS), out_dtype=draw.choice(FLOATS), overlap=overlap,
        bias=draw.random() < 0.7, norm=draw.random() < 0.7,
        rotary_dim=draw.choice([0, 8, 64]),
        first_windows=[draw.choice([0, 0, 1, 7]) for _ in range(batch)],
        kv_scale=draw.choice([1.0, 1.0, 1e-3]),  # small enough for the norm's eps to count
        cores=draw.choice([1, 3, 8, 48]),
        ub_bytes=draw.choice([UB_BYTES, UB_BYTES, 144 * 1024]),
        seed=draw.randrange(1 << 30),
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ratio", [2, 4, 5, 16, 32, 128, 200])
def test_equals_float64(ratio: int, overlap: bool) -> None:
    draw = random.Random(f"{ratio} {overlap}")
    for attempt in range(12 if ratio < 100 else 5):
        random_case(draw, ratio, overlap).check(seed=attempt)


@pytest.mark.parametrize("dtype", FLOATS)
def test_deepseek_shapes(dtype: torch.dtype) -> None:
    hca, _ = Case([128 * 3 + 5, 130], 128, 512, dtype, rotary_dim=64).check()
    assert hca.joint and hca.bias_stays
    csa, _ = Case([300, 4, 3], 4, 512, dtype, overlap=True, rotary_dim=64).check()
    assert csa.joint and csa.bias_stays
    Case([64], 4, 128, dtype, overlap=True, rotary_dim=64, first_windows=[5]).check()


def test_bias_that_does_not_stay() -> None:
    case = Case([601 * 2], 601, 128, rotary_dim=64)  # parts of 64 channels: 601 lines of 256 bytes
    tiling, _ = case.check()
    assert not tiling.bias_stays and tiling.tile_rows < 601


def test_parts_of_one_sector() -> None:
    """Narrower than a vector: two or four tokens side by side; also where no window fits UB."""
    two, _ = Case([18 * 9 + 1], 18, 256).check()
    four, _ = Case([3000, 1], 1000, 512, torch.float32, rotary_dim=64).check()
    assert (two.fold, four.fold) == (2, 4) and four.tile_rows < 1000
    Case([128 * 5], 128, 512, rotary_dim=64, norm=False).check()
    Case([128 * 3, 128], 128, 512, rotary_dim=64, overlap=True, first_windows=[2, 0]).check()


@pytest.mark.parametrize(("cores", "windows"), [(3, 80), (8, 319)])
def test_several_rounds(cores: int, windows: int) -> None:
    """More windows than UB keeps until their norms are known."""
    lengths = [4 * (windows - 40), 2, 4 * 40 + 3]
    tiling, results = Case(
        lengths, 4, 512, overlap=True, rotary_dim=64, cores=cores, first_windows=[0, 3, 3]
    ).check()
    assert tiling.joint and tiling.round_windows < windows and len(results) == 1


def test_extreme_gates() -> None:
    case = Case([16 * 6], 16, 64, torch.float32, norm=False, bias=False)
    case.gate[16:32] *= 1e30  # one token takes all
    case.gate[32:48] = 3.0e38
    case.gate[48:64, ::2] = -float("inf")
    case.gate[50] = -3.0e38
    case.kv[64:80] *= 1e-38
    case.gate[80] = float("nan")
    case.check()


def test_nothing_to_do() -> None:
    assert Case([3, 0], 4, 64).tile().cores == 0
    assert Case([], 4, 64).tile().cores == 0


@pytest.mark.parametrize(
    ("tokens", "ratio", "dim", "dtype"),
    [
        (8192, 128, 512, torch.bfloat16),
        (8192, 128, 512, torch.float32),
        (16384, 128, 256, torch.float16),
        (8192, 4, 512, torch.bfloat16),
        (8192, 4, 128, torch.bfloat16),
        (8192, 16, 256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("cores", [48, 40])
def test_traffic(tokens: int, ratio: int, dim: int, dtype: torch.dtype, cores: int) -> None:
    """At most 1.02 times the sectors of kv, gate, bias, weight, rotary rows and entries, once."""
    case = Case([tokens], ratio, dim, dtype, overlap=ratio == 4, rotary_dim=64, cores=cores)
    _, results = case.run()
    once = (case.kv, case.gate, case.position_bias, case.weight)
    least = sum(x.nbytes for x in once) // SECTOR_BYTES
    row = dim * case.dtype.itemsize + case.rotary_dim * 4
    least += sum(case.windows) * row // SECTOR_BYTES
    if case.overlap:  # nobody needs the last window's first half
        least -= 2 * ratio * dim * case.dtype.itemsize // SECTOR_BYTES
    (result,) = results
    lines = 2 * result.total["cache_lines"]
    assert result.total["read_sectors"] + result.total["write_sectors"] + lines <= 1.02 * least


@pytest.mark.parametrize("ratio", [4, 128])
def test_no_core_idle(ratio: int) -> None:
    """Twelve windows of 512 channels are enough for 48 cores."""
    for windows in (12, 48, 49):
        _, results = Case([windows * ratio], ratio, 512, norm=False).run()
        assert len(results[0].cores) == 48
        assert all(core["write_bytes"] for core in results[0].cores)
