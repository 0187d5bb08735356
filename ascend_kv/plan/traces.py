"""Arrivals of requests: drawn from distributions that are named, or read from a user's log."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.user_values import is_int

MOST_REQUESTS = 1_000_000
MOST_SIGMA = 3
"""A request in six would be twenty times as long as the middle one."""
LEAST_RATE = 1e-6
"""Requests a second: one in eleven days."""


class Arrival(NamedTuple):
    """One request: when it comes, in seconds, and how long its prompt and output are."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


def poisson_trace(
    requests: int,
    rate: float,
    prompt_mean: float,
    output_mean: float,
    sigma: float,
    max_model_len: int,
    seed: int = 0,
) -> list[Arrival]:
    """Requests that come independently of one another, with log-normal lengths.

    Args:
        requests: how many.
        rate: a second; infinite: all at once.
        prompt_mean, output_mean: tokens, before clipping.
        sigma: of the logarithm; 0: all equally long.
        max_model_len: prompts are clipped to leave one token for an output, outputs to what is
            left then.
        seed: of the generator.

    Raises:
        UsageError: names the flag whose value is not legal.
    """
    if not 1 <= requests <= MOST_REQUESTS:
        raise UsageError("--requests", requests, f"1 to {MOST_REQUESTS}")
    if not rate >= LEAST_RATE:
        raise UsageError("--simulate", rate, f"requests a second, {LEAST_RATE} or more, or inf")
    if not 0 <= sigma <= MOST_SIGMA:
        raise UsageError("--sigma", sigma, f"0 to {MOST_SIGMA}")
    generator = random.Random(seed)

    def draw(mean: float, most: int) -> int:
        mu = math.log(mean) - sigma**2 / 2
        return max(1, min(most, round(generator.lognormvariate(mu, sigma))))

    arrivals, clock = [], 0.0
    for _ in range(requests):
        clock += generator.expovariate(rate) if math.isfinite(rate) else 0.0
        prompt = draw(prompt_mean, max_model_len - 1)
        arrivals.append(Arrival(clock, prompt, draw(output_mean, max_model_len - prompt)))
    return arrivals


def read_trace(path: Path, max_model_len: int) -> list[Arrival]:
    """Arrivals from JSONL: ``{"arrival_seconds": 0.5, "prompt_tokens": 80, "output_tokens": 40}``.

    A line without ``arrival_seconds`` comes at 0. The lines may be in any order.

    Raises:
        UsageError: no such file, none in it, or a line at fault, by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--trace", str(path), f"a readable JSONL file ({error})") from None
    arrivals = [
        _arrival(f"{path}:{number}", line, max_model_len)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not arrivals:
        raise UsageError("--trace", str(path), "a file with one request or more")
    return sorted(arrivals)


def _arrival(where: str, line: str, max_model_len: int) -> Arrival:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise UsageError(where, line[:80], "a JSON object on each line")
    seconds = entry.get("arrival_seconds", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e12:
        raise UsageError(f"{where}: arrival_seconds", seconds, "seconds, 0 or more")
    lengths: list[int] = []
    for name in ("prompt_tokens", "output_tokens"):
        value: Any = entry.get(name)
        if not is_int(value) or value < 1:
            raise UsageError(f"{where}: {name}", value, "a whole number of at least 1")
        lengths.append(value)
    if sum(lengths) > max_model_len:
        legal = f"at most --max-model-len = {max_model_len} together"
        raise UsageError(f"{where}: prompt_tokens + output_tokens", sum(lengths), legal)
    return Arrival(float(seconds), *lengths)


def lengths_of(arrivals: Sequence[Arrival]) -> list[tuple[int, int]]:
    """Prompt and output tokens of every request."""
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
