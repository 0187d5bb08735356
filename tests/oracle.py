"""The tests' own truth, written with loops, in numpy, from the formulas and nothing else.

It shares no code with the package. Attention and reading back are computed in float64; with
``dtype=numpy.float32`` the same loops give what single precision can do, which is the yardstick
for tolerances. Quantization is bytes and is computed in float32 step by step, since a code is
decided by the rounding of float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray

REDUCED = {
    "layer": (1, 2, 3),
    "head": (2, 3),
    "token": (1, 3),
    "token_head": (3,),
    "channel": (2,),
}


def quantize_group(values: Sequence[float], symmetric: bool) -> tuple[list[int], Any, Any]:
    """Codes, scale and zero point of the values that share one scale."""
    xs = [np.float32(value) for value in values]
    zero = np.float32(0)
    if not xs:
        return [], zero, zero
    nan = np.float32(math.nan)
    with np.errstate(all="ignore"):
        if any(not np.isfinite(x) for x in xs):
            return [0] * len(xs), nan, nan
        if symmetric:
            scale = max(abs(x) for x in xs) / np.float32(127)
            zero_point = zero
        else:
            scale = max(xs) / np.float32(255) - min(xs) / np.float32(255)
            zero_point = min(xs) + np.float32(128) * scale
            if not np.isfinite(zero_point):
                return [0] * len(xs), nan, nan
        return quantize_static(xs, scale, zero_point, symmetric), scale, zero_point


def quantize_static(
    values: Sequence[float], scale: Any, zero_point: Any, symmetric: bool
) -> list[int]:
    """Codes for a scale that is given."""
    lowest = -127 if symmetric else -128
    codes = []
    with np.errstate(all="ignore"):
        for value in values:
            if scale == 0:
                codes.append(0)
                continue
            x = np.float32(value) if symmetric else np.float32(value) - np.float32(zero_point)
            steps = np.rint(np.float32(x) / np.float32(scale))
            codes.append(int(min(max(steps, lowest), 127)))
    return codes


def quantize(x: Array, granularity: str, symmetric: bool) -> tuple[Array, Array, Array]:
    """Codes, scales and zero points of ``[B, N, T, D]``, group by group."""
    dims = REDUCED[granularity]
    kept = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    codes = np.zeros(x.shape, np.int8)
    scales, zero_points = np.zeros(kept, np.float32), np.zeros(kept, np.float32)
    for place in itertools.product(*(range(size) for size in kept)):
        group = tuple(slice(None) if dim in dims else i for dim, i in enumerate(place))
        values = x[group]
        flat, scales[place], zero_points[place] = quantize_group(
            values.astype(np.float32).ravel().tolist(), symmetric
        )
        codes[group] = np.array(flat, np.int8).reshape(values.shape)
    return codes, scales, zero_points


class PagedSide(NamedTuple):
    """Keys or values in the paged cache, with what is needed to read them."""

    cache: Array
    scale: Array | None = None
    zero_point: Array | None = None


def read_token(side: PagedSide, block: int, head: int, offset: int) -> Array:
    """One stored vector, in float64."""
    vector = np.array([float(code) for code in side.cache[block, head, offset]])
    for parameter, apply in ((side.scale, np.multiply), (side.zero_point, np.add)):
        if parameter is None:
            continue
        if parameter.ndim == 4 and parameter.shape[3] not in (1, len(vector)):  # by group
            group = len(vector) // parameter.shape[3]
            row = [parameter[block, head, offset, c // group] for c in range(len(vector))]
        elif parameter.ndim == 3:
            row = parameter[block, min(head, parameter.shape[1] - 1), offset]
        else:
            row = parameter[0, min(head, parameter.shape[1] - 1), 0]
        vector = apply(vector, np.asarray(row, np.float64))
    return vector


def read_sequence(side: PagedSide, table: Sequence[int], length: int) -> Array:
    """The ``length`` cached tokens of one sequence, ``[N, length, D]`` in float64."""
    _, heads, block_size, dim = side.cache.shape
    out = np.zeros((heads, length, dim))
    for token in range(length):
        block, offset = int(table[token // block_size]), token % block_size
        for head in range(heads):
            out[head, token] = read_token(side, block, head, offset)
    return out


def rotate(vector: Array, position: int, table: Array) -> Array:
    """The rotary embedding at a position: channels c and c + D / 2 turn as a pair."""
    half = len(vector) // 2
    out = np.zeros_like(vector)
    for c in range(half):
        cosine, sine = table[position, c]
        out[c] = vector[c] * cosine - vector[c + half] * sine
        out[c + half] = vector[c] * sine + vector[c + half] * cosine
    return out


class Visible(NamedTuple):
    """Which keys a query sees."""

    causal: bool = True
    window: int = 0

    def __call__(self, query_position: int, key_position: int) -> bool:
        if self.causal and key_position > query_position:
            return False
        return not (self.window and query_position - key_position >= self.window)


EVERYTHING_BEFORE = Visible()


class Bits(NamedTuple):
    """What is left of queries and of weights where codes are multiplied in whole numbers."""

    query: int | None = None
    weight: int | None = None


EXACT = Bits()


def round_to_bits(rows: Array, bits: int | None) -> Array:
    """Each number to the nearest of as many steps as its row's largest has with so many bits."""
    if bits is None:
        return rows
    size = np.abs(rows).max(-1, keepdims=True, initial=0)
    step = size / (2 ** (bits - 1) - 1)
    kept = ~np.isfinite(size) | (size < 2.0**-100)
    with np.errstate(all="ignore"):
        return np.where(kept, rows, np.rint(rows / step) * step)


