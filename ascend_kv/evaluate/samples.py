"""The same prompts continued with two caches, so that a reader sees what quantization does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError
from ascend_kv.evaluate.recipe import BenchRecipe
from ascend_kv.evaluate.results import Sample
from ascend_kv.evaluate.schemes import roomy_llm
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.integrations.prompts import apply_chat_template, tokenize


def sample_prompts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of the prompts: a chat model gets its own template, any other the bare text."""
    if getattr(tokenizer, "chat_template", None) is None:
        return [tokenize(tokenizer, text).token_ids for text in texts]
    return [
        apply_chat_template(tokenizer, [{"role": "user", "content": text}]).token_ids
        for text in texts
    ]


def generate_samples(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    tokenizer: Any,
    prompts: list[list[int]],
    block_size: int,
    advance: Callable[[int], None],
) -> list[Sample]:
    """Continue ``samples.prompts`` greedily, unquantized first.

    Args:
        recipe: its ``samples`` section says what to run.
        loaded: the weights.
        tokenizer: turns tokens into text.
        prompts: of ``sample_prompts``.
        block_size: tokens a block.
        advance: called with 1 after every format.
    """
    if not prompts:
        return []
    continued = []
    for kv_cache_dtype in ("auto", recipe.samples.kv_cache_dtype):
        continued.append(_generate(recipe, loaded, kv_cache_dtype, block_size, prompts))
        advance(1)
    reference_dtype = loaded.dtype
    return [
        Sample(
            prompt=text,
            reference_dtype=reference_dtype,
            reference_text=tokenizer.decode(reference, skip_special_tokens=True),
            quantized_dtype=recipe.samples.kv_cache_dtype,
            quantized_text=tokenizer.decode(quantized, skip_special_tokens=True),
            tokens=len(reference),
            equal_tokens=_common_prefix(reference, quantized),
        )
        for text, reference, quantized in zip(recipe.samples.prompts, *continued, strict=True)
    ]


def _generate(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    kv_cache_dtype: str,
    block_size: int,
    prompts: list[list[int]],
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts) + recipe.samples.max_tokens
    llm = roomy_llm(recipe, loaded, kv_cache_dtype, block_size, len(prompts), longest)
    params = SamplingParams(max_tokens=recipe.samples.max_tokens, temperature=0)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    for output in outputs:
        if output.error is not None:
            raise RunError(f"a sample failed: {output.error}")
    return [output.outputs[0].token_ids for output in outputs]


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    equal = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        equal += 1
    return equal
