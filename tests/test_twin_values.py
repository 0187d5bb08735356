"""The twin computes as the documentation of the device says; numpy is the other opinion.

One instruction a kernel, from op_kernels/twin/tests/values.cpp.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TWIN = Path(__file__).resolve().parents[1] / "op_kernels" / "twin"
sys.path.insert(0, str(TWIN))

import launch as twin  # noqa: E402

pytestmark = pytest.mark.skipif(
    twin.find_compiler() is None, reason="no C++ compiler for the twin (g++ or clang++)"
)

VALUES = TWIN / "tests" / "values.cpp"
NONE, RINT, FLOOR, CEIL, ROUND, TRUNC, ODD = range(7)
FIVE = (RINT, FLOOR, CEIL, ROUND, TRUNC)
SATURATE = 100  # added to a mode: CTRL[48] off
INTEGERS = ("int8_t", "uint8_t", "int16_t", "int32_t", "int64_t")
NUMPY = {name: np.dtype(name.removesuffix("_t")) for name in INTEGERS}
NUMPY |= {
    "half": np.dtype("float16"),
    "float": np.dtype("float32"),
    "bfloat16_t": np.dtype("uint16"),
}
# From the documentation of Cast, Atlas A2; int4 aside.
CASTS = {
    ("half", "int8_t"): (NONE, *FIVE),
    ("half", "uint8_t"): (NONE, *FIVE),
    ("half", "int16_t"): FIVE,
    ("half", "int32_t"): FIVE,
    ("half", "float"): (NONE,),
    ("int8_t", "half"): (NONE,),
    ("uint8_t", "half"): (NONE,),
    ("int16_t", "half"): (NONE, *FIVE),
    ("int16_t", "float"): (NONE,),
    ("bfloat16_t", "float"): (NONE,),
    ("bfloat16_t", "int32_t"): FIVE,
    ("int32_t", "float"): (NONE, *FIVE),
    ("int32_t", "half"): (NONE,),
    ("int32_t", "int16_t"): (NONE,),
    ("int32_t", "int64_t"): (NONE,),
    ("int64_t", "int32_t"): (NONE,),
    ("int64_t", "float"): FIVE,
    ("float", "half"): (NONE, *FIVE, ODD),
    ("float", "bfloat16_t"): FIVE,
    ("float", "float"): FIVE,
    ("float", "int16_t"): FIVE,
    ("float", "int32_t"): FIVE,
    ("float", "int64_t"): FIVE,
}


WHOLE: dict[int, Callable[[Any], Any]] = {
    NONE: np.rint,
    RINT: np.rint,
    FLOOR: np.floor,
    CEIL: np.ceil,
    TRUNC: np.trunc,
    ROUND: lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v),
}


@functools.cache
def library() -> twin.Library:
    text = VALUES.read_text()
    names = re.findall(r"^KERNEL\((\w+)\)", text, re.M) + ["arguments"]
    names += [f"cast_{a}_{b}" for a, b in re.findall(r"^CAST\((\w+), (\w+)\)", text, re.M)]
    for kind in ("ARITHMETIC", "FUNCTIONS", "REDUCTIONS"):
        names += [f"{kind.lower()}_{t}" for t in re.findall(rf"^{kind}\((\w+)\)", text, re.M)]
    return twin.build(VALUES, kernels=names)


def run(
    kernel: str, x: Any, y: Any, z: Any, n: int, mode: int = 0, *, seed: int = 0
) -> twin.Result:
    """One core of a kernel of values.cpp."""
    given = [None if a is None else twin.inp(a) for a in (x, y)]
    return library().launch(kernel, 1, *given, twin.out(z), n, mode, seed=seed)


def bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def neighbours(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers of a type below and above x, and whether the lower one's last bit is odd."""
    if kind == "half":
        near = x.astype(np.float16)
        low = np.where(near.astype(np.float64) > x, np.nextafter(near, np.float16(-np.inf)), near)
        high = np.where(near.astype(np.float64) < x, np.nextafter(near, np.float16(np.inf)), near)
        return (
            low.astype(np.float64),
            high.astype(np.float64),
            (low.view(np.uint16) & 1).astype(bool),
        )
    bits = x.astype(np.float32).view(np.uint32)
    inward = bfloat((bits >> 16).astype(np.uint16)).astype(np.float64)
    outward = bfloat(((bits >> 16) + ((bits & 0xFFFF) != 0)).astype(np.uint16)).astype(np.float64)
    low, high = np.where(x >= 0, inward, outward), np.where(x >= 0, outward, inward)
    odd = np.where(x >= 0, bits >> 16 & 1, (bits >> 16) + 1 & 1).astype(bool)
    return low, high, odd


