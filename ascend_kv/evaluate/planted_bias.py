"""What a large key bias does to an INT8 cache, with and without key conditioning.

Runs on the small random model of ``integrations.planted_model``, so that the effect shows in
seconds beside any real model. The model writes its own text; every cache then scores that text,
and is held against the unquantized one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ascend_kv.engine.params import SamplingParams
from ascend_kv.evaluate.results import PlantedRow
from ascend_kv.evaluate.single_sequence import single_sequence
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.planted_model import make_planted_model
from ascend_kv.llm import LLM

CACHES: dict[str, dict[str, Any]] = {
    "unquantized": {},
    "INT8 as it is": {
        "kv_cache_dtype": "int8",
        "pair_scaling": False,
        "key_offset_layers": "none",
    },
    "INT8, pair scaling": {"kv_cache_dtype": "int8", "key_offset_layers": "none"},
    "INT8, key offset": {"kv_cache_dtype": "int8", "pair_scaling": False},
    "INT8, both (auto)": {"kv_cache_dtype": "int8"},
}
_TEXT_TOKENS = 128


def measure_planted_bias(
    texts: int = 6, advance: Callable[[int], None] = lambda caches: None
) -> list[PlantedRow]:
    """Make the model, let it write ``texts`` texts, and score them with every cache.

    ``advance`` is called with 1 after every cache of ``CACHES``.
    """
    with tempfile.TemporaryDirectory() as directory:
        weights = load_model(make_planted_model(Path(directory)))
    written = _write_texts(weights, texts)
    rows: list[PlantedRow] = []
    reference = torch.empty(0)
    for name, options in CACHES.items():
        llm = _make_llm(weights, **options)
        logits = torch.stack([_logits(llm, tokens) for tokens in written])
        if not rows:
            reference = logits
        targets = torch.tensor(written)[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        perplexity = math.exp(float(loss))
        rows.append(
            PlantedRow(
                name=name,
                perplexity=perplexity,
                perplexity_ratio=perplexity / rows[0].perplexity if rows else 1.0,
                logit_error=float((logits - reference).square().mean().sqrt() / reference.std()),
                same_choices=float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
                key_conditioning=str(llm.conditioning),
            )
        )
        advance(1)
    return rows


def _make_llm(weights: LoadedModel, **options: Any) -> LLM:
    return LLM(
        weights.path,
        weights=weights,
        skip_tokenizer_init=True,
        max_model_len=_TEXT_TOKENS,
        kv_cache_memory_bytes=1 << 23,
        device="cpu",
        **options,
    )


def _write_texts(weights: LoadedModel, count: int) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, max_tokens=_TEXT_TOKENS - 1, ignore_eos=True, seed=1)
    prompts = [{"prompt_token_ids": [3 + number]} for number in range(count)]
    outputs = _make_llm(weights).generate(prompts, params, use_tqdm=False)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def _logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    return llm.model.forward(single_sequence(tokens, llm.block_size)).float()
