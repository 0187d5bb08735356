"""The DeepSeek-V4 recipe: bytes from geometry, requests end to end, one long decode step.

``recipes/deepseek_v4.yaml`` mirrors ``DeepseekRecipe``. The model is small and random
(``integrations.random_deepseek``): figures say what the caches hold and how long attention takes
on this machine, nothing about DeepSeek-V4's quality, which only its own weights could show.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.compressed_layers import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    CompressedFormats,
    explain_compression,
)
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.deepseek_decode import DecodeTime, time_decode
from ascend_kv.evaluate.recipe import read_yaml
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.random_deepseek import make_random_deepseek
from ascend_kv.llm import LLM
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import at_least_one, format_bytes, from_mapping, one_of

_GIB = 1 << 30
_MODELS = {"Flash": DEEPSEEK_V4_FLASH, "Pro": DEEPSEEK_V4_PRO}
_CONTEXTS = (1 << 17, 1 << 20)
_PUBLISHED = {("Pro", 1 << 20): "9.62 GiB"}
_FORMATS = {
    "16 bit": CompressedFormats("bfloat16", "bfloat16", "bfloat16"),
    "INT8 indexer keys": CompressedFormats("bfloat16", "bfloat16", "int8"),
    "INT8 entries and keys": CompressedFormats("bfloat16", "int8", "int8"),
}
_CACHES: dict[str, dict[str, str]] = {
    "the model's type": {},
    "INT8 indexer keys": {"indexer_cache_dtype": "int8"},
    "INT8 entries and keys": {"kv_cache_dtype": "int8", "indexer_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class DeepseekRecipe:
    """What ``recipes/deepseek_v4.yaml`` says; its comments explain every key.

    Raises:
        UsageError: names the field, what was given and what is legal.
    """

    schedule: tuple[str, ...]
    dtype: str
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    decode_context_tokens: int
    decode_steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.schedule:
            one_of("schedule", kind, ("window", "csa", "hca"))
        one_of("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        for tokens in self.prompt_tokens:
            at_least_one("prompt_tokens", tokens)
        if not self.schedule or not self.prompt_tokens:
            field = "prompt_tokens" if self.schedule else "schedule"
            raise UsageError(field, (), "one or more")
        for name in ("output_tokens", "block_size", "decode_context_tokens", "decode_steps"):
            at_least_one(name, getattr(self, name))

    @property
    def max_model_len(self) -> int:
        """The longest request."""
        return max(self.prompt_tokens) + self.output_tokens


class Served(NamedTuple):
    """One run of all requests."""

    name: str
    cache_bytes: dict[str, int]
    geometry_bytes: dict[str, int]
    seconds: float
    tokens: int
    preemptions: int
    fullest: dict[str, float]
    """by group the largest share of its blocks in use"""
    same_tokens: float
    """share of the tokens that the first run generated too"""


def load_deepseek_recipe(path: Path) -> DeepseekRecipe:
    """Read a recipe.

    Raises:
        UsageError: no such file, not YAML, an unknown key or an illegal value.
    """
    return from_mapping(DeepseekRecipe, read_yaml(path), str(path))


class DeepseekResult(NamedTuple):
    """What a run found."""

    recipe: DeepseekRecipe
    served: list[Served]
    decode: list[DecodeTime]

    def tables(self) -> list[TextTable]:
        """For people; what geometry says comes first."""
        return [
            bytes_table(),
            serving_table(self.recipe, self.served),
            decode_table(self.decode),
        ]

    def as_json(self) -> dict[str, Any]:
        """For scripts; bytes of a whole sequence by group, and what is measured."""
        return {
            "schema": "ascend_kv.deepseek/1",
            "recipe": asdict(self.recipe),
            "geometry": [
                {"model": model, "context_tokens": tokens, "formats": formats._asdict()}
                | {"bytes": layers.kv_bytes(tokens, formats)}
                for model, layers in _MODELS.items()
                for tokens in _CONTEXTS
                for formats in _FORMATS.values()
            ],
            "served": [one._asdict() for one in self.served],
            "decode": [
                one._asdict() | {"formats": one.formats._asdict(), "speedup": one.speedup}
                for one in self.decode
            ],
        }


def run_deepseek(recipe: DeepseekRecipe, log: Log) -> DeepseekResult:
    """Run it all."""
    with tempfile.TemporaryDirectory() as directory:
        log.say(f"A random model of {len(recipe.schedule)} layers: {', '.join(recipe.schedule)}")
        make_random_deepseek(Path(directory), recipe.schedule, recipe.seed)
        loaded = load_model(directory, recipe.dtype)
        return DeepseekResult(recipe, serve_all(recipe, loaded, log), time_all(recipe, loaded, log))


def bytes_table() -> TextTable:
    """KV bytes of one sequence of Flash and of Pro, and where the figures around come from."""
    rows = []
    for model, layers in _MODELS.items():
        for tokens in _CONTEXTS:
            for name, formats in _FORMATS.items():
                kept = layers.kv_bytes(tokens, formats)
                state = kept.pop("state")
                cells = [f"{kept[group] / _GIB:.3f}" for group in ("window", "csa", "hca")]
                total = f"{sum(kept.values()) / _GIB:.3f} GiB"
                published = _PUBLISHED.get((model, tokens), "") if name == "16 bit" else ""
                context = f"{model}, {tokens >> 10}K tokens, {name}"
                rows.append((context, *cells, total, format_bytes(state), published))
    header = ("one sequence", "window", "csa", "hca", "all", "and float32 state", "published")
    return TextTable(
        "KV bytes of DeepSeek-V4 (computed from geometry)",
        header,
        rows,
        explain_compression(DEEPSEEK_V4_FLASH, 1 << 17).splitlines(),
    )


def serve_all(recipe: DeepseekRecipe, loaded: LoadedModel, log: Log) -> list[Served]:
    """Serve the same requests with every kind of cache, and once with too little memory."""
    served: list[Served] = []
    first: list[list[int]] = []
    for name, options in _CACHES.items():
        llm = _make(recipe, loaded, options)
        served.append(_serve(recipe, llm, name, first))
        log.say(f"{name}: {served[-1].tokens / served[-1].seconds:.1f} tokens/s")
    tight = _make(recipe, loaded, {"kv_cache_memory_bytes": _tight_bytes(recipe, loaded)})
    served.append(_serve(recipe, tight, "the model's type, little memory", first))
    return served


def _make(recipe: DeepseekRecipe, loaded: LoadedModel, options: dict[str, str]) -> LLM:
    return LLM(
        loaded.path,
        weights=loaded,
        skip_tokenizer_init=True,
        max_model_len=recipe.max_model_len,
        max_num_seqs=recipe.max_num_seqs,
        max_num_batched_tokens=recipe.max_num_batched_tokens,
        block_size=recipe.block_size,
        device="cpu",
        **options,
    )


def _tight_bytes(recipe: DeepseekRecipe, loaded: LoadedModel) -> str:
    """Slots for all, and blocks for half of what the requests have at their ends."""
    layers = loaded.geometry.compressed
    assert layers is not None
    formats = CompressedFormats(loaded.dtype, loaded.dtype, loaded.dtype)
    running = sorted(recipe.prompt_tokens)[-recipe.max_num_seqs :]
    half = sum(tokens + recipe.output_tokens for tokens in running) // 2
    paged = sum(
        tokens // layers.ratio(group) * layers.group_entry_bytes(group, formats)
        for group in ("csa", "hca")
        for tokens in (max(half, recipe.max_model_len + layers.ratio(group) * recipe.block_size),)
    )
    slots = sum(layers.slot_bytes(group, formats) for group in ("window", "state"))
    return str(paged + recipe.max_num_seqs * slots)


def _serve(recipe: DeepseekRecipe, llm: LLM, name: str, first: list[list[int]]) -> Served:
    generator = torch.Generator().manual_seed(recipe.seed)
    vocabulary = llm.geometry.vocab_size
    prompts = [
        {"prompt_token_ids": torch.randint(3, vocabulary, (n,), generator=generator).tolist()}
        for n in recipe.prompt_tokens
    ]
    params = SamplingParams(temperature=0, max_tokens=recipe.output_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    seconds = time.perf_counter() - started
    if not first:
        first += outputs
    pairs = [pair for a, b in zip(first, outputs, strict=True) for pair in zip(a, b, strict=True)]
    cache, stats, layers = llm.cache, llm.engine.stats, llm.geometry.compressed
    assert isinstance(cache, CompressedKVCache) and layers is not None
    fullest: dict[str, float] = {}
    for step in stats.steps:
        for group, counts in step.cache.groups:
            share = counts.used_blocks / counts.num_blocks
            fullest[group] = max(fullest.get(group, 0.0), share)
    return Served(
        name,
        cache.bytes_by_group,
        layers.cache_bytes(cache.blocks, cache.formats),
        seconds,
        stats.generated_tokens,
        stats.preemptions,
        fullest,
        sum(a == b for a, b in pairs) / len(pairs),
    )


def serving_table(recipe: DeepseekRecipe, served: list[Served]) -> TextTable:
    """What the runs took and did."""
    groups = ("window", "csa", "hca", "state")
    rows: list[tuple[str, ...]] = [
        (
            one.name,
            *(format_bytes(one.cache_bytes[group]) for group in groups),
            ", ".join(f"{group} {share:.0%}" for group, share in one.fullest.items()),
            f"{one.tokens / one.seconds:.1f}",
            f"{one.preemptions}",
            f"{one.same_tokens:.0%}",
        )
        for one in served
    ]
    equal = all(one.cache_bytes == one.geometry_bytes for one in served)
    title = f"{len(recipe.prompt_tokens)} requests on the random model (measured on this CPU)"
    header = ("cache", *(f"{group} bytes" for group in groups), "blocks in use at most",
              "tokens/s", "preemptions", "same tokens as the first")  # fmt: skip
    return TextTable(
        title,
        header,
        rows,
        [
            f"Bytes allocated are the geometry's: {'yes, to the byte' if equal else 'NO'}.",
            "A random model is unsure of its tokens, so INT8 changes more of them than it would "
            "of a real one; DeepSeek-V4's own quality cannot be measured without its weights.",
        ],
    )


def time_all(recipe: DeepseekRecipe, loaded: LoadedModel, log: Log) -> list[DecodeTime]:
    """Decode steps at the long context, for every kind of compressed layer and cache."""
    own = loaded.dtype
    times = []
    for kind in ("hca", "csa"):
        if kind not in recipe.schedule:
            continue
        for entries, keys in ((own, own), (own, "int8"), ("int8", "int8")):
            if kind == "hca" and entries == own and keys == "int8":
                continue  # there are no indexer keys
            formats = CompressedFormats(own, entries, keys)
            times.append(
                time_decode(
                    loaded, kind, formats, recipe.decode_context_tokens, recipe.decode_steps
                )
            )
            log.say(
                f"{kind}, {entries}: {times[-1].speedup:.1f} times less time than full attention"
            )
    return times


def decode_table(times: list[DecodeTime]) -> TextTable:
    """Attention time and bytes of single layers against full attention."""
    rows: list[tuple[str, ...]] = [
        (
            f"{one.kind}, entries {one.formats.entries}"
            + (f", indexer keys {one.formats.index_keys}" if one.kind == "csa" else ""),
            f"{one.seconds * 1e3:.2f} ms",
            f"{one.full_seconds * 1e3:.2f} ms",
            f"{one.speedup:.1f}",
            format_bytes(one.cache_bytes),
            format_bytes(one.full_cache_bytes),
            f"{one.smaller:.2f}",
        )
        for one in times
    ]
    context = times[0].context_tokens if times else 0
    return TextTable(
        f"One layer decodes at {context:,} tokens (measured on this CPU, caches filled at random)",
        ("layer", "its attention", "full attention", "times less", "its cache",
         "every token's key", "times smaller"),
        rows,
        [
            "Means over steps that fill whole windows, so that the layer's own part of compressing "
            "is in them, as is planning the step, which a model does once for all layers.",
            "Full attention ran in turns with the layer, over the same heads.",
        ],
    )  # fmt: skip
