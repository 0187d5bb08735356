"""What one row of logits becomes: a token, by the penalties, filters and draw of its request.

Pure functions over numpy rows ``[vocab]``. They hold no state, so rows can be done in any order
and in several threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ascend_kv.engine.outputs import Logprob
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.request import Request

Row = NDArray[np.float32]

_CHUNK = 256
"""Weights summed together when a draw is looked up: the square root of a usual vocabulary."""


def choose(row: Row, request: Request, uniform: float, room: Row) -> int | None:
    """The token that ``request`` takes.

    Args:
        row: the model's logits ``[vocab]``, left as they are.
        request: says how, and which tokens it has so far.
        uniform: 0 or more, below 1; picks the token unless the request is greedy.
        room: as long as the row, to work in.

    Returns:
        None when the largest logit is a NaN or an infinity.
    """
    params = request.params
    best = row.max()
    if not np.isfinite(best):
        return None
    if params.changes_logits:
        row = _change(row.copy(), request)
        best = row.max()
    if params.greedy:
        return int(row.argmax())
    weights = np.subtract(row, best, out=room)
    weights *= np.float32(1 / params.temperature)
    np.exp(weights, out=weights)
    if params.top_p == 1 and params.min_p == 0 and not 0 < params.top_k < row.size:
        return _invert(weights, uniform)
    kept, tokens = _filter(weights, params)
    return int(tokens[_invert(kept, uniform)])


def token_logprobs(row: Row, token: int, count: int) -> dict[int, Logprob]:
    """Log probabilities of ``token`` and of the ``count`` likeliest, likeliest first.

    Args:
        row: logits ``[vocab]``.
        token: always among the result, first when it is not among the likeliest.
        count: 0 gives ``token`` alone.
    """
    top = float(row.max())
    total = top + float(np.log(np.exp(row - top, dtype=np.float64).sum()))
    likeliest: list[int] = []
    if count:
        candidates = np.argpartition(row, -min(count, row.size))[-min(count, row.size) :]
        likeliest = candidates[np.lexsort((candidates, -row[candidates]))].tolist()
    result = {token: Logprob(float(row[token]) - total, int((row > row[token]).sum()) + 1)}
    for rank, other in enumerate(likeliest, start=1):
        result.setdefault(other, Logprob(float(row[other]) - total, rank))
    return result


def _change(row: Row, request: Request) -> Row:
    """Apply min_tokens and the penalties to ``row`` in place."""
    params = request.params
    if params.repetition_penalty != 1:
        seen = np.unique(np.array(request.token_ids))
        penalty = np.float32(params.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if request.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        tokens, counts = np.unique(np.array(request.output_token_ids), return_counts=True)
        row[tokens] -= (params.frequency_penalty * counts + params.presence_penalty).astype(
            np.float32
        )
    if not request.may_stop:
        row[[token for token in request.stop_ids if token < row.size]] = -np.inf
    return row


def _filter(weights: Row, params: SamplingParams) -> tuple[Row, NDArray[np.intp]]:
    """What min_p, top_k and top_p leave: weights and tokens, likeliest first, ties by token.

    Args:
        weights: ``[vocab]``, proportional to the probabilities, the largest is 1.
        params: the limits; top_p counts within what the other two leave.
    """
    limited = 0 < params.top_k < weights.size
    threshold, whole = np.float32(params.min_p), None
    if limited:
        threshold = max(threshold, np.partition(weights, -params.top_k)[-params.top_k])
    elif params.min_p == 0:
        # All tokens below this together weigh less than 1 - top_p of the whole, so none of them
        # belongs to the set: leaving them out first makes the sort short.
        whole = weights.sum()
        threshold = whole * np.float32((1 - params.top_p) / weights.size)
    tokens = np.flatnonzero(weights >= threshold)
    kept = weights[tokens]
    # Sorting the weights alone is several times faster than sorting their places, and tells
    # where the set ends; of what is left, seldom more than a few hundred, the places are sorted.
    falling = np.sort(kept)[::-1][: params.top_k if limited else None]
    count = falling.size
    if params.top_p < 1:
        before = falling.cumsum(dtype=np.float64) - falling
        reached = params.top_p * float(falling.sum() if whole is None else whole)
        # A token stays when those before it have not reached top_p yet; the first always stays.
        count = max(1, int(np.searchsorted(before, reached)))
    inside = kept >= falling[count - 1]
    kept, tokens = kept[inside], tokens[inside]
    order = np.argsort(-kept, kind="stable")[:count]
    return kept[order], tokens[order]


def _invert(weights: Row, uniform: float) -> int:
    """Index drawn with probability proportional to ``weights``, by the inverse distribution."""
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _CHUNK), dtype=np.float64)
    cumulative = sums.cumsum()
    target = uniform * cumulative[-1]
    chunk = min(int(np.searchsorted(cumulative, target, side="right")), sums.size - 1)
    inside = weights[chunk * _CHUNK : (chunk + 1) * _CHUNK].cumsum(dtype=np.float64)
    rest = target - (cumulative[chunk - 1] if chunk else 0.0)
    # Rounding may leave the rest at or past the chunk's sum: stay on the last positive weight.
    rest = min(rest, np.nextafter(inside[-1], 0.0))
    return chunk * _CHUNK + int(np.searchsorted(inside, rest, side="right"))
