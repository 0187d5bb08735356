"""Turns logits into tokens, one independent random stream a request.

On the host the work after the softmax is numpy's: its argmax over 32 rows of 49,152 logits
takes 0.3 ms where torch's takes 10 (measured on one Xeon core).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ascend_kv.engine.request import Request

_CHUNK = 256
"""Weights summed together when a draw is looked up: the square root of a usual vocabulary."""


class Sampler:
    """Greedy, temperature and top-p sampling.

    Every sampled token takes exactly one uniform number from its request's own generator, so
    a seed gives the same tokens whatever else is in the batch and however often the request
    was preempted.
    """

    def __init__(self, seed: int = 0) -> None:
        """Requests without a seed of their own get one from ``seed`` and their order."""
        self._seeds = np.random.default_rng(seed)
        self._generators: dict[str, np.random.Generator] = {}

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int | None]:
        """One token for each row of ``logits`` [R, vocab]; None for a row without a finite best.

        A NaN counts as larger than any number, so it is never passed over.
        """
        tokens = _best(logits)
        drawn = [
            row
            for row, request in enumerate(requests)
            if tokens[row] is not None and not request.params.greedy
        ]
        if drawn:
            picked = self._draw(logits[drawn], [requests[row] for row in drawn])
            for row, token in zip(drawn, picked, strict=True):
                tokens[row] = token
        return tokens

    def forget(self, request: Request) -> None:
        """Drop a finished request's generator."""
        self._generators.pop(request.request_id, None)

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        temperatures = torch.tensor([request.params.temperature for request in requests])
        scaled = logits.to(device="cpu", dtype=torch.float32) / temperatures[:, None]
        probabilities = torch.softmax(scaled, dim=-1).numpy()
        tokens = []
        for row, request in zip(probabilities, requests, strict=True):
            uniform = self._generator(request).random()
            if request.params.top_p == 1:
                tokens.append(_invert(row, uniform))
            else:
                kept, candidates = _nucleus(row, request.params.top_p)
                tokens.append(int(candidates[_invert(kept, uniform)]))
        return tokens

    def _generator(self, request: Request) -> np.random.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            seed = request.params.seed
            own = int(self._seeds.integers(2**63)) if seed is None else seed
            generator = self._generators[request.request_id] = np.random.default_rng(own)
        return generator


def _best(logits: torch.Tensor) -> list[int | None]:
    """The first of the largest logits of each row; None where the largest is not finite."""
    if logits.device.type == "cpu":
        rows = logits.to(torch.float32).numpy()
        best = rows.argmax(axis=1)
        finite = np.isfinite(rows[np.arange(len(rows)), best])
    else:  # only two numbers a row leave the device
        values, indices = logits.max(dim=-1)
        best, finite = indices.cpu().numpy(), values.isfinite().cpu().numpy()
    return [int(token) if ok else None for token, ok in zip(best, finite, strict=True)]


def _nucleus(
    probabilities: NDArray[np.float32], top_p: float
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """The likeliest tokens whose probabilities reach ``top_p``, descending: values, tokens.

    All tokens below (1 - top_p) / vocab together weigh less than 1 - top_p, so none of them
    belongs to the set: leaving them out first makes the sort short.
    """
    candidates = np.flatnonzero(probabilities >= (1 - top_p) / probabilities.size)
    candidates = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    values = probabilities[candidates]
    # A token stays when those before it have not reached top_p yet; the first always stays.
    before = values.cumsum(dtype=np.float64) - values
    kept = int(np.searchsorted(before, top_p, side="left"))
    return values[:kept], candidates[:kept]


def _invert(weights: NDArray[np.float32], uniform: float) -> int:
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
