"""What a token costs with one cache against another: loss, divergence and agreement.

With p the unquantized cache's probabilities of the next token and q the policy's, both given the
same tokens so far, and y the token that really follows::

    loss        -log q(y)                      nats
    divergence  KL(p || q) = sum_v p(v) (log p(v) - log q(v))    nats, at least 0
    agreement   1 where argmax p = argmax q, else 0

Computed on the host in float64, a few rows at a time: the divergence of a good INT8 cache is 1e-4
and less, where float32 would leave few digits. Vocabularies are large, so logits of more than a
chunk of tokens are never held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

Tensor = torch.Tensor
_AT_ONCE = 2**19
"""Numbers in float64 at once, so that what one step leaves is still in the cache for the next."""


class Scorer(Protocol):
    """A model with one policy's cache, for one sequence at a time."""

    def forward(self, token_ids: Sequence[int], start: int, rows: Sequence[int]) -> Tensor:
        """Store tokens behind ``start`` others; logits ``[len(rows), vocab]`` of some of them."""
        ...


class Scores(NamedTuple):
    """One number a token."""

    loss: list[float]
    divergence: list[float]
    agreement: list[int]


@dataclass
class WindowScores:
    """All tokens of a window but its first."""

    loss: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    agreement: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """In the model's forwards."""

    def add(self, scores: Scores, seconds: float) -> None:
        """Append those of the next chunk."""
        self.seconds += seconds
        self.loss += scores.loss
        self.divergence += scores.divergence
        self.agreement += scores.agreement


def log_probabilities(logits: Tensor) -> Tensor:
    """``[tokens, vocab]`` float64 on the host."""
    return torch.cat([_normalize(rows) for rows in logits.split(_rows(logits))])


def score_chunk(logits: Tensor, reference: Tensor, targets: Tensor) -> Scores:
    """Score tokens against the reference.

    Args:
        logits: ``[T, vocab]`` of the policy.
        reference: ``[T, vocab]`` of ``log_probabilities``.
        targets: ``[T]`` int64, what really follows.
    """
    parts: list[Tensor] = []
    few = _rows(logits)
    for ours, theirs, wanted in zip(
        logits.split(few), reference.split(few), targets.split(few), strict=True
    ):
        log_q = _normalize(ours)
        # Where p is 0 the term is 0, whatever log p - log q gives.
        terms = torch.where(theirs == -torch.inf, 0.0, theirs.exp() * (theirs - log_q))
        same = (log_q.argmax(-1) == theirs.argmax(-1)).double()
        loss = -log_q.gather(-1, wanted[:, None]).squeeze(-1)
        parts.append(torch.stack((loss, terms.sum(-1), same)))
    loss, divergence, agreement = torch.cat(parts, dim=1).tolist()
    return Scores(loss, divergence, [int(same) for same in agreement])


@torch.inference_mode()
def score_window(
    window: Sequence[int],
    reference: Scorer,
    policies: Mapping[str, Scorer],
    chunk_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[WindowScores, dict[str, WindowScores]]:
    """Run one window through all caches in step, chunk by chunk.

    So the reference runs once for all policies, and of its logits no more than a chunk is held.

    Args:
        window: token ids, a prompt of its own.
        reference: the unquantized cache.
        policies: by name.
        chunk_tokens: tokens a forward.
        advance: called with the number of tokens done since the last call, of every policy.

    Returns:
        The reference's scores (divergence 0, agreement 1), and the policies'.
    """
    own = WindowScores()
    scores = {name: WindowScores() for name in policies}
    for start, chunk in chunks(window, chunk_tokens):
        # The last token of the window has nothing to predict.
        targets = torch.tensor(window[start + 1 : start + 1 + len(chunk)], dtype=torch.int64)
        rows = range(len(targets))
        logits, seconds = _timed(reference, chunk, start, rows)
        expected = log_probabilities(logits)
        loss = -expected.gather(-1, targets[:, None]).squeeze(-1)
        own.add(Scores(loss.tolist(), [0.0] * len(targets), [1] * len(targets)), seconds)
        advance(len(chunk))
        for name, scorer in policies.items():
            logits, seconds = _timed(scorer, chunk, start, rows)
            scores[name].add(score_chunk(logits, expected, targets), seconds)
            advance(len(chunk))
    return own, scores


def chunks(token_ids: Sequence[int], chunk_tokens: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Pieces of a text as they go in one after another, each with the tokens before it."""
    for start in range(0, len(token_ids), chunk_tokens):
        yield start, token_ids[start : start + chunk_tokens]


def _timed(
    scorer: Scorer, chunk: Sequence[int], start: int, rows: Sequence[int]
) -> tuple[Tensor, float]:
    began = time.perf_counter()
    logits = scorer.forward(chunk, start, rows).cpu()  # which waits for the device
    return logits, time.perf_counter() - began


def _normalize(logits: Tensor) -> Tensor:
    return logits.to(device="cpu", dtype=torch.float64).log_softmax(-1)


def _rows(logits: Tensor) -> int:
    return max(1, _AT_ONCE // logits.shape[-1])
