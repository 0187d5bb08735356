"""SmolLM2-135M-Instruct, a real model, against transformers: tokens and logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError
from ascend_kv.evaluate.default_model import fetch_default_model
from ascend_kv.geometry import format_spec
from ascend_kv.integrations.huggingface import HuggingFaceModel
from ascend_kv.integrations.loading import LoadedModel, load_model, load_tokenizer
from ascend_kv.llm import LLM

pytestmark = pytest.mark.network

PROMPTS = [
    "The capital of Norway is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "A language model keeps the keys and values of every token it has read, because",
    "One, two, three, four, five,",
]
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return fetch_default_model()
    except RunError as error:
        pytest.skip(f"the model cannot be had here: {error}")


@pytest.fixture(scope="module")
def weights(path: Path) -> LoadedModel:
    return load_model(path)


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def text(prompts: list[list[int]]) -> list[int]:
    return [token for prompt in prompts for token in prompt]


@pytest.fixture(scope="module")
def our_logits(weights: LoadedModel, text: list[int]) -> torch.Tensor:
    """Teacher-forced, in three chunks over blocks out of order."""
    geometry = weights.geometry
    cache = PagedKVCache(geometry, [format_spec("float32")] * geometry.num_layers, 8, 16)
    table = [5, 2, 7, 0, 3, 1, 6, 4]
    model, logits, start = HuggingFaceModel(weights, cache), [], 0
    for stop in (20, 21, len(text)):
        batch = Batch(
            token_ids=text[start:stop],
            positions=list(range(start, stop)),
            slot_mapping=[table[i // 16] * 16 + i % 16 for i in range(start, stop)],
            block_tables=[table],
            query_lengths=[stop - start],
            kv_lengths=[stop],
            logits_indices=list(range(stop - start)),
        )
        logits.append(model.forward(batch))
        start = stop
    return torch.cat(logits)


@pytest.fixture
def reference(weights: LoadedModel) -> Iterator[Any]:
    """The same weights with transformers' own attention, put back afterwards."""
    ours = weights.hf_model.config._attn_implementation
    weights.hf_model.set_attn_implementation("sdpa")
    yield weights.hf_model
    weights.hf_model.set_attn_implementation(ours)


@pytest.fixture(scope="module")
def greedy_tokens(weights: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Generated with chunked prefill and preemption happening."""
    geometry = weights.geometry
    spec = format_spec("float32")
    block = geometry.block_bytes([spec] * geometry.num_layers, 16)
    llm = LLM(
        weights.path,
        weights=weights,
        max_model_len=64,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=7 * block,
        max_num_batched_tokens=12,
        max_num_seqs=4,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    assert llm.engine.stats.preemptions > 0
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(
    reference: Any, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    for prompt, ours in zip(prompts, greedy_tokens, strict=True):
        ids = torch.tensor([prompt])
        theirs = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
        )[0, len(prompt) :].tolist()
        for position, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            if mine != yours:
                best = reference(torch.tensor([prompt + theirs[:position]])).logits[0, -1].topk(2)
                assert {mine, yours} == set(best.indices.tolist())
                assert best.values[0] - best.values[1] < 1e-4
                break


@torch.inference_mode()
def test_teacher_forced_logits_equal_transformers(
    our_logits: torch.Tensor, reference: Any, text: list[int]
) -> None:
    theirs = reference(torch.tensor([text])).logits[0]
    assert theirs.std() > 1
    assert (our_logits - theirs).abs().max() < 1e-4
