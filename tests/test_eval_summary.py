"""From cells to rows: known numbers, pairing, and what is not a number."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ascend_kv.evaluate.quality.plots import pareto_front
from ascend_kv.evaluate.quality.policies import UNQUANTIZED
from ascend_kv.evaluate.quality.questions import Answer, Question, as_cell
from ascend_kv.evaluate.quality.recipe import EvalRecipe
from ascend_kv.evaluate.quality.summary import (
    answer_row,
    answer_rows,
    generation_rows,
    perplexity_row,
)
from ascend_kv.evaluate.recipe import LEAST_CLUSTERS
from ascend_kv.evaluate.statistics import clustered_mean, most_where_none

BASE = [[2.0 + math.sin(9 * i + w) for i in range(20)] for w in range(4)]


def cells(added: float, divergence: float = 0.25) -> list[dict[str, Any]]:
    return [
        {
            "loss": [loss + added for loss in window],
            "divergence": [divergence] * len(window),
            "agreement": [i % 4 != 0 for i in range(len(window))],
            "seconds": 1.5,
        }
        for window in BASE
    ]


def test_perplexity_is_paired() -> None:
    """The text's own spread is large, the difference the same everywhere: no uncertainty."""
    row = perplexity_row("p", cells(0.01), cells(0.0), 5)
    assert row.change is not None and row.divergence is not None and row.agreement is not None
    assert row.change.value == pytest.approx(math.exp(0.01))
    assert row.change.high - row.change.low < 1e-9
    assert row.perplexity == pytest.approx(math.exp(math.fsum(map(math.fsum, BASE)) / 80 + 0.01))
    assert (row.windows, row.tokens, row.clusters, row.not_finite) == (4, 80, 16, 0)
    assert row.divergence.value == pytest.approx(0.25) and row.seconds == 6.0
    assert row.agreement.value == pytest.approx(0.75)


def test_intervals_are_those_of_the_clusters() -> None:
    ours = cells(0.0)
    for number, cell in enumerate(ours):
        cell["loss"] = [loss + 0.1 * (number + i % 3) for i, loss in enumerate(cell["loss"])]
    row = perplexity_row("p", ours, cells(0.0), 10)
    differences = [[0.1 * (w + i % 3) for i in range(20)] for w in range(4)]
    expected = clustered_mean([part for d in differences for part in (d[:10], d[10:])])
    assert row.change is not None
    assert math.log(row.change.low) == pytest.approx(expected.low)
    assert math.log(row.change.high) == pytest.approx(expected.high)


def test_an_interval_stays_where_the_quantity_can_be() -> None:
    ours = cells(0.0)
    for cell in ours:
        cell["agreement"] = [1] * 20
        cell["divergence"] = [0.0] * 20
    ours[0]["agreement"] = [0] + [1] * 19
    ours[0]["divergence"] = [9.0] + [0.0] * 19
    row = perplexity_row("p", ours, cells(0.0), 5)
    assert row.agreement is not None and row.divergence is not None
    assert row.agreement.high == 1.0 and row.divergence.low == 0.0
    assert row.agreement.low < 79 / 80 < row.agreement.high


def test_too_few_clusters_give_no_interval() -> None:
    assert perplexity_row("p", cells(0.1), cells(0.0), 10).change is not None  # 8 of them
    few = perplexity_row("p", cells(0.1), cells(0.0), 20)
    assert few.clusters == 4 and few.change is None and few.perplexity is not None


def test_the_reference_has_no_change() -> None:
    row = perplexity_row(UNQUANTIZED, cells(0.0, 0.0), cells(0.0, 0.0), 5)
    assert row.change is None and row.divergence is None and row.perplexity is not None


@pytest.mark.parametrize("where", ["ours", "theirs", "divergence"])
def test_what_is_not_a_number_is_counted_and_gives_no_figure(where: str) -> None:
    ours, theirs = cells(0.1), cells(0.0)
    if where == "divergence":
        ours[1]["divergence"][3] = None
    else:
        (ours if where == "ours" else theirs)[1]["loss"][3] = None
    row = perplexity_row("p", ours, theirs, 5)
    assert row.not_finite == 1
    assert row.change is None and row.divergence is None and row.agreement is None
    assert row.perplexity is None


@pytest.mark.parametrize("agreement", [0, 1])
def test_choices_that_are_all_alike_still_leave_something_open(agreement: int) -> None:
    """No spread is not no uncertainty: 16 clusters cannot show what happens in one of a hundred."""
    ours = cells(0.0)
    for cell in ours:
        cell["agreement"] = [agreement] * 20
    row = perplexity_row("p", ours, cells(0.0), 5)
    unseen = most_where_none(16)
    ends = (1 - unseen, 1.0) if agreement else (0.0, unseen)
    assert row.agreement is not None and row.agreement.value == agreement
    assert (row.agreement.low, row.agreement.high) == pytest.approx(ends)


