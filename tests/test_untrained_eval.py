"""Compression of dense models as a policy of ``ascend-kv eval``: scored, costed, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from untrained_runs import POLICY, Runner

from ascend_kv import UsageError
from ascend_kv.cache.untrained import sequence_bytes
from ascend_kv.evaluate.quality.policies import parse_policy
from ascend_kv.evaluate.quality.recipe import load_eval_recipe
from ascend_kv.evaluate.quality.scorers import PagedScorer, PolicyRunner, make_runner, paged_cost
from ascend_kv.geometry import FORMATS
from ascend_kv.integrations.loading import LoadedModel, load_model

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "untrained_compression.yaml"
TEXT = (
    "{name: mine, untrained_compression: true, compression: {window: 9, sinks: 3, "
    "window_layers: 1, csa_from: 41, hca_from: 190, top_k: 6}}"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_model(tmp_path_factory.mktemp("m"), max_position_embeddings=700))


def open_runner(loaded: LoadedModel) -> PolicyRunner:
    runner = make_runner(parse_policy(TEXT), loaded, "cpu", 5)
    assert isinstance(runner, PolicyRunner) and runner.compression == POLICY
    return runner


def test_texts_one_after_another_score_as_in_the_engine(loaded: LoadedModel) -> None:
    scorer = open_runner(loaded).open(260)
    assert isinstance(scorer, PagedScorer)
    for seed in (1, 2):
        tokens = [(seed * 31 + 17 * place) % 90 + 3 for place in range(260)]
        parts = [
            scorer.forward(tokens[low : low + 100], low, range(len(tokens[low : low + 100])))
            for low in range(0, 260, 100)
        ]
        ours = Runner(loaded).in_chunks(tokens, [260])
        torch.testing.assert_close(torch.cat(parts), ours, rtol=0, atol=2e-4)


def test_costs_are_those_of_the_longest_sequence(loaded: LoadedModel) -> None:
    runner = open_runner(loaded)
    cost = paged_cost(runner, runner.open_llm(260))
    held = sequence_bytes(loaded.geometry, POLICY, FORMATS["float32"], 700)
    assert cost.bytes_per_token == sum(held.values()) / 700 < 0.2 * 3 * 2 * 2 * 8 * 4
    assert "compressed from 41 tokens" in cost.formats and "9 latest" in cost.residual
    llm = runner.open_llm(260, sequences=2)
    assert llm.cache.allocated_bytes <= 2 * runner.cache_bytes(260)


def test_a_policy_that_cannot_be_is_named(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="untrained_compression"):
        parse_policy("{name: x, compression: {}}")
    with_windows = load_model(make_model(tmp_path, "mistral", sliding_window=32))
    with pytest.raises(UsageError, match="policy 'mine': compression"):
        make_runner(parse_policy(TEXT), with_windows, "cpu", 5)
    quantized = parse_policy(TEXT.replace("{name", "{kv_cache_dtype: int8, name"))
    with pytest.raises(UsageError, match="policy 'mine': kv_cache_dtype"):
        make_runner(quantized, loaded, "cpu", 5)


def test_the_recipe_is_legal() -> None:
    recipe, quick = load_eval_recipe(RECIPE), load_eval_recipe(RECIPE, quick=True)
    assert len(recipe.policies) == len(quick.policies) == 6