@np.errstate(over="ignore", invalid="ignore")
def round_to(x: np.ndarray, kind: str, mode: int) -> np.ndarray:
    """x in a 16-bit type, by choosing between its neighbours."""
    low, high, low_is_odd = neighbours(x, kind)
    largest = 65504.0 if kind == "half" else float(bfloat(np.array([0x7F7F], np.uint16))[0])
    step = 2.0 ** (np.floor(np.log2(largest)) - (10 if kind == "half" else 7))
    below = np.where(np.isneginf(low), -largest - step, low)  # infinity stands for the next number
    above = np.where(np.isposinf(high), largest + step, high)
    down, up = x - below, above - x
    even = np.where(low_is_odd, high, low)
    if mode in (NONE, RINT):
        result = np.where(down < up, low, np.where(up < down, high, even))
    elif mode == ROUND:
        result = np.where(down < up, low, np.where(up < down, high, np.where(x > 0, high, low)))
    elif mode == ODD:
        result = np.where(low == high, low, np.where(low_is_odd, low, high))
    else:
        away = {FLOOR: low, CEIL: high, TRUNC: np.where(x > 0, low, high)}
        result = away[mode]
    return np.where(np.isfinite(x), result, x)


def to_integer(x: np.ndarray, dtype: np.dtype, mode: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    clean = np.nan_to_num(x, nan=0.0, posinf=1e30, neginf=-1e30)
    return np.array([min(max(int(v), limits.min), limits.max) for v in WHOLE[mode](clean)], dtype)


def samples(kind: str) -> np.ndarray:
    """Numbers of a type: random ones of all sizes, ties, limits, infinities and NaN."""
    random = np.random.default_rng(7)
    dtype = NUMPY[kind]
    if dtype.kind in "iu" and kind != "bfloat16_t":
        limits = np.iinfo(dtype)
        sizes = 2.0 ** random.uniform(0, np.log2(limits.max), 300) * random.choice([-1, 1], 300)
        values = [limits.min, limits.max, 0, 1, limits.min + 1, *(int(v) for v in sizes)]
        return np.array([min(max(v, limits.min), limits.max) for v in values], dtype)
    sizes = 2.0 ** random.uniform(-26, 40, 400) * random.choice([-1, 1], 400)
    ties = np.arange(-140, 140) * 0.5
    near = [65504, 65519.9, 65520, 65536, 1e30, 3.4e38, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25]
    near += [2048.5, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
    near += [127.5, 128.5, -128.5, 255.5, 0.0, np.inf, np.nan]
    values = np.concatenate([sizes, ties, near, np.negative(near)])
    if kind == "bfloat16_t":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def expected_cast(x: np.ndarray, source: str, target: str, mode: int) -> np.ndarray:
    wide = (bfloat(x) if source == "bfloat16_t" else x).astype(np.float64)
    if source == "int32_t" and target == "half":
        wide = (wide * 0.5).astype(np.float32).astype(np.float64)  # the kernel's deq scale
    if target in ("half", "bfloat16_t"):
        return round_to(wide, target, mode)
    if target == "float" and source == "float":
        return WHOLE[mode](wide)
    if target == "float":
        return _round_float(x, wide, mode) if x.dtype.kind == "i" else wide
    if x.dtype.kind == "i":
        limits = np.iinfo(NUMPY[target])
        return np.clip(x.astype(object), limits.min, limits.max).astype(NUMPY[target])
    return to_integer(wide, NUMPY[target], mode)


def _round_float(x: np.ndarray, wide: np.ndarray, mode: int) -> np.ndarray:
    near = x.astype(np.float32)
    exact = [int(v) for v in x]
    over = np.array([int(f) > e for f, e in zip(near, exact)])
    under = np.array([int(f) < e for f, e in zip(near, exact)])
    low = np.where(over, np.nextafter(near, np.float32(-np.inf)), near)
    high = np.where(under, np.nextafter(near, np.float32(np.inf)), near)
    tie = np.array([e - int(a) == int(b) - e for a, b, e in zip(low, high, exact)])
    away = np.where(tie, np.where(wide > 0, high, low), near)
    toward = np.where(wide > 0, low, high)
    chosen = {NONE: near, RINT: near, FLOOR: low, CEIL: high, TRUNC: toward, ROUND: away}
    return chosen[mode].astype(np.float64)


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_cast(source: str, target: str) -> None:
    x = samples(source)
    for mode in CASTS[source, target]:
        z = np.zeros(len(x), NUMPY[target])
        run(f"cast_{source}_{target}", x, None, z, len(x), mode)
        expected = expected_cast(x, source, target, mode)
        found = (bfloat(z) if target == "bfloat16_t" else z).astype(expected.dtype)
        np.testing.assert_array_equal(found, expected, err_msg=f"{source} to {target}, mode {mode}")


def test_cast_to_integers_keeps_what_a_float_would_round() -> None:
    x = np.array([2**62 + 1, -(2**40) - 1, 2**31, -(2**31) - 1], np.int64)
    z = np.zeros(4, np.int32)
    run("cast_int64_t_int32_t", x, None, z, 4, NONE)
    assert z.tolist() == [2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]


def test_sixteen_bit_results_saturate_until_ctrl_48_is_set() -> None:
    x = np.array([1e30, -1e30, np.inf, np.nan, 1.0], np.float32)
    z = np.zeros(5, np.float16)
    run("cast_float_half", x, None, z, 5, RINT + SATURATE)
    assert z.tolist() == [65504, -65504, 65504, 0, 1]
    bits, x = np.zeros(5, np.uint16), np.array([3.4e38, -np.inf, np.nan, np.inf, 1.0], np.float32)
    run("cast_float_bfloat16_t", x, None, bits, 5, RINT + SATURATE)
    assert bits.tolist() == [0x7F7F, 0xFF7F, 0, 0x7F7F, 0x3F80]
    x = np.array([60000, np.nan, 1], np.float16)
    z = np.zeros(3, np.float16)
    run("arithmetic_half", x, x, z, 3, 0 + SATURATE)
    assert z.tolist() == [65504, 0, 2]
    run("arithmetic_half", x, x, z, 3, 0)
    assert np.isposinf(z[0]) and np.isnan(z[1]) and z[2] == 2


@pytest.mark.parametrize("kind", ["half", "float", "int32_t", "int16_t"])
def test_arithmetic_rounds_at_every_step(kind: str) -> None:
    random = np.random.default_rng(3)
    dtype = NUMPY[kind]
    if dtype.kind == "f":
        sizes = 2.0 ** random.uniform(-12, 8, (2, 512)) * random.choice([-1, 1], (2, 512))
        x, y = sizes.astype(dtype)
    else:
        x, y = random.integers(-90, 90, (2, 512)).astype(dtype)
    scalar = y[0]
    cases = [x + y, x - y, x * y, np.maximum(x, y), np.minimum(x, y), x + scalar, x * scalar]
    cases += [np.maximum(x, scalar), np.minimum(x, scalar), np.full_like(x, scalar)]
    for mode, expected in enumerate(cases):
        z = np.zeros_like(x)
        run(f"arithmetic_{kind}", x, y, z, 512, mode)
        np.testing.assert_array_equal(z, expected.astype(dtype), err_msg=f"mode {mode}")


def test_nan_in_a_maximum_follows_the_seed() -> None:
    x, y = np.array([[np.nan, 1.0], [2.0, np.nan]], np.float32)
    z = np.zeros(2, np.float32)
    seen = set()
    for seed in range(16):
        run("arithmetic_float", x, y, z, 2, 3, seed=seed)
        seen.add(str(z.tolist()))
    assert seen == {"[nan, nan]", "[2.0, 1.0]"}


@pytest.mark.parametrize("kind", ["half", "float"])
def test_functions(kind: str) -> None:
    x = np.abs(samples(kind))
    x = x[(x > 1e-4) & (x < 80)]
    y = x[::-1].copy()
    wide, other = x.astype(np.float64), y.astype(np.float64)
    cases = [wide / other, np.abs(wide), np.exp(wide), np.log(wide), np.sqrt(wide)]
    cases += [1 / np.sqrt(wide), 1 / wide, wide]
    for mode, exact in enumerate(cases):
        z = np.zeros_like(x)
        run(f"functions_{kind}", x, y, z, len(x), mode)
        with np.errstate(over="ignore"):
            expected = exact.astype(x.dtype)
        finite = np.isfinite(expected)
        np.testing.assert_array_max_ulp(z[finite], expected[finite], maxulp=1)
        assert np.isposinf(z[~finite]).all()
    negative = -x
    run(f"functions_{kind}", negative, y, z, len(x), 7)
    assert not z.any()
