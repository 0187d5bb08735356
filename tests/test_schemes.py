"""Schemes of the main job: batch limits of formats that keep something for each sequence."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from bench_fixture import make_model_with_tokenizer, write_recipe
from rich.console import Console

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.main_job import run_main_job
from ascend_kv.evaluate.recipe import SchemeRecipe, load_recipe
from ascend_kv.evaluate.results import Budget
from ascend_kv.evaluate.schemes import layer_formats, plan_scheme
from ascend_kv.model_files import load_geometry

CHANGES = {
    "block_size": 64,
    "max_model_len": 128,
    "budget": {"sequences": 5, "kv_cache_dtype": "float32"},
    "schemes": [
        {"name": "reserved", "allocator": "contiguous", "kv_cache_dtype": "int4/kivi"},
        {"name": "paged", "kv_cache_dtype": "int4/kivi"},
        {"name": "all", "kv_cache_dtype": "int4/kivi", "batch": "all"},
    ],
    "sweep": {"batches": []},
    "planted_bias": {"texts": 0},
    "perplexity": {"windows": 1, "window_tokens": 65, "cluster_tokens": 8, "formats": []},
    "samples": {"prompts": []},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("allocator", ["contiguous", "paged"])
def test_open_blocks_are_of_the_sequences_that_run(
    allocator: str, model: Path, tmp_path: Path
) -> None:
    """Of 50 requests few run at once: only these have an open block each."""
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", **CHANGES))
    scheme = SchemeRecipe("one", allocator, "int4/kivi")  # type: ignore[arg-type]
    geometry = load_geometry(model)
    formats = layer_formats(recipe, "int4/kivi", geometry, "float32")
    block, opened = geometry.block_bytes(formats, 64), geometry.residual_bytes(formats, 64)
    assert opened > 0
    for sequences in (1, 2, 7, 20):
        budget = Budget(sequences * (2 * block + opened) + opened - 1, 0, 128, "float32", 64)
        lengths = [(70, 40)] * 50  # two blocks at the last token
        batch, plan = plan_scheme(recipe, scheme, geometry, "float32", budget, lengths, 50)
        assert batch == sequences
        assert plan.num_blocks * block + batch * opened <= budget.bytes
        assert plan.residual_bytes == batch * opened
        few, _ = plan_scheme(recipe, scheme, geometry, "float32", budget, lengths, 2)
        assert few == min(2, sequences)  # no more than there are
    everyone = replace(scheme, batch="all")
    with pytest.raises(UsageError, match="open blocks of 50 sequences"):
        plan_scheme(recipe, everyone, geometry, "float32", budget, lengths, 50)
    large = replace(budget, bytes=50 * opened + 4 * block)
    batch, plan = plan_scheme(recipe, everyone, geometry, "float32", large, lengths, 50)
    assert (batch, plan.num_blocks) == (50, 4)
    tiny = replace(budget, bytes=2 * block + opened - 1)
    with pytest.raises(UsageError, match="open blocks of 1 sequences"):
        plan_scheme(recipe, scheme, geometry, "float32", tiny, lengths, 50)


def test_the_blocks_that_are_planned_are_those_that_are_there(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", **CHANGES))
    recipe = replace(recipe, model=str(model), device="cpu")
    log = Log(Console(file=io.StringIO()))
    result = run_main_job(recipe, None, False, log, lambda result: None)
    geometry = load_geometry(model)
    for scheme in result.schemes:
        formats = layer_formats(recipe, scheme.kv_cache_dtype, geometry, "float32")
        opened = scheme.predicted.max_num_seqs * geometry.residual_bytes(formats, 64)
        measured = scheme.measured
        assert measured.kv_allocated_bytes == scheme.predicted.kv_bytes + opened
        assert measured.kv_allocated_bytes <= result.budget.bytes
        assert measured.batch_peak <= scheme.predicted.max_num_seqs
        assert measured.generated_tokens == result.workload.generated_tokens
