"""The requests of the main job: lengths, places, repeatability, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.workload import (
    LengthRecipe,
    Request,
    WorkloadRecipe,
    draw_requests,
    summarize,
)

TEXT = list(range(5000))
RECIPE = WorkloadRecipe(requests=40, seed=3)


def test_lengths_have_the_stated_mean_and_spread() -> None:
    lengths = LengthRecipe(mean=100, sigma=0.4, min=1, max=10_000)
    generator = random.Random(0)
    drawn = sorted(lengths.draw(generator) for _ in range(20_000))
    assert sum(drawn) / len(drawn) == pytest.approx(100, rel=0.02)
    # A log-normal's median is mean / exp(sigma**2 / 2), its 84 % quantile exp(sigma) above it.
    assert drawn[10_000] == pytest.approx(92.3, rel=0.02)
    assert drawn[int(0.8413 * 20_000)] == pytest.approx(92.3 * 1.4918, rel=0.03)


def test_lengths_are_clipped() -> None:
    lengths = LengthRecipe(mean=100, sigma=1.5, min=60, max=130)
    generator = random.Random(0)
    drawn = [lengths.draw(generator) for _ in range(500)]
    assert (min(drawn), max(drawn)) == (60, 130)


def test_prompts_are_slices_of_the_text_of_the_drawn_length() -> None:
    requests = draw_requests(RECIPE, TEXT)
    assert len(requests) == 40
    for request in requests:
        first = request.prompt_token_ids[0]
        assert request.prompt_token_ids == TEXT[first : first + len(request.prompt_token_ids)]
        assert RECIPE.prompt_tokens.min <= len(request.prompt_token_ids) <= 512
    assert len({request.prompt_token_ids[0] for request in requests}) > 30


def test_same_seed_same_requests_other_seed_others() -> None:
    assert draw_requests(RECIPE, TEXT) == draw_requests(RECIPE, TEXT)
    assert draw_requests(RECIPE, TEXT) != draw_requests(replace(RECIPE, seed=4), TEXT)


def test_a_prompt_as_long_as_the_text_is_the_text() -> None:
    exact = LengthRecipe(mean=50, sigma=0, min=50, max=50)
    recipe = WorkloadRecipe(requests=1, prompt_tokens=exact, output_tokens=exact)
    assert draw_requests(recipe, TEXT[:50])[0].prompt_token_ids == TEXT[:50]
    with pytest.raises(UsageError, match="text: got '49 tokens'"):
        draw_requests(recipe, TEXT[:49])


def test_summary_counts_what_was_drawn() -> None:
    requests = [Request([1] * 10, 5), Request([1] * 30, 15)]
    assert summarize(requests) == (2, 20.0, 10, 30, 10.0, 5, 15, 30.0, 20)


def test_the_default_workload_has_the_promised_mean_length() -> None:
    summary = summarize(draw_requests(WorkloadRecipe(), TEXT))
    assert summary.requests == 64
    assert 200 <= summary.total_mean <= 400


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"requests": 0}, "workload.requests"),
        ({"prompt_tokens": LengthRecipe(mean=10, min=0, max=20)}, "workload.prompt_tokens"),
        ({"output_tokens": LengthRecipe(mean=10, min=12, max=20)}, "workload.output_tokens"),
        ({"output_tokens": LengthRecipe(mean=30, min=1, max=20)}, "workload.output_tokens"),
        ({"prompt_tokens": LengthRecipe(mean=20, sigma=-1)}, "workload.prompt_tokens.sigma"),
        ({"prompt_tokens": LengthRecipe(mean=20, max=513)}, "workload"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(WorkloadRecipe(), **changes).check(max_model_len=1024)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_longest_request_may_just_fit() -> None:
    WorkloadRecipe().check(max_model_len=1024)