def attend_one(
    query: Array,
    keys: Array,
    values: Array,
    softmax_scale: float,
    seen: Sequence[int],
    bias: Sequence[float],
    sink: float | None,
    dtype: type = np.float64,
    bits: Bits = EXACT,
) -> tuple[Array, float]:
    """One query head over the keys it sees; ``bias`` is one number for each of them."""
    query = round_to_bits(query, bits.query)
    scores = [
        dtype(dtype(softmax_scale) * np.dot(query.astype(dtype), keys[j].astype(dtype))) + dtype(b)
        for j, b in zip(seen, bias, strict=True)
    ]
    logits = scores if sink is None else [*scores, dtype(sink)]
    if any(math.isnan(logit) for logit in logits):
        return np.full(values.shape[1], math.nan, dtype), math.nan
    top = max(logits, default=-math.inf)
    if top == -math.inf:
        return np.zeros(values.shape[1], dtype), -math.inf
    weights = [np.exp(score - top) for score in scores]
    total = sum(weights, dtype(0)) + (0 if sink is None else np.exp(dtype(sink) - top))
    # what is rounded is a weight times the scale of its value, which the largest channel stands for
    sizes = np.array([np.abs(values[j]).max() or 1 for j in seen])
    weights = list(round_to_bits(np.array(weights) * sizes, bits.weight) / sizes)
    output = np.zeros(values.shape[1], dtype)
    for weight, j in zip(weights, seen, strict=True):
        output = output + dtype(weight) / total * values[j].astype(dtype)
    return output, float(top + np.log(total))


def paged_attention(
    query: Array,
    key: PagedSide,
    value: PagedSide,
    tables: Array,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    visible: Visible = EVERYTHING_BEFORE,
    sinks: Array | None = None,
    score_bias: Array | None = None,
    key_positions: Array | None = None,
    query_positions: Array | None = None,
    entries: Array | None = None,
    dtype: type = np.float64,
    bits: Bits = EXACT,
) -> tuple[Array, Array]:
    """Output ``[T, H, D]`` and log-sum-exp ``[T, H]``, query by query and head by head."""
    tokens, heads, dim = query.shape
    kv_heads, block_size = key.cache.shape[1:3]
    output, log_sum_exp = np.zeros((tokens, heads, dim), dtype), np.zeros((tokens, heads))
    start = 0
    for row, (queries, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        keys, values = (read_sequence(side, tables[row], cached) for side in (key, value))
        for i, h in itertools.product(range(queries), range(heads)):
            t, n = start + i, h // (heads // kv_heads)
            asked = cached - queries + i if query_positions is None else int(query_positions[t])
            places = list(range(cached))
            if key_positions is not None:
                places = [
                    int(key_positions[int(tables[row][j // block_size]), n, j % block_size])
                    for j in range(cached)
                ]
            listed = range(cached) if entries is None else [int(j) for j in entries[t] if j >= 0]
            seen = [j for j in listed if visible(asked, places[j])]
            bias = [0.0 if score_bias is None else score_bias[t, h, places[j]] for j in seen]
            sink = None if sinks is None else float(sinks[h])
            output[t, h], log_sum_exp[t, h] = attend_one(
                query[t, h], keys[n], values[n], softmax_scale, seen, bias, sink, dtype, bits
            )
        start += queries
    return output, log_sum_exp
