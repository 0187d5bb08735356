"""Profiles of decode steps, one for each cache format that the recipe's schemes use.

They are made when everything else has been measured, since a profiler slows what it watches. Each
lies in a folder of its own with a note of what ran, so that ``ascend-kv profile`` can say what
bandwidth a part reached even where the profiler shows no shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascend_kv.evaluate.recipe import WARM_UP_STEPS, BenchRecipe
from ascend_kv.evaluate.schemes import roomy_llm
from ascend_kv.evaluate.sweep import decode, fill
from ascend_kv.geometry import FORMATS
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM
from ascend_kv.ops import platform
from ascend_kv.whole_files import write_whole

SCHEMA = "ascend_kv.profile_workload/1"
WORKLOAD = "workload.json"
_BATCH = 8
"""Where the recipe has no sweep to take it from."""


def record_profiles(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    block_size: int,
    text_token_ids: Sequence[int],
    directory: Path,
    advance: Callable[[int], None],
) -> list[Path]:
    """Profile ``sweep.steps`` decode steps of the sweep's largest batch with each format.

    Args:
        recipe: with real formats; its ``sweep`` says how long the context is.
        loaded: the weights.
        block_size: tokens a block.
        text_token_ids: the context is cut from their beginning.
        directory: gets a folder for each format.
        advance: called with 1 after every format.

    Returns:
        The folders, in the order of the schemes.
    """
    folders = []
    for kv_cache_dtype in formats_of(recipe):
        # "int8/asymmetric" must not lie inside "int8"; the note in the folder has the real name.
        folder = directory / re.sub(r"[^\w.]", "-", kv_cache_dtype)
        _record(recipe, loaded, kv_cache_dtype, block_size, text_token_ids, folder)
        folders.append(folder)
        advance(1)
    return folders


def formats_of(recipe: BenchRecipe) -> list[str]:
    """The schemes' formats, each once."""
    return list(dict.fromkeys(scheme.kv_cache_dtype for scheme in recipe.schemes))


def _record(
    recipe: BenchRecipe,
    loaded: LoadedModel,
    kv_cache_dtype: str,
    block_size: int,
    text_token_ids: Sequence[int],
    folder: Path,
) -> None:
    sweep = recipe.sweep
    batch, blocks = max(sweep.batches, default=_BATCH), -(-sweep.longest // block_size)
    llm = roomy_llm(recipe, loaded, kv_cache_dtype, block_size, batch, sweep.longest)
    context = list(text_token_ids[: sweep.context_tokens])
    fill(llm, context, blocks, batch)
    positions = list(range(len(context), len(context) + WARM_UP_STEPS + sweep.steps))
    recorded = positions[WARM_UP_STEPS:]
    # The recorder's own warm-up step is the last of those before.
    before = positions[: WARM_UP_STEPS - platform.RECORDER_WARM_UP_STEPS]
    for position in before:
        decode(llm, batch, context[-1], position, blocks, block_size)
    with platform.record_steps(llm.device, folder, len(recorded)) as step:
        for position in positions[len(before) :]:
            decode(llm, batch, context[-1], position, blocks, block_size)
            step()
    note = _workload(llm, loaded, kv_cache_dtype, batch, recorded)
    write_whole(folder / WORKLOAD, json.dumps(note, indent=1))


def _workload(
    llm: LLM, loaded: LoadedModel, kv_cache_dtype: str, batch: int, positions: Sequence[int]
) -> dict[str, Any]:
    """What ran, and the bytes that its steps have to move, by the parts of a profile."""
    geometry = llm.geometry
    item_bytes = FORMATS[loaded.dtype].value_bits // 8
    tokens = sum(position + 1 for position in positions) / len(positions)
    token_bytes = geometry.token_bytes(llm.formats)
    queries = geometry.num_layers * geometry.num_heads * geometry.head_dim * item_bytes
    fresh = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * item_bytes
    return {
        "schema": SCHEMA,
        "model": loaded.path.name,
        "model_dtype": loaded.dtype,
        "device": platform.device_name(llm.device),
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": llm.block_size,
        "batch": batch,
        "context_tokens": tokens,
        "steps": len(positions),
        # Whole contexts: a layer with a sliding window may read less.
        "bytes_per_step": {
            "attention": round(batch * (tokens * token_bytes + 2 * queries)),
            "KV operators": batch * (fresh + token_bytes),
        },
    }
