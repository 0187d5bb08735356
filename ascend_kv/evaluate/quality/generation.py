"""How long greedy decoding with a policy says what the unquantized cache says.

The reference writes its continuation one token at a time. A policy is then given the same prompt
and decodes too; up to the first difference both have read the same tokens, so it is enough to
follow the reference's continuation and stop where the policy would have chosen another token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.evaluate.quality.recipe import GenerationRecipe
from ascend_kv.evaluate.quality.scoring import Scorer, chunks


def cut_prompts(recipe: GenerationRecipe, token_ids: Sequence[int]) -> list[list[int]]:
    """Prompts at equal distances over the text; they overlap where the text is short.

    ``token_ids`` holds at least one prompt.
    """
    last = len(token_ids) - recipe.prompt_tokens
    steps = max(1, recipe.prompts - 1)
    starts = [last * number // steps for number in range(recipe.prompts)]
    return [list(token_ids[start : start + recipe.prompt_tokens]) for start in starts]


@torch.inference_mode()
def continue_greedily(
    scorer: Scorer, prompt: Sequence[int], tokens: int, chunk_tokens: int
) -> list[int]:
    """The likeliest ``tokens`` tokens, one after another; an end-of-sequence token ends nothing."""
    written = [_likeliest(_read(scorer, prompt, chunk_tokens))]
    while len(written) < tokens:
        position = len(prompt) + len(written) - 1
        written.append(_likeliest(scorer.forward(written[-1:], position, [0])))
    return written


@torch.inference_mode()
def agreeing_tokens(
    scorer: Scorer, prompt: Sequence[int], reference: Sequence[int], chunk_tokens: int
) -> int:
    """Tokens that greedy decoding writes before it first differs from ``reference``."""
    logits = _read(scorer, prompt, chunk_tokens)
    agreed = 0
    while _likeliest(logits) == reference[agreed]:
        agreed += 1
        if agreed == len(reference):
            break
        position = len(prompt) + agreed - 1
        logits = scorer.forward(reference[agreed - 1 : agreed], position, [0])
    return agreed


def _read(scorer: Scorer, prompt: Sequence[int], chunk_tokens: int) -> torch.Tensor:
    logits = torch.empty(0)
    for start, chunk in chunks(prompt, chunk_tokens):
        logits = scorer.forward(chunk, start, [len(chunk) - 1])
    return logits


def _likeliest(logits: torch.Tensor) -> int:
    """Of one row; -1, which is no token, where a logit is NaN."""
    row = logits[-1].float()
    return -1 if bool(row.isnan().any()) else int(row.argmax())
