"""How long one decode step of DeepSeek-V4's layers attends at a long context, measured.

The caches are filled with random numbers as if a sequence of that length had run. Beside each
kind of layer, full attention over every token's key runs in turns with it: the same queries,
heads and dimensions, ``paged_attention`` over an unquantized paged cache, without storing.
A layer's time is the mean over whole windows of tokens, so it holds its share of compressing, which
only the last token of a window does; planning the step, storing, scoring, selecting and both parts
of its attention are in it too. A model plans once for all layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch

from ascend_kv import ops
from ascend_kv.cache.compressed import CompressedKVCache, PagedVectors
from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.compressed_layers import CompressedFormats, GroupBlocks
from ascend_kv.engine.batch import Batch
from ascend_kv.errors import UsageError
from ascend_kv.integrations.deepseek_v4_attention import make_rotary_table
from ascend_kv.integrations.deepseek_v4_layer import LayerInput
from ascend_kv.integrations.deepseek_v4_step import CompressedStep
from ascend_kv.integrations.loading import LoadedModel

Tensor = torch.Tensor
_BLOCK_SIZE = 128


class DecodeTime(NamedTuple):
    """One kind of layer at one context."""

    kind: str
    formats: CompressedFormats
    context_tokens: int
    seconds: float
    """mean of the steps, which fill whole windows"""
    full_seconds: float
    """mean of full attention's steps, in the same run"""
    cache_bytes: int
    """of the layer's window, entries, indexer keys and state"""
    full_cache_bytes: int
    """of every token's key, which is its value"""

    @property
    def speedup(self) -> float:
        return self.full_seconds / self.seconds

    @property
    def smaller(self) -> float:
        return self.full_cache_bytes / self.cache_bytes


@torch.inference_mode()
def time_decode(
    loaded: LoadedModel, kind: str, formats: CompressedFormats, context_tokens: int, steps: int
) -> DecodeTime:
    """Time the last tokens of a sequence of ``context_tokens`` in one layer.

    Args:
        loaded: a DeepSeek-V4.
        kind: "csa" or "hca".
        formats: of its cache.
        context_tokens: after the last step.
        steps: how many tokens, rounded up to whole windows (4 tokens in "csa", 128 in "hca").

    Raises:
        UsageError: the model has no layer of that kind, or a context shorter than the steps.
    """
    layers = loaded.geometry.compressed
    assert layers is not None, "load_model of a DeepSeek-V4"
    if kind not in layers.kinds:
        raise UsageError("kind", kind, layers.kinds)
    longest = loaded.geometry.max_position_tokens
    steps += -steps % layers.ratio(kind)
    if not steps < context_tokens <= longest:
        raise UsageError("context_tokens", context_tokens, f"more than {steps}, up to {longest}")
    module = loaded.hf_model.base_model.layers[layers.kinds.index(kind)].self_attn
    one = replace(layers, kinds=(kind,))
    csa, hca = (
        -(-(context_tokens // one.ratio(group)) // _BLOCK_SIZE) if kind == group else 0
        for group in ("csa", "hca")
    )
    blocks = GroupBlocks(1, csa, hca, _BLOCK_SIZE)
    cache, tables = CompressedKVCache(one, formats, blocks), GroupTables(one, blocks)
    _fill(cache)
    reserved = tables.reserve("a", context_tokens)
    assert reserved, "the cache was made for it"
    first = context_tokens - steps
    tables.write("a", 0, first - 1)
    dtype = getattr(torch, formats.dtype)
    table = make_rotary_table(loaded.hf_model, context_tokens)
    full = torch.randn((-(-context_tokens // _BLOCK_SIZE), 1, _BLOCK_SIZE, one.head_dim))
    full = full.to(dtype)
    every = torch.arange(full.shape[0], dtype=torch.int32)[None]
    times: list[float] = []
    full_times: list[float] = []
    for position in range(first - 1, context_tokens):  # the first step warms up
        given = _draw(module, loaded, dtype, table[position])
        batch = _batch(tables, position)

        def attend(batch: Batch = batch, given: LayerInput = given) -> None:
            CompressedStep(cache, one, batch, table, table.device).attend(0, given)

        def attend_all(query: Tensor = given.query, length: int = position + 1) -> None:
            scale = module.scaling
            ops.paged_attention(query, full, full, every, [1], [length], scale, sinks=module.sinks)

        times.append(_seconds(attend))
        full_times.append(_seconds(attend_all))
    return DecodeTime(
        kind,
        formats,
        context_tokens,
        fmean(times[1:]),
        fmean(full_times[1:]),
        cache.allocated_bytes,
        context_tokens * one.head_dim * full.element_size(),
    )


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _fill(cache: CompressedKVCache) -> None:
    (layer,) = cache.layers
    for x in (layer.ring, layer.state, layer.index_state):
        if x is not None:
            x.normal_()
    for vectors in (layer.entries, layer.index_keys):
        if vectors is not None:
            _fill_pages(vectors)


def _fill_pages(vectors: PagedVectors) -> None:
    """A block at a time, as a run would store them."""
    count, _, size, width = vectors.codes.shape
    width += 0 if vectors.exact is None else vectors.exact.shape[3]
    for block in range(count):
        slots = torch.arange(block * size, (block + 1) * size)
        vectors.store(torch.randn(size, width), slots)


def _draw(
    module: torch.nn.Module, loaded: LoadedModel, dtype: torch.dtype, row: Tensor
) -> LayerInput:
    """One random token; ``row`` [R / 2, 2] are its angles."""
    config = loaded.hf_model.config
    heads, dim = config.num_attention_heads, config.head_dim
    return LayerInput(
        module=module,
        query=torch.randn(1, heads, dim).to(dtype),
        key=torch.randn(1, dim).to(dtype),
        hidden=torch.randn(1, config.hidden_size).to(dtype),
        residual=torch.randn(1, config.q_lora_rank).to(dtype),
        rotation=(row[None, None, :, 0], row[None, None, :, 1]),
    )


def _batch(tables: GroupTables, position: int) -> Batch:
    """The sequence's token at ``position``."""
    return Batch(
        token_ids=[0],
        positions=[position],
        slot_mapping=tables.write("a", position, position + 1),
        block_tables=[tables.table("a")],
        query_lengths=[1],
        kv_lengths=[position + 1],
        logits_indices=[0],
        group_tables=[tables.group_tables("a")],
    )
