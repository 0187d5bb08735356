"""More of the tests' own truth: compression, merging, scores for eviction, selection.

Loops from the formulas, on top of ``oracle``: no code of the package, float64 unless ``dtype`` says
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from oracle import EVERYTHING_BEFORE, PagedSide, Visible, attend_one, read_sequence

Array = np.ndarray


def compress(
    kv: Array,
    gate: Array,
    lengths: Sequence[int],
    ratio: int,
    *,
    position_bias: Array | None = None,
    overlap: bool = False,
    first_windows: Sequence[int] | None = None,
    previous_kv: Array | None = None,
    previous_gate: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float = 1e-6,
    rotary_table: Array | None = None,
    rotary_dim: int = 0,
    dtype: type = np.float64,
) -> Array:
    """Entries of every full window, channel by channel."""
    width = kv.shape[1]
    dim = width // 2 if overlap else width
    bias = np.zeros((ratio, width)) if position_bias is None else position_bias
    entries = []
    start = 0
    for b, length in enumerate(lengths):
        for inside in range(length // ratio):
            window = inside + (0 if first_windows is None else first_windows[b])
            row = start + inside * ratio
            entry = np.zeros(dim, dtype)
            for c in range(dim):
                own = dim + c if overlap else c
                logits = [dtype(gate[row + j, own]) + dtype(bias[j, own]) for j in range(ratio)]
                values = [dtype(kv[row + j, own]) for j in range(ratio)]
                if overlap and window > 0:
                    for j in range(ratio):
                        if inside > 0:
                            g, x = gate[row - ratio + j, c], kv[row - ratio + j, c]
                        else:
                            assert previous_gate is not None and previous_kv is not None
                            g, x = previous_gate[b, j, c], previous_kv[b, j, c]
                        logits.append(dtype(g) + dtype(bias[j, c]))
                        values.append(dtype(x))
                entry[c] = _pool(logits, values, dtype)
            if norm_weight is not None:
                mean = sum((x * x for x in entry), dtype(0)) / dtype(dim)
                entry = norm_weight.astype(dtype) * entry / np.sqrt(mean + dtype(norm_eps))
            if rotary_table is not None:
                entry = rotate_pairs(entry, rotary_table[ratio * window].astype(dtype), rotary_dim)
            entries.append(entry)
        start += length
    return np.array(entries, dtype).reshape(-1, dim)


def _pool(logits: list, values: list, dtype: type) -> float:
    top = max(logits)
    if any(math.isnan(x) for x in logits) or top == -math.inf:
        return math.nan
    weights = [np.exp(x - top) for x in logits]
    total = sum(weights, dtype(0))
    pooled = dtype(0)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        for weight, value in zip(weights, values, strict=True):
            pooled = pooled + weight / total * value
    return pooled


def rotate_pairs(vector: Array, angles: Array, rotary_dim: int) -> Array:
    """The last channels turned, 2i and 2i + 1 as a pair."""
    out = vector.copy()
    first = len(vector) - rotary_dim
    for i in range(rotary_dim // 2):
        a, b = vector[first + 2 * i], vector[first + 2 * i + 1]
        cosine, sine = angles[i]
        out[first + 2 * i] = a * cosine - b * sine
        out[first + 2 * i + 1] = a * sine + b * cosine
    return out


def merge(
    outputs: Sequence[Array],
    log_sum_exps: Sequence[Array],
    sinks: Array | None = None,
    dtype: type = np.float64,
) -> tuple[Array, Array]:
    """Parts of one attention, query by query and head by head."""
    tokens, heads, dim = outputs[0].shape
    output, log_sum_exp = np.zeros((tokens, heads, dim), dtype), np.zeros((tokens, heads), dtype)
    for t in range(tokens):
        for h in range(heads):
            logits = [dtype(x[t, h]) for x in log_sum_exps]
            sink = [] if sinks is None else [dtype(sinks[h])]
            top = max([*logits, *sink])
            if top == -math.inf:
                log_sum_exp[t, h] = top
                continue
            weights = [np.exp(x - top) for x in logits]
            total = sum([*weights, *(np.exp(x - top) for x in sink)], dtype(0))
            for weight, part in zip(weights, outputs, strict=True):
                if weight > 0:
                    output[t, h] += weight / total * part[t, h].astype(dtype)
            log_sum_exp[t, h] = top + np.log(total)
    return output, log_sum_exp


def select(
    scores: Sequence[Sequence[float]], k: int, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """Repeatedly the best of what is left; NaN is best of all, -inf is not there."""
    chosen = []
    for row, values in enumerate(scores):
        left = dict(enumerate(values))
        if lengths is not None:
            left = {j: x for j, x in left.items() if j < lengths[row]}
        left = {j: x for j, x in left.items() if x != -math.inf}
        taken: list[int] = []
        while left and len(taken) < k:
            best = -1
            for j, x in left.items():  # by ascending index, so only a better one replaces
                if best < 0 or x > left[best] or (x != x and left[best] == left[best]):
                    best = j
            taken.append(best)
            del left[best]
        chosen.append(taken + [-1] * (k - len(taken)))
    return chosen


def attention_scores(
    query: Array,
    key: PagedSide,
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
    dtype: type = np.float64,
) -> Array:
    """``[B, N, longest]``: attention over values that say which token they are, summed."""
    kv_heads, block_size = key.cache.shape[1:3]
    group = query.shape[1] // kv_heads
    scores = np.zeros((len(kv_lengths), kv_heads, max(kv_lengths, default=0)), dtype)
    start = 0
    for row, (queries, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        keys, tokens = read_sequence(key, tables[row], cached), np.eye(cached)
        for i in range(queries):
            t = start + i
            asked = cached - queries + i if query_positions is None else int(query_positions[t])
            for h in range(query.shape[1]):
                n = h // group
                places = list(range(cached))
                if key_positions is not None:
                    places = [
                        int(key_positions[int(tables[row][j // block_size]), n, j % block_size])
                        for j in range(cached)
                    ]
                seen = [j for j in range(cached) if visible(asked, places[j])]
                bias = [0.0 if score_bias is None else score_bias[t, h, places[j]] for j in seen]
                sink = None if sinks is None else float(sinks[h])
                weights, _ = attend_one(
                    query[t, h], keys[n], tokens, softmax_scale, seen, bias, sink, dtype
                )
                scores[row, n, :cached] += weights
        start += queries
    return scores
