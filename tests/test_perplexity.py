"""Perplexity: windows, losses against a plain forward, and the confidence interval."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import make_model

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.perplexity import compare, cut_windows, perplexity, window_losses
from ascend_kv.evaluate.recipe import PerplexityRecipe
from ascend_kv.evaluate.statistics import clustered_mean, student_quantile
from ascend_kv.llm import LLM

WINDOWS = [[(7 * i * i + 3 * i + w) % 97 for i in range(45)] for w in range(2)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_llm(path: Path, kv_cache_dtype: str) -> LLM:
    return LLM(
        str(path),
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=48,
        kv_cache_memory_bytes=1 << 20,
        block_size=8,
        skip_tokenizer_init=True,
        device="cpu",
    )


def losses_of(path: Path, kv_cache_dtype: str, chunk_tokens: int) -> list[list[float]]:
    return window_losses(make_llm(path, kv_cache_dtype).model, WINDOWS, 8, chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [1, 16, 44, 45, 64])
def test_unquantized_losses_equal_a_plain_forward(model_path: Path, chunk_tokens: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    for window, losses in zip(WINDOWS, losses_of(model_path, "float32", chunk_tokens)):
        with torch.inference_mode():
            expected = reference(torch.tensor([window])).logits[0].double().log_softmax(-1)
        picked = [-float(expected[i, token]) for i, token in enumerate(window[1:])]
        assert losses == pytest.approx(picked, abs=1e-4)


def test_quantized_keys_are_read_back(model_path: Path) -> None:
    """Chunks of any size give the same losses, and they differ from unquantized ones."""
    whole, pieces = (losses_of(model_path, "int8", chunk) for chunk in (64, 7))
    plain = losses_of(model_path, "float32", 64)
    for a, b, c in zip(whole, pieces, plain):
        assert a == pytest.approx(b, abs=2e-4)
        assert 1e-4 < max(abs(x - y) for x, y in zip(a, c)) < 0.5


def test_progress_counts_every_token(model_path: Path) -> None:
    seen: list[int] = []
    window_losses(make_llm(model_path, "float32").model, WINDOWS, 8, 20, seen.append)
    assert seen == [20, 20, 5, 20, 20, 5]


def test_perplexity_weighs_tokens_not_windows() -> None:
    assert perplexity([[1.0, 1.0, 1.0], [5.0]]) == pytest.approx(math.exp(2.0))


def test_windows_are_spread_over_the_text() -> None:
    recipe = PerplexityRecipe(windows=3, window_tokens=10)
    assert [window[0] for window in cut_windows(recipe, range(100))] == [0, 33, 66]
    assert [window[0] for window in cut_windows(recipe, range(30))] == [0, 10, 20]
    assert all(len(window) == 10 for window in cut_windows(recipe, range(100)))


@pytest.mark.parametrize("tokens", [0, 9, 29])
def test_a_text_too_short_for_its_windows_is_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match=f"text: got '{tokens} tokens'; legal: at least 30"):
        cut_windows(PerplexityRecipe(windows=3, window_tokens=10), range(tokens))


def test_interval_of_known_numbers() -> None:
    """Clusters of one value each: the textbook interval of a mean."""
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    found = clustered_mean([[value] for value in values])
    # mean 4, sample standard deviation 3.5355, t(4, 97.5 %) = 2.7764
    assert found.mean == pytest.approx(4.0)
    assert found.high - 4.0 == pytest.approx(2.7764 * 3.53553 / math.sqrt(5), rel=0.005)
    assert found.low + found.high == pytest.approx(8.0)
    assert found.clusters == 5


def test_repeating_values_within_clusters_does_not_narrow_the_interval() -> None:
    once = clustered_mean([[1.0], [2.0], [3.0], [7.0]])
    ten_times = clustered_mean([[value] * 10 for value in (1.0, 2.0, 3.0, 7.0)])
    assert ten_times == pytest.approx(once)


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(5)
    hits = 0
    for _ in range(1000):
        clusters = []
        for size in (5, 6, 7) * 5:  # correlated inside: half of the deviation is shared
            shared = generator.gauss(0, 1)
            clusters.append([0.3 + shared + generator.gauss(0, 1) for _ in range(size)])
        interval = clustered_mean(clusters)
        hits += interval.low <= 0.3 <= interval.high
    assert 920 <= hits <= 975  # 950 expected, standard deviation 7


@pytest.mark.parametrize(
    ("degrees", "expected"), [(4, 2.7764), (7, 2.3646), (15, 2.1314), (63, 1.9983), (10**6, 1.96)]
)
def test_student_quantile(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=0.005)


def test_comparison_is_paired() -> None:
    """A text whose tokens vary wildly, a format that adds the same to each: no uncertainty."""
    reference = [[float(i % 17) for i in range(40)] for _ in range(2)]
    ours = [[loss + 0.01 for loss in window] for window in reference]
    found = compare(ours, reference, cluster_tokens=16)
    assert found.mean == pytest.approx(0.01)
    assert found.high - found.low < 1e-9
    assert found.clusters == 6  # 16 + 16 + 8 tokens in each window


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"windows": 0}, "perplexity.windows"),
        ({"window_tokens": 1}, "perplexity.window_tokens"),
        ({"cluster_tokens": 0}, "perplexity.cluster_tokens"),
        ({"chunk_tokens": 0}, "perplexity.chunk_tokens"),
        ({"windows": 1, "cluster_tokens": 147}, "perplexity"),
    ],
)
def test_settings_that_give_no_interval_are_refused(changes: dict[str, int], field: str) -> None:
    PerplexityRecipe(windows=1, cluster_tokens=146).check()
    with pytest.raises(UsageError) as caught:
        replace(PerplexityRecipe(), **changes).check()
    assert caught.value.field == field