@pytest.mark.parametrize(("agreed", "ends"), [(6, (0.6877, 1.0)), (0, (0.0, 0.3123))])
def test_continuations_that_are_all_alike_leave_it_open_too(
    agreed: int, ends: tuple[float, float]
) -> None:
    found = {"p": {number: {"agreed": agreed} for number in range(8)}}
    (row,) = generation_rows(found, 6)
    assert row.interval is not None and row.interval.value == agreed / 6
    assert (row.interval.low, row.interval.high) == pytest.approx(ends, abs=1e-4)


def needle_cells(repeats: int, log: float = -3.0) -> dict[int, dict[str, Any]]:
    """All depths of a repeat answer alike, as they do where text and number decide."""
    found = {}
    for repeat in range(repeats):
        for depth in (0.0, 50.0, 100.0):
            labels = {"length": 512.0, "repeat": float(repeat), "depth": depth}
            asked = Question(labels, [1, 2, 3], [(1, 3)])
            found[len(found)] = as_cell(asked, [Answer(2, 1 + repeat % 2, log * (1 + repeat))])
    return found


def test_the_depths_of_one_needle_are_one_cluster() -> None:
    found = {UNQUANTIZED: needle_cells(8), "p": needle_cells(8, -4.0)}
    _, row = answer_rows("needle", found)
    assert (row.questions, row.clusters) == (24, 8) and row.log_probability_change is not None
    expected = clustered_mean([[-(1 + repeat) / 2] * 3 for repeat in range(8)])
    assert row.log_probability_change.low == pytest.approx(expected.low)
    assert row.exact_change is not None and row.exact_change.high == pytest.approx(
        most_where_none(8)
    )
    _, few = answer_rows("needle", {UNQUANTIZED: needle_cells(7), "p": needle_cells(7)})
    assert few.questions == 21 and few.exact_change is few.log_probability_change is None
    _, copies = answer_rows("copy", found)  # each a text of its own
    assert copies.clusters == 24


def test_the_default_tasks_have_clusters_enough_for_intervals() -> None:
    recipe = EvalRecipe()
    assert len(recipe.needle.lengths) * recipe.needle.repeats >= LEAST_CLUSTERS
    assert len(recipe.copy.lengths) * recipe.copy.passages >= LEAST_CLUSTERS
    assert len(recipe.recall.pairs) * recipe.recall.lists >= LEAST_CLUSTERS
    assert recipe.generation.prompts >= LEAST_CLUSTERS


def question(*right: int, log: float = -3.0) -> list[Answer]:
    return [Answer(3, count, log) for count in right]


def test_answers_are_compared_one_by_one() -> None:
    theirs = [question(3, 3)] * 8
    ours = [question(3, 2, log=-6.0)] * 4 + [question(3, 3)] * 4
    row = answer_row("p", "recall", ours, theirs)
    assert (row.questions, row.exact, row.differing) == (16, 0.75, 4)
    assert row.token_accuracy == pytest.approx(44 / 48)
    assert row.log_probability == pytest.approx(-1.5)
    assert row.exact_change is not None and row.log_probability_change is not None
    expected = clustered_mean([[0.0, -1.0]] * 4 + [[0.0, 0.0]] * 4)
    assert row.exact_change.value == pytest.approx(-0.25)
    assert row.exact_change.low == pytest.approx(expected.low)
    assert row.log_probability_change.value == pytest.approx(-0.5)


def test_answers_that_swap_are_seen_though_the_mean_is_the_same() -> None:
    row = answer_row("p", "copy", [question(3), question(0)] * 4, [question(0), question(3)] * 4)
    assert row.exact == 0.5 and row.differing == 8 and row.exact_change is not None
    assert row.exact_change.value == 0 and row.exact_change.high > 0.3


def test_answers_without_a_difference_bound_it() -> None:
    row = answer_row("p", "copy", [question(3, 0)] * 9, [question(3, 0)] * 9)
    assert row.exact_change is not None and row.exact_change.value == 0 and row.clusters == 9
    assert row.exact_change.high == pytest.approx(most_where_none(9)) == -row.exact_change.low


def test_few_or_broken_answers_give_no_interval() -> None:
    assert answer_row("p", "copy", [question(3)] * 7, [question(3)] * 7).exact_change is None
    broken = [question(0, log=math.nan)] + [question(3)] * 7
    row = answer_row("p", "copy", broken, [question(3)] * 8)
    assert row.log_probability is None and row.log_probability_change is None
    assert row.exact_change is not None and row.exact == 7 / 8
    row = answer_row("p", "copy", [question(3)] * 8, broken)
    assert row.log_probability == -1.0 and row.log_probability_change is None


def test_the_share_that_no_hit_leaves_open() -> None:
    assert most_where_none(1) == pytest.approx(0.95)
    assert most_where_none(30) == pytest.approx(0.0950, abs=1e-4)
    assert (1 - most_where_none(59)) ** 59 == pytest.approx(0.05)


def test_the_front_is_what_nothing_beats() -> None:
    points = [(5.0, 1.0), (3.0, 4.0), (4.0, 4.0), (3.0, 5.0), (8.0, 1.0), (9.0, -0.5), (2.0, 90.0)]
    assert pareto_front(points) == [(2.0, 90.0), (3.0, 4.0), (5.0, 1.0), (9.0, -0.5)]
