"""Policies of an evaluation that learn from a text beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fixture import make_model_with_tokenizer
from eval_fixture import make_evaluation, make_recipe

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.job import run_eval
from ascend_kv.evaluate.quality.policies import parse_policy
from ascend_kv.evaluate.quality.recipe import CalibrationRecipe

KEYS = "{name: keys, kv_cache_dtype: int8, key_offset_layers: all, calibrate: [keys]}"
SCALES = "{name: scales, kv_cache_dtype: int8/channel/static, calibrate: [scales]}"
PLAIN = "{name: plain, kv_cache_dtype: int8}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


def recipe_of(model: Path, *policies: str, **calibration: Any) -> Any:
    recipe = make_recipe(
        model,
        tasks=("perplexity",),
        policies=tuple(parse_policy(policy) for policy in policies),
    )
    return replace(recipe, calibration=CalibrationRecipe(**{"tokens": 64} | calibration))


def test_what_was_learned_decides_what_is_stored(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, KEYS, SCALES, PLAIN)
    result = run_eval(make_evaluation(recipe, tmp_path), lambda result: None)
    assert result.complete
    costs = {row.name: row.cost for row in result.policies}
    assert "key offset (mean key of a text) in layers [0, 1, 2]" in costs["keys"].key_conditioning
    assert costs["scales"].bits_per_value == 8 and costs["scales"].static_bytes > 0
    assert costs["plain"].bits_per_value > 8 and costs["plain"].static_bytes == 0
    rows = {row.policy: row for row in result.perplexity}
    changes = {name: rows[name].perplexity for name in ("keys", "scales", "plain")}
    assert len(set(changes.values())) == 3 and None not in changes.values()


def test_cells_of_another_calibration_are_not_taken_up(model: Path, tmp_path: Path) -> None:
    first = recipe_of(model, KEYS)
    run_eval(make_evaluation(first, tmp_path), lambda result: None)
    with pytest.raises(UsageError) as caught:
        make_evaluation(recipe_of(model, KEYS, tokens=80), tmp_path)
    assert "calibration" in str(caught.value) or "keys" in str(caught.value)


def test_a_text_that_is_scored_or_too_short_is_refused(model: Path, tmp_path: Path) -> None:
    text = Path(str(make_recipe(model).text))
    with pytest.raises(UsageError, match="another text than text"):
        make_evaluation(recipe_of(model, KEYS, text=str(text)), tmp_path / "same")
    short = tmp_path / "short.txt"
    short.write_text("few words", encoding="utf-8")
    with pytest.raises(UsageError, match=r"calibration\.text"):
        make_evaluation(recipe_of(model, KEYS, text=str(short)), tmp_path / "short")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{kv_cache_dtype: int8, key_calibration: keys.safetensors, calibrate: [keys]}", "makes"),
        ("{huggingface: {backend: fp8}, calibrate: [keys]}", "none with huggingface"),
        ("{kv_cache_dtype: int8, calibrate: [weights]}", "keys"),
    ],
    ids=["twice", "huggingface", "unknown"],
)
def test_what_cannot_be_learned_is_refused_at_once(policy: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_policy(policy)


def test_scales_of_a_dynamic_format_name_the_policy(model: Path, tmp_path: Path) -> None:
    policy = "{name: dynamic, kv_cache_dtype: int8, calibrate: [scales]}"
    with pytest.raises(UsageError, match="policy 'dynamic': scale_type"):
        make_evaluation(recipe_of(model, policy), tmp_path)
