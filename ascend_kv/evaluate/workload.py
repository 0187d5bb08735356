"""The requests of a side-by-side run: real prompts, lengths drawn from a stated distribution.

Every scheme serves the same requests, and every request generates a fixed number of tokens, so
that all schemes do the same work whatever a quantized cache would have made the model say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.plan.traces import MOST_REQUESTS, MOST_SIGMA


@dataclass(frozen=True)
class LengthRecipe:
    """Log-normal lengths in tokens, clipped to [min, max]."""

    mean: float
    sigma: float = 0.3
    min: int = 16
    max: int = 512

    def draw(self, generator: random.Random) -> int:
        """One length. ``mean`` is the mean before clipping: exp(mu + sigma**2 / 2)."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(self.min, min(self.max, round(generator.lognormvariate(mu, self.sigma))))

    @property
    def description(self) -> str:
        return (
            f"log-normal with mean {self.mean:g}, sigma {self.sigma:g}, clipped to {self.min} to "
            f"{self.max}"
        )


@dataclass(frozen=True)
class WorkloadRecipe:
    """How many requests, and how long."""

    requests: int = 64
    prompt_tokens: LengthRecipe = LengthRecipe(mean=150)
    output_tokens: LengthRecipe = LengthRecipe(mean=64, min=16)
    seed: int = 0

    def check(self, max_model_len: int) -> None:
        """Refuse what could never be served.

        Raises:
            UsageError: no requests or too many, lengths that are not 1 <= min <= mean <= max, or a
                longest request that does not fit ``max_model_len``.
        """
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise UsageError("workload.requests", self.requests, f"1 to {MOST_REQUESTS}")
        for name in ("prompt_tokens", "output_tokens"):
            lengths: LengthRecipe = getattr(self, name)
            if not 1 <= lengths.min <= lengths.mean <= lengths.max:
                raise UsageError(f"workload.{name}", lengths.description, "1 <= min <= mean <= max")
            if not 0 <= lengths.sigma <= MOST_SIGMA:
                raise UsageError(f"workload.{name}.sigma", lengths.sigma, f"0 to {MOST_SIGMA}")
        longest = self.prompt_tokens.max + self.output_tokens.max
        if longest > max_model_len:
            raise UsageError(
                "workload",
                f"prompt_tokens.max + output_tokens.max = {longest}",
                f"at most max_model_len = {max_model_len}",
            )


class Request(NamedTuple):
    """One prompt and how many tokens are generated after it."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt_token_ids), self.output_tokens


def draw_requests(recipe: WorkloadRecipe, text_token_ids: Sequence[int]) -> list[Request]:
    """Draw lengths and cut prompts of these lengths out of the text, at random places.

    The same recipe and text give the same requests.

    Raises:
        UsageError: the text is shorter than the longest prompt drawn.
    """
    generator = random.Random(recipe.seed)
    lengths = [
        (recipe.prompt_tokens.draw(generator), recipe.output_tokens.draw(generator))
        for _ in range(recipe.requests)
    ]
    longest = max(prompt for prompt, _ in lengths)
    if len(text_token_ids) < longest:
        raise UsageError(
            "text", f"{len(text_token_ids)} tokens", f"{longest} tokens (longest prompt) or more"
        )
    requests = []
    for prompt, output in lengths:
        start = generator.randrange(len(text_token_ids) - prompt + 1)
        requests.append(Request(list(text_token_ids[start : start + prompt]), output))
    return requests


class WorkloadSummary(NamedTuple):
    """The lengths as they were drawn, in tokens."""

    requests: int
    prompt_mean: float
    prompt_min: int
    prompt_max: int
    output_mean: float
    output_min: int
    output_max: int
    total_mean: float
    generated_tokens: int


def summarize(requests: Sequence[Request]) -> WorkloadSummary:
    """Count what was drawn."""
    prompts = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.output_tokens for request in requests]
    count = len(requests)
    return WorkloadSummary(
        requests=count,
        prompt_mean=sum(prompts) / count,
        prompt_min=min(prompts),
        prompt_max=max(prompts),
        output_mean=sum(outputs) / count,
        output_min=min(outputs),
        output_max=max(outputs),
        total_mean=(sum(prompts) + sum(outputs)) / count,
        generated_tokens=sum(outputs),
    )
