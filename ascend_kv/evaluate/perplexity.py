"""Perplexity through the same model, cache and operators that serve requests.

Every window of the text is run as a prompt whose keys and values are stored in the cache's format
and read back from it (``prefill_reads: cache``), so a quantized cache is judged by what attention
really sees. All formats score the same tokens, and only the difference per token is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ascend_kv.engine.batch import Model
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.recipe import WindowRecipe
from ascend_kv.evaluate.single_sequence import single_sequence
from ascend_kv.evaluate.statistics import MeanInterval, clustered_mean


def cut_windows(recipe: WindowRecipe, token_ids: Sequence[int]) -> list[list[int]]:
    """Windows at equal distances over the whole text, none overlapping.

    Raises:
        UsageError: the text is shorter than all windows together.
    """
    length = recipe.window_tokens
    needed = length * recipe.windows
    if len(token_ids) < needed:
        raise UsageError(
            "text",
            f"{len(token_ids)} tokens",
            f"at least {needed} tokens ({recipe.windows} windows of {length})",
            "Give a longer text, or lower perplexity.windows or perplexity.window_tokens.",
        )
    stride = len(token_ids) // recipe.windows
    return [list(token_ids[i * stride : i * stride + length]) for i in range(recipe.windows)]


@torch.inference_mode()
def window_losses(
    model: Model,
    windows: Sequence[Sequence[int]],
    block_size: int,
    chunk_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[float]]:
    """Negative log-likelihood of every token of each window but its first, in nats.

    Args:
        model: its cache has room for the longest window in blocks 0, 1, 2, ...; these are
            overwritten.
        windows: token ids; each is a prompt of its own.
        block_size: tokens a block.
        chunk_tokens: prompt tokens a forward; bounds the memory of the logits.
        advance: called with the number of tokens done since the last call.
    """
    losses = []
    for window in windows:
        values: list[float] = []
        for start in range(0, len(window), chunk_tokens):
            stop = min(start + chunk_tokens, len(window))
            logits = model.forward(single_sequence(window[start:stop], block_size, start))
            # The last token of the window has nothing to predict.
            values += _losses(logits, window[start + 1 : stop + 1])
            advance(stop - start)
        losses.append(values)
    return losses


def compare(
    losses: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    cluster_tokens: int,
) -> MeanInterval:
    """Mean difference of ``losses`` from ``reference`` per token, by clusters within windows."""
    clusters = []
    for ours, theirs in zip(losses, reference, strict=True):
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        clusters += [
            differences[start : start + cluster_tokens]
            for start in range(0, len(differences), cluster_tokens)
        ]
    return clustered_mean(clusters)


def perplexity(losses: Sequence[Sequence[float]]) -> float:
    """exp of the mean loss of all tokens."""
    total = sum(len(window) for window in losses)
    return math.exp(math.fsum(math.fsum(window) for window in losses) / total)


def _losses(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    rows = logits[: len(targets)].float()
    wanted = torch.tensor(targets, dtype=torch.int64, device=logits.device)
    losses: list[float] = torch.nn.functional.cross_entropy(rows, wanted, reduction="none").tolist()
    return losses
