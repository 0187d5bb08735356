"""A tiny evaluation: settings that fit the byte-level model of ``bench_fixture``."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.quality.evaluation import Evaluation
from ascend_kv.evaluate.quality.policies import HuggingFaceCache, Policy
from ascend_kv.evaluate.quality.recipe import (
    CopyRecipe,
    EvalRecipe,
    GenerationRecipe,
    NeedleRecipe,
    RecallRecipe,
)
from ascend_kv.evaluate.recipe import WindowRecipe

AS_IT_IS = {"pair_scaling": False, "key_offset_layers": "none"}
POLICIES = (
    Policy("int8", {"kv_cache_dtype": "int8"}),
    Policy("mixed", {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": [0], "block_size": 8}),
    Policy("fp8", huggingface=HuggingFaceCache("fp8", chunk_tokens=8)),
)


def make_recipe(model: Path, **changes: Any) -> EvalRecipe:
    """Every task that needs no package, on the smallest questions that the model has room for."""
    text = model / "text.txt"
    if not text.exists():
        text.write_text("".join(f"Line {i} of {i * i % 97} squares.\n" for i in range(200)))
    recipe = EvalRecipe(
        model=str(model),
        device="cpu",
        text=str(text),
        perplexity=WindowRecipe(windows=2, window_tokens=41, cluster_tokens=10, chunk_tokens=24),
        generation=GenerationRecipe(prompts=3, prompt_tokens=20, max_tokens=6),
        needle=NeedleRecipe(lengths=(150, 170), depths=(0.0, 100.0), repeats=1),
        copy=CopyRecipe(lengths=(9,), passages=2),
        recall=RecallRecipe(pairs=(4,), lists=2, questions=3),
        policies=POLICIES,
    )
    return replace(recipe, **changes)


def make_evaluation(recipe: EvalRecipe, directory: Path) -> Evaluation:
    """The evaluation of a recipe, saying nothing."""
    recipe.check()
    return Evaluation(recipe, directory, False, Log(Console(file=io.StringIO())))
