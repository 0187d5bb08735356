"""Tiny models and forwards that the tests of key conditioning share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import make_model

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.params import SamplingParams
from ascend_kv.geometry import FormatSpec, ModelGeometry, format_spec
from ascend_kv.integrations.huggingface import HuggingFaceModel
from ascend_kv.integrations.key_conditioning import ConditionedKeys
from ascend_kv.integrations.key_folding import WeightFolding
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.llm import LLM

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen2-linear": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24},
}
BLOCK_SIZE = 4


def load_uneven(directory: Path, dtype: str = "float32", **changes: Any) -> LoadedModel:
    """A tiny model whose key channels differ in size, as pair scaling wants them to."""
    weights = load_model(make_model(directory, **changes))
    generator = torch.Generator().manual_seed(5)
    for layer in weights.hf_model.model.layers:
        attention = layer.self_attn
        for name in ("k_proj", "q_proj", "k_norm", "q_norm"):
            part = getattr(attention, name, None)
            if part is None or (hasattr(attention, "k_norm") and "proj" in name):
                continue
            rows = part.weight.shape[:1]
            part.weight.mul_(unevenness(rows, generator).view(-1, *[1] * (part.weight.dim() - 1)))
            if getattr(part, "bias", None) is not None:
                part.bias.mul_(10 * unevenness(rows, generator))
    weights.hf_model.to(getattr(torch, dtype))
    return weights._replace(dtype=dtype)


def unevenness(shape: Any, generator: torch.Generator) -> torch.Tensor:
    """Factors from 1/4 to 4, no powers of two."""
    return 4 ** (2 * torch.rand(shape, generator=generator) - 1)


def load_foreign(
    config: transformers.PreTrainedConfig, kv_heads: int, head_dim: int
) -> LoadedModel:
    """A random model of a type that the package does not list, with its geometry by hand."""
    config._attn_implementation = "ascend_kv"
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.normal_(0, 0.15)
    geometry = ModelGeometry(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_tokens=config.max_position_embeddings,
        dtype="float32",
        layer_windows=(None,) * config.num_hidden_layers,
    )
    return LoadedModel(model, geometry, "float32", Path(), WeightFolding(model))


def formats_of(weights: LoadedModel, kv_cache_dtype: str | None = None) -> list[FormatSpec]:
    """One format for all layers; the model's own type when none is named."""
    return [format_spec(kv_cache_dtype or weights.dtype)] * weights.geometry.num_layers


def plan(weights: LoadedModel, kv_cache_dtype: str | None = None, **options: Any) -> Any:
    """``condition_keys`` with one format for all layers."""
    return condition_keys(weights, formats_of(weights, kv_cache_dtype), **options)


def random_tokens(count: int, vocab_size: int = 97, seed: int = 4) -> list[int]:
    """Token ids without the special ones."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def run_in_chunks(
    weights: LoadedModel,
    keys: ConditionedKeys | None,
    tokens: list[int],
    chunks: list[int] | None = None,
    kv_cache_dtype: str | None = None,
) -> torch.Tensor:
    """Teacher-forced logits [T, vocab] of one sequence in scattered blocks, cut into chunks."""
    formats = formats_of(weights, kv_cache_dtype)
    blocks = len(scattered_blocks(len(tokens)))
    cache = PagedKVCache(weights.geometry, formats, blocks, BLOCK_SIZE)
    return run_on_cache(weights, keys, tokens, cache, chunks)


def scattered_blocks(tokens: int) -> list[int]:
    """The block table of a sequence, the same each time."""
    table = list(range(-(-tokens // BLOCK_SIZE)))
    random.Random(0).shuffle(table)
    return table


def run_on_cache(
    weights: LoadedModel,
    keys: ConditionedKeys | None,
    tokens: list[int],
    cache: PagedKVCache,
    chunks: list[int] | None = None,
) -> torch.Tensor:
    """``run_in_chunks`` on a cache that the caller keeps, in blocks of ``scattered_blocks``."""
    table = scattered_blocks(len(tokens))
    for layer in cache.layers:
        for stored in (layer.key, layer.value):
            if stored.dtype.is_floating_point:
                stored.fill_(float("nan"))
    model = HuggingFaceModel(weights, cache, keys)
    logits, start = [], 0
    for size in chunks or [len(tokens)]:
        stop = start + size
        batch = Batch(
            token_ids=tokens[start:stop],
            positions=list(range(start, stop)),
            slot_mapping=[
                table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, stop)
            ],
            block_tables=[table],
            query_lengths=[size],
            kv_lengths=[stop],
            logits_indices=list(range(size)),
        )
        logits.append(model.forward(batch))
        start = stop
    return torch.cat(logits)


def greedy(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The most likely continuation of every prompt."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    items = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [o.outputs[0].token_ids for o in llm.generate(items, params, use_tqdm=False)]
