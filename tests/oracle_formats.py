"""More of the tests' own truth: FP8 and INT4, from their definitions and nothing else.

A code of FP8 is found by looking for the nearest of all that there are, INT4 is counted out; scales
are made in float32 step by step, and rounded to half by numpy where they are stored as halves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import REDUCED, quantize_group

Array = np.ndarray
# exponent bits, mantissa bits, bias, largest finite code
FP8 = {"fp8_e4m3": (4, 3, 7, 0x7E), "fp8_e5m2": (5, 2, 15, 0x7B)}
STORAGES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")


def fp8_value(code: int, storage: str) -> float:
    """The number a byte stands for."""
    _, mantissa_bits, bias, largest = FP8[storage]
    sign = -1.0 if code & 0x80 else 1.0
    size = code & 0x7F
    if size > largest:
        infinite = storage == "fp8_e5m2" and size == largest + 1
        return sign * (math.inf if infinite else math.nan)
    exponent, mantissa = size >> mantissa_bits, size & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def fp8_largest(storage: str) -> float:
    return fp8_value(FP8[storage][3], storage)


def fp8_code(value: float, storage: str) -> int:
    """The nearest finite code, of two as near the even one; beyond the largest, that."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    sizes, size = range(FP8[storage][3] + 1), min(abs(value), fp8_largest(storage))
    nearest = min(sizes, key=lambda c: (abs(fp8_value(c, storage) - size), c & 1))
    return sign | nearest


def quantize_vector(
    values: Sequence[float], storage: str, symmetric: bool = True
) -> tuple[list[int], Any, Any]:
    """Codes of the values that share one scale, the scale and the zero point, as stored.

    FP8 codes are bytes, INT4 codes whole numbers from -8 to 7.
    """
    if storage == "int8":
        return quantize_group(values, symmetric)
    xs = [np.float32(value) for value in values]
    half = storage == "int4"
    kind = np.float16 if half else np.float32
    zero = kind(0)
    if not xs:
        return [], zero, zero
    with np.errstate(all="ignore"):
        if any(not np.isfinite(x) for x in xs):
            return [0] * len(xs), kind(math.nan), kind(math.nan)
        if not half:
            scale = max(abs(x) for x in xs) / np.float32(fp8_largest(storage))
            return [_fp8_static(x, scale, storage) for x in xs], scale, zero
        if symmetric:
            scale, zero_point = kind(max(abs(x) for x in xs) / np.float32(7)), zero
        else:
            scale = kind(max(xs) / np.float32(15) - min(xs) / np.float32(15))
            zero_point = kind(min(xs) + np.float32(8) * np.float32(scale))
        if not (np.isfinite(scale) and np.isfinite(zero_point)):
            return [0] * len(xs), kind(math.nan), kind(math.nan)
        codes = []
        for x in xs:
            from_zero = x if symmetric else x - np.float32(zero_point)
            steps = np.rint(from_zero / np.float32(scale)) if scale else np.float32(0)
            codes.append(int(min(max(steps, -7 if symmetric else -8), 7)))
        return codes, scale, zero_point


def _fp8_static(value: Any, scale: Any, storage: str) -> int:
    """The code for a scale that is given."""
    with np.errstate(all="ignore"):
        steps = np.float32(value) / np.float32(scale)
    return fp8_code(float(steps), storage) if np.isfinite(steps) else 0


def fp8_static(values: Sequence[float], scale: Any, storage: str) -> list[int]:
    """Codes for one scale that is given."""
    return [_fp8_static(value, scale, storage) for value in values]


def quantize(x: Array, granularity: str, storage: str, symmetric: bool = True) -> Any:
    """Bytes, scales and zero points of ``[B, N, T, D]``, group by group; INT4 packed."""
    dims = REDUCED[granularity]
    kept = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    kind = np.float16 if storage == "int4" else np.float32
    codes = np.zeros(x.shape, np.int16)
    scales, zero_points = np.zeros(kept, kind), np.zeros(kept, kind)
    for place in itertools.product(*(range(size) for size in kept)):
        group = tuple(slice(None) if dim in dims else i for dim, i in enumerate(place))
        values = x[group]
        flat, scales[place], zero_points[place] = quantize_vector(
            values.astype(np.float32).ravel().tolist(), storage, symmetric
        )
        codes[group] = np.array(flat, np.int16).reshape(values.shape)
    stored = pack(codes) if storage == "int4" else codes.astype(np.uint8)
    return stored, scales, zero_points


def pack(codes: Array) -> Array:
    """Two whole numbers from -8 to 7 a byte, the first in the low bits."""
    return ((codes[..., ::2] % 16) + 16 * (codes[..., 1::2] % 16)).astype(np.uint8)


def unpack(stored: Array) -> Array:
    """The whole numbers again."""
    out = np.zeros((*stored.shape[:-1], 2 * stored.shape[-1]))
    for first, nibbles in ((0, stored % 16), (1, stored // 16)):
        out[..., first::2] = np.where(nibbles > 7, nibbles.astype(int) - 16, nibbles)
    return out


def as_numbers(stored: Array, storage: str) -> Array:
    """What bytes stand for before scales are applied, float64."""
    if storage == "int4":
        return unpack(stored)
    if storage == "int8":
        return stored.view(np.int8).astype(np.float64)
    table = np.array([fp8_value(code, storage) for code in range(256)])
    return table[stored]


def hadamard(n: int) -> Array:
    """The matrix by its definition: -1 to the number of bits that row and column share."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
