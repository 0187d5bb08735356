"""The recipe of ``ascend-kv eval``: the shipped file is the built-in one; what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.policies import (
    DEFAULT_POLICIES,
    HuggingFaceCache,
    Policy,
    parse_policy,
    read_policy,
)
from ascend_kv.evaluate.quality.recipe import EvalRecipe, load_eval_recipe, with_flags

SHIPPED = Path(__file__).parents[1] / "recipes" / "eval.yaml"


@pytest.mark.parametrize("quick", [False, True])
def test_the_shipped_recipe_is_the_built_in_one(quick: bool) -> None:
    assert load_eval_recipe(SHIPPED, quick) == load_eval_recipe(None, quick)
    assert load_eval_recipe(None) == EvalRecipe() != load_eval_recipe(None, quick=True)


def test_every_key_of_the_shipped_recipe_is_commented() -> None:
    lines = SHIPPED.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"(  )?\w+:", line) and not lines[number - 1].startswith(("    ", "  -")):
            if line.startswith("  ") and "quick:" in lines[max(0, number - 8) : number]:
                continue  # explained above
            assert lines[number - 1].lstrip().startswith("#"), line


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_section_keeps_the_defaults_of_what_it_does_not_say(tmp_path: Path) -> None:
    recipe = load_eval_recipe(write(tmp_path / "r.yaml", perplexity={"windows": 3}))
    assert recipe.perplexity == replace(EvalRecipe().perplexity, windows=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tasks": ["needles"]}, "Did you mean needle?"),
        ({"tasks": []}, "tasks: got"),
        ({"tasks": ["lm_eval"]}, "lm_eval.tasks: got"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"seed": -1}, "seed: got -1"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"windows": 3}, "r.yaml: windows: got 3"),
        ({"perplexity": {"windows": 0}}, "perplexity.windows: got 0"),
        ({"perplexity": {"formats": ["int8"]}}, "perplexity.formats"),
        ({"needle": {"depths": [101]}}, "needle.depths: got 101"),
        ({"needle": {"lengths": []}}, "needle.lengths: got []"),
        ({"needle": {"lengths": [128, 128]}}, "needle.lengths: got [128, 128]"),
        ({"copy": {"lengths": [1]}}, "copy.lengths: got 1; legal: 2"),
        (
            {"recall": {"pairs": [4, 9], "questions": 5}},
            "recall.questions: got 5; legal: at most 4",
        ),
        ({"generation": {"max_tokens": 0}}, "generation.max_tokens: got 0"),
        ({"lm_eval": {"limit": 0}}, "lm_eval.limit: got 0"),
        ({"policies": []}, "policies: got []"),
        ({"policies": "int8"}, "policies: got 'int8'"),
        ({"policies": ["int8", "int8"]}, "policies: got 'int8'; legal: names that differ"),
        ({"policies": ["int9"]}, "policies[0]: got 'int9'"),
        ({"policies": [{"name": "unquantized"}]}, "always there"),
        ({"policies": [3]}, "policies[0]: got 3"),
        ({"policies": [{"name": " "}]}, "policies[0].name"),
        ({"policies": [{"kv_cache_config": {"kv_cache_dtyp": "int8"}}]}, "kv_cache_dtyp"),
        ({"policies": [{"kv_cache_config": {"kv_cache_dtype": "int9"}}]}, "kv_cache_dtype: got"),
        (
            {"policies": [{"kv_cache_config": {"kv_allocator": "paged"}}]},
            "policies[0].kv_allocator",
        ),
        ({"policies": [{"name": "a", "huggingface": {"backend": "x"}}]}, "huggingface.backend"),
        (
            {"policies": [{"name": "a", "huggingface": {"backend": "fp8", "nbits": 4}}]},
            "policies[0].huggingface.nbits: got 4; legal: none",
        ),
        (
            {"policies": [{"name": "a", "huggingface": {"backend": "quanto", "nbits": 8}}]},
            "huggingface.nbits: got 8; legal: 2, 4",
        ),
        (
            {"policies": [{"name": "a", "huggingface": {"backend": "hqq", "chunk_tokens": 0}}]},
            "huggingface.chunk_tokens: got 0",
        ),
        ({"quick": {"seed": -2}}, "seed: got -2"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_eval_recipe(write(tmp_path / "r.yaml", **content))
    assert message in str(caught.value)


def test_both_kinds_at_once_are_refused() -> None:
    both = {"kv_cache_config": {"kv_cache_dtype": "int8"}, "huggingface": {"backend": "fp8"}}
    with pytest.raises(UsageError, match="one of the two"):
        read_policy({"name": "a", **both}, "p")


def test_policies_as_people_write_them() -> None:
    assert parse_policy("int8") == Policy("int8", {"kv_cache_dtype": "int8"})
    assert parse_policy("float16") == Policy("float16", {"kv_cache_dtype": "float16"})
    assert parse_policy("HF hqq int4") in DEFAULT_POLICIES
    for name in ("int8/group32", "k:int8+v:int4", "fp8"):
        assert parse_policy(name) == Policy(name, {"kv_cache_dtype": name})
    bare = parse_policy("{kv_cache_dtype: int8, pair_scaling: false}")
    assert bare.name == "kv_cache_dtype=int8, pair_scaling=False"
    assert bare.kv_cache_config == {"kv_cache_dtype": "int8", "pair_scaling": False}
    assert parse_policy("{name: mine, kv_cache_dtype: int8}").name == "mine"
    other = parse_policy("{name: h, huggingface: {backend: hqq, nbits: 2}}")
    assert other.huggingface == HuggingFaceCache("hqq", 2)
    for wrong in ("{a: ", "", "int", "int8/grup32", "k:int9", "{kv_cache_dtype:int8}"):
        with pytest.raises(UsageError):
            parse_policy(wrong)


def test_sixteen_bits_are_the_models_own() -> None:
    policy = read_policy("16-bit", "p")
    assert policy.options("bfloat16") == {"kv_cache_dtype": "bfloat16"}
    assert policy.options("float32") == {"kv_cache_dtype": "float16"}
    assert policy.settings == {"kv_cache_config": {"kv_cache_dtype": "16-bit"}}


def test_what_transformers_is_given() -> None:
    assert HuggingFaceCache("fp8").options == {}
    given = HuggingFaceCache("hqq", nbits=8, axis_key=1).options
    assert given == {"nbits": 8, "axis_key": 1, "axis_value": 0, "q_group_size": 64}
    # Every default is part of the settings, so that a later default cannot be mistaken for it.
    settings = Policy("p", huggingface=HuggingFaceCache("quanto")).settings["huggingface"]
    assert settings["nbits"] == 4 and settings["chunk_tokens"] == 32


def test_flags_come_before_the_recipe() -> None:
    given = {"windows": 3, "window_tokens": 300, "policies": ["int8"], "tasks": ["copy"]}
    recipe = with_flags(EvalRecipe(), {**given, "model": "m", "limit": None})
    assert recipe.perplexity.windows == 3 and recipe.perplexity.chunk_tokens == 256
    assert [policy.name for policy in recipe.policies] == ["int8"]
    assert recipe.tasks == ("copy",) and recipe.model == "m"
    assert with_flags(EvalRecipe(), {}) == EvalRecipe()


def test_harness_tasks_run_alone_unless_others_are_named() -> None:
    recipe = with_flags(EvalRecipe(), {"lm_eval": ["arc_easy"], "limit": 7})
    assert recipe.ordered_tasks == ("lm_eval",)
    assert recipe.lm_eval.tasks == ("arc_easy",) and recipe.lm_eval.limit == 7
    both = with_flags(EvalRecipe(), {"lm_eval": ["arc_easy"], "tasks": ["needle"]})
    assert both.ordered_tasks == ("needle", "lm_eval")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"windows": 0}, "perplexity.windows"),
        ({"tasks": ["x"]}, "tasks"),
        ({"dtype": "x"}, "dtype"),
    ],
)
def test_wrong_flags_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_flags(EvalRecipe(), given)
    assert caught.value.field == field
