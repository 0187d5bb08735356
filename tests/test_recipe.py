"""The main job's recipe: the shipped one, its quick version, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_fixture import RECIPE, write_recipe

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.recipe import (
    BenchRecipe,
    PerplexityRecipe,
    SampleRecipe,
    SchemeRecipe,
    SweepRecipe,
    load_recipe,
    with_real_formats,
)
from ascend_kv.ops.fused_attention import plan
from ascend_kv.ops.fused_request import Request

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_scheme_of_the_shipped_recipe_copies_the_cache_in_every_decode(dtype: str) -> None:
    """Qwen2.5-7B on a 910B: a cache in another 16-bit type would, and be a handicapped baseline."""
    recipe = load_recipe(REPOSITORY / "recipes" / "qwen_910b.yaml")
    recipe = with_real_formats(recipe, dtype)
    half = dtype if dtype != "float32" else "float16"
    assert recipe.budget.kv_cache_dtype == half
    assert recipe.perplexity.formats == (half, "int8")
    stored = [scheme.kv_cache_dtype for scheme in recipe.schemes]
    assert stored == [half, "int8", half, "int8", "int8"]
    for name in stored:
        scales = "token_head" if name == "int8" else "none"
        request = Request(
            query_dtype=getattr(torch, half),
            cache_dtype=getattr(torch, name),
            num_heads=28,
            kv_heads=4,
            head_dim=128,
            num_blocks=200,
            block_size=128,
            softmax_scale=128**-0.5,
            key=scales,
            value=scales,
            query_lengths=(1, 1),
            kv_lengths=(300, 1024),
        )
        assert list(plan(request).routes) == ["decode: paged"], name


def test_real_formats_everywhere() -> None:
    recipe = BenchRecipe(
        schemes=(SchemeRecipe("a", kv_cache_dtype="16-bit"), SchemeRecipe("b")),
        sweep=SweepRecipe(kv_cache_dtype="16-bit"),
        perplexity=PerplexityRecipe(formats=("16-bit", "bfloat16", "int8")),
        samples=SampleRecipe(kv_cache_dtype="16-bit"),
    )
    real = with_real_formats(recipe, "bfloat16")
    formats = [kv_cache_dtype for _, kv_cache_dtype in real.formats()]
    assert formats == ["bfloat16", "int8", "bfloat16", "bfloat16", "int8", "bfloat16"]


def test_lengths_that_just_fit_are_not_refused() -> None:
    recipe = BenchRecipe(
        max_model_len=100,
        sweep=SweepRecipe(context_tokens=90, steps=8),
        perplexity=PerplexityRecipe(window_tokens=100),
        samples=SampleRecipe(max_tokens=97),
    )
    recipe.check_lengths(100, [[1, 2, 3], []])
    without = replace(recipe, sweep=SweepRecipe(batches=(), context_tokens=999))
    without.check_lengths(100, [])
    with pytest.raises(UsageError, match="max_model_len"):
        recipe.check_lengths(99, [])


def test_quick_replaces_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml")
    full, quick = load_recipe(path), load_recipe(path, quick=True)
    assert (full.workload.requests, quick.workload.requests) == (16, 6)
    assert replace(quick, workload=full.workload) == full


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "x"}, "modle.*model"),
        ({"workload": {"request": 3}}, "workload.request.*requests"),
        ({"schemes": []}, "one scheme or more"),
        ({"schemes": [{"name": "a", "allocator": "heap"}]}, "heap.*paged, contiguous"),
        ({"schemes": [{"name": "a", "batch": "huge"}]}, "huge.*planned, all"),
        (
            {"schemes": [{"name": "a"}, {"name": "b", "kv_cache_dtype": "int3"}]},
            r"^schemes\[1\]\.kv_cache_dtype: got 'int3'.*int8",
        ),
        ({"sweep": {"kv_cache_dtype": "int3"}}, "^sweep.kv_cache_dtype: got 'int3'"),
        ({"perplexity": {"formats": ["int8", "int3"]}}, r"^perplexity.formats\[1\]: got 'int3'"),
        ({"samples": {"kv_cache_dtype": "int3"}}, "^samples.kv_cache_dtype: got 'int3'"),
        ({"seed": -1}, "^seed: got -1; legal: 0 or more"),
        ({"dtype": "foo"}, "^dtype: got 'foo'; legal: auto, float32, float16, bfloat16$"),
        ({"dtype": "int8"}, "^dtype: got 'int8'; legal: auto, float32, float16, bfloat16$"),
        ({"schemes": [{"name": "a"}, {"name": "a"}]}, "names that differ"),
        ({"granularity": "head"}, "granularity.*token_head"),
        ({"granularity": "row"}, "granularity.*token_head"),
        ({"granularity": "group"}, "group_size: got None"),
        ({"scale_type": "static"}, "kv_cache_scales: got None"),
        ({"kv_cache_scales": "x.safetensors"}, "scale_type: got 'dynamic'; legal: static"),
        ({"prefill_reads": "fresh"}, "prefill_reads.*cache"),
        ({"budget": {"sequences": 0}}, "budget.sequences"),
        ({"budget": {"kv_cache_dtype": "int8"}}, "budget.kv_cache_dtype.*float16"),
        ({"max_model_len": 40}, "at most max_model_len = 40"),
        ({"pair_scaling": "all"}, "pair_scaling"),
        ({"key_offset_layers": "some"}, "key_offset_layers.*auto"),
        ({"planted_bias": {"texts": -1}}, "planted_bias.texts.*0 or more"),
        ({"device": "gpu"}, "gpu.*auto, cpu, npu"),
        ({"quick": {"workload": {"requests": 0}}}, "^quick: workload.requests"),
        ({"workload": {"requests": 10**12}}, "workload.requests.*1 to 1000000"),
        ({"workload": {"prompt_tokens": {"mean": 20, "sigma": 1e9}}}, "sigma.*0 to 3"),
        ({"workload": {"prompt_tokens": {"mean": 20, "sigma": math.nan}}}, "sigma.*0 to 3"),
        ({"workload": {"prompt_tokens": {"mean": 10**400}}}, "mean.*a number"),
        ({"samples": {"prompts": ["a", ""]}}, "samples.prompts"),
        ({"quick": {"typo": 0}}, "^quick: .*typo"),
        ({"quick": 3}, "quick"),
    ],
)
def test_mistakes_in_a_recipe_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(write_recipe(tmp_path / "recipe.yaml", **changes))


@pytest.mark.parametrize("content", ["- 1", "a: [", "", "\x00"])
def test_what_is_no_recipe_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match="recipe"):
        load_recipe(path)


def test_the_shipped_recipe_names_and_comments_every_key() -> None:
    path = REPOSITORY / "recipes" / "qwen_910b.yaml"
    lines = path.read_text().splitlines()
    keys = yaml.safe_load("\n".join(lines)).keys()
    assert keys == set(BenchRecipe.__dataclass_fields__) | {"quick"}
    for key in keys:
        number = next(i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
        assert lines[number - 1].startswith("#"), key
    full = load_recipe(path)
    assert (full.workload.requests, full.budget.sequences, full.max_model_len) == (64, 4, 1024)
    assert 200 <= full.workload.prompt_tokens.mean + full.workload.output_tokens.mean <= 400
    load_recipe(path, quick=True)


def test_recipe_of_the_tests_is_close_to_the_shipped_one() -> None:
    shipped = load_recipe(REPOSITORY / "recipes" / "qwen_910b.yaml")
    assert [(s.allocator, s.kv_cache_dtype, s.batch) for s in shipped.schemes] == [
        (s["allocator"], s["kv_cache_dtype"], s.get("batch", "planned")) for s in RECIPE["schemes"]
    ]


@pytest.mark.parametrize("place", ["recipe", "quick", "scheme"])
@pytest.mark.parametrize("name", ["compression", "untrained_compression"])
def test_compression_is_planned_by_nobody(name: str, place: str, tmp_path: Path) -> None:
    """A scheme would be planned as if every token were kept."""
    changes: dict[str, Any] = {name: {}}
    if place == "quick":
        changes = {"quick": changes}
    elif place == "scheme":
        changes = {"schemes": [RECIPE["schemes"][0] | changes]}
    expected = f"^(quick: )?{name}: got .* left out of a bench recipe"
    with pytest.raises(UsageError, match=expected) as caught:
        load_recipe(write_recipe(tmp_path / "recipe.yaml", **changes))
    assert "recipes/untrained_compression.yaml" in caught.value.hint
