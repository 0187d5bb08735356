"""Turns logits into tokens, one independent random stream a request.

On the host the work is numpy's: over 256 rows of 49,152 logits its argmax takes 6 ms, in two
threads 3, where torch's takes 30 (measured on two Xeon cores).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ascend_kv.engine.choice import Row, choose, token_logprobs
from ascend_kv.engine.outputs import Logprob
from ascend_kv.engine.params import check_whole
from ascend_kv.engine.request import Request

_LOGITS_WORTH_A_THREAD = 1 << 19
"""Below this, handing rows to a thread costs more than it saves."""


class Sampled(NamedTuple):
    """What was chosen for one request."""

    token: int | None
    """None when no logit of the row is a usable best: NaN or infinity."""
    logprobs: dict[int, Logprob] | None = None
    """Of the chosen and the likeliest tokens; None unless asked for."""


class Sampler:
    """Greedy and random sampling as ``SamplingParams`` says.

    Every drawn token takes exactly one uniform number from its request's own generator, so a
    seed gives the same tokens whatever else is in the batch and however often the request was
    preempted.
    """

    def __init__(self, seed: int = 0) -> None:
        """Requests without a seed of their own get one from ``seed`` and their order.

        Raises:
            UsageError: ``seed`` is not a whole number of 0 or more.
        """
        check_whole("seed", seed, 0)
        self._seeds = np.random.default_rng(seed)
        self._generators: dict[str, np.random.Generator] = {}

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[Sampled]:
        """One token for each row of ``logits`` [R, vocab], any float type."""
        others = [row for row, request in enumerate(requests) if not request.takes_best]
        if not others:
            return [Sampled(token) for token in _best(logits)]
        results: list[Sampled | None] = [None] * len(requests)
        for row, chosen in zip(others, self._choose(logits, requests, others), strict=True):
            results[row] = chosen
        greedy = [row for row, result in enumerate(results) if result is None]
        if greedy:
            for row, token in zip(greedy, _best(logits[greedy]), strict=True):
                results[row] = Sampled(token)
        return [result for result in results if result is not None]

    def forget(self, request: Request) -> None:
        """Drop a finished request's generator."""
        self._generators.pop(request.key, None)

    def _choose(
        self, logits: torch.Tensor, requests: Sequence[Request], wanted: list[int]
    ) -> list[Sampled]:
        """What the requests in the rows ``wanted`` take."""
        if len(wanted) < len(logits):
            logits = logits[wanted]
        rows = logits.to(device="cpu", dtype=torch.float32).numpy()
        chosen = [requests[row] for row in wanted]
        room = np.empty(rows.shape[1], dtype=np.float32)  # fresh memory for each row is slow
        return [
            _sampled(row, request, self._uniform(request), room)
            for row, request in zip(rows, chosen, strict=True)
        ]

    def _uniform(self, request: Request) -> float:
        return 0.0 if request.params.greedy else self._generator(request).random()

    def _generator(self, request: Request) -> np.random.Generator:
        generator = self._generators.get(request.key)
        if generator is None:
            seed = request.params.seed
            # Seed and index are hashed together: no continuation repeats one of another seed.
            own = self._seeds.integers(2**63) if seed is None else [seed, request.index]
            generator = self._generators[request.key] = np.random.default_rng(own)
        return generator


def _sampled(row: Row, request: Request, uniform: float, room: Row) -> Sampled:
    token = choose(row, request, uniform, room)
    if token is None or request.params.logprobs is None:
        return Sampled(token)
    return Sampled(token, token_logprobs(row, token, request.params.logprobs))


def _best(logits: torch.Tensor) -> list[int | None]:
    """The first of the largest logits of each row; None where the largest is not finite.

    A NaN counts as larger than any number, so it is never passed over.
    """
    if logits.device.type == "cpu":
        rows = logits.to(torch.float32).numpy()
        best = _argmax(rows)
        finite = np.isfinite(rows[np.arange(len(rows)), best])
    else:  # only two numbers a row leave the device
        values, indices = logits.max(dim=-1)
        best, finite = indices.cpu().numpy(), values.isfinite().cpu().numpy()
    if finite.all():
        return best.tolist()
    return [token if ok else None for token, ok in zip(best.tolist(), finite, strict=True)]


def _argmax(rows: NDArray[np.float32]) -> NDArray[np.intp]:
    """First of the largest of each row, in threads where that pays.

    One long call a thread: the draws of ``choose`` are many short ones, which wait for one
    another (measured: in two threads they take longer than in one).
    """
    threads = min(torch.get_num_threads(), len(rows), rows.size // _LOGITS_WORTH_A_THREAD)
    if threads < 2:
        return rows.argmax(axis=1)
    parts = np.array_split(rows, threads)
    return np.concatenate(list(_threads().map(lambda part: part.argmax(axis=1), parts)))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ascend_kv-sampler")
