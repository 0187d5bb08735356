"""From cells to rows: means, paired intervals, shares. Nothing is computed that is not in a cell.

Every interval is of the difference from the unquantized cache on the very same tokens or
questions, so that what the text or the question itself contributes cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_kv.evaluate.perplexity import compare, perplexity
from ascend_kv.evaluate.quality.evaluation import QUESTION_TASKS, Evaluation
from ascend_kv.evaluate.quality.policies import UNQUANTIZED
from ascend_kv.evaluate.quality.questions import Answer, from_cell
from ascend_kv.evaluate.quality.results import (
    AnswerRow,
    Cost,
    EvalResult,
    GenerationRow,
    HarnessRow,
    Interval,
    NeedlePoint,
    PerplexityRow,
    PolicyRow,
)
from ascend_kv.evaluate.recipe import LEAST_CLUSTERS
from ascend_kv.evaluate.statistics import MeanInterval, clustered_mean, most_where_none

COST = ("about", "cost")
"""Task and item under which a policy's costs are kept."""

Cells = dict[int, dict[str, Any]]


def summarize(evaluation: Evaluation, result: EvalResult) -> None:
    """Fill in the rows of ``result``."""
    store, recipe = evaluation.store, evaluation.recipe

    def cells(task: str) -> dict[str, Cells]:
        found = {}
        for runner in evaluation.runners:
            name = runner.policy.name
            kept = {
                number: store.get(name, task, item)
                for number, item in enumerate(evaluation.items(task, runner))
            }
            found[name] = {number: cell for number, cell in kept.items() if cell is not None}
        return found

    for runner in evaluation.runners:
        cost = store.get(runner.policy.name, *COST)
        if cost is not None:
            row = PolicyRow(runner.policy.name, runner.policy.settings, Cost(**cost))
            result.policies.append(row)
    for task in recipe.ordered_tasks:
        found = cells(task)
        if task == "perplexity":
            result.perplexity = _perplexity_rows(found, recipe.perplexity.cluster_tokens)
        elif task == "generation":
            result.generation = generation_rows(found, recipe.generation.max_tokens)
        elif task in QUESTION_TASKS:
            result.answers += answer_rows(task, found)
            if task == "needle":
                result.needles = _needle_points(found)
        else:
            result.harness = _harness_rows(found)


def _perplexity_rows(found: Mapping[str, Cells], cluster_tokens: int) -> list[PerplexityRow]:
    rows = []
    for name, cells in found.items():
        both = sorted(cells.keys() & found[UNQUANTIZED].keys())
        if both:
            reference = [found[UNQUANTIZED][number] for number in both]
            rows.append(perplexity_row(name, [cells[n] for n in both], reference, cluster_tokens))
    return rows


def perplexity_row(
    name: str,
    cells: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    cluster_tokens: int,
) -> PerplexityRow:
    """One policy's row from the cells of the same windows, its own and the reference's."""
    losses = [cell["loss"] for cell in cells]
    divergences = [cell["divergence"] for cell in cells]
    tokens = sum(len(window) for window in losses)
    expected = [cell["loss"] for cell in reference]
    broken = sum(
        None in token
        for window in zip(losses, expected, divergences, strict=True)
        for token in zip(*window, strict=True)
    )
    own = name == UNQUANTIZED
    zeros = [[0.0] * len(window) for window in losses]

    def interval(
        values: Sequence[Sequence[float]],
        others: Sequence[Sequence[float]],
        shape: Callable[[float], float] = float,
    ) -> Interval | None:
        if broken or own or clusters < LEAST_CLUSTERS:
            return None
        return _interval(compare(values, others, cluster_tokens), shape)

    clusters = sum(-(-len(window) // cluster_tokens) for window in losses)
    return PerplexityRow(
        policy=name,
        windows=len(losses),
        tokens=tokens,
        clusters=clusters,
        not_finite=broken,
        perplexity=None if broken else perplexity(losses),
        change=interval(losses, expected, math.exp),
        divergence=_not_negative(interval(divergences, zeros)),
        agreement=None
        if broken or own
        else _share(
            [
                cell["agreement"][start : start + cluster_tokens]
                for cell in cells
                for start in range(0, len(cell["agreement"]), cluster_tokens)
            ]
        ),
        seconds=sum(cell["seconds"] for cell in cells),
    )


def generation_rows(found: Mapping[str, Cells], tokens: int) -> list[GenerationRow]:
    """Rows of all policies but the reference, from their continuations of ``tokens`` tokens."""
    rows = []
    for name, cells in found.items():
        if cells and name != UNQUANTIZED:
            agreed = [float(cell["agreed"]) for cell in cells.values()]
            rows.append(
                GenerationRow(
                    policy=name,
                    prompts=len(agreed),
                    tokens=tokens,
                    identical=sum(count == tokens for count in agreed) / len(agreed),
                    agreeing_tokens=math.fsum(agreed) / len(agreed),
                    interval=_share([[count / tokens] for count in agreed]),
                )
            )
    return rows


def answer_rows(task: str, found: Mapping[str, Cells]) -> list[AnswerRow]:
    """Rows of all policies from the cells of one task with answers, the reference's first."""
    rows = []
    expected = _answers(found[UNQUANTIZED])
    for name, cells in found.items():
        answers = _answers(cells)
        both = sorted(answers.keys() & expected.keys())
        if both:
            clusters: dict[object, list[int]] = {}
            for number in both:
                clusters.setdefault(_cluster(task, number, cells[number]), []).append(number)
            ours, theirs = (
                [
                    [answer for number in numbers for answer in side[number]]
                    for numbers in clusters.values()
                ]
                for side in (answers, expected)
            )
            rows.append(answer_row(name, task, ours, theirs))
    return rows


def _cluster(task: str, number: int, cell: dict[str, Any]) -> object:
    """What answers with errors in common share: all depths of a needle have one text and number."""
    labels, _ = from_cell(cell)
    return (labels["length"], labels["repeat"]) if task == "needle" else number


def answer_row(
    name: str, task: str, ours: Sequence[list[Answer]], theirs: Sequence[list[Answer]]
) -> AnswerRow:
    """One policy's row from its answers and the reference's, cluster by cluster."""
    answers = [answer for question in ours for answer in question]
    expected = [answer for question in theirs for answer in question]
    tokens = sum(answer.tokens for answer in answers)
    total = math.fsum(answer.log_probability for answer in answers)
    finite = math.isfinite(total) and all(
        math.isfinite(answer.log_probability) for answer in expected
    )
    own = name == UNQUANTIZED

    def differences(value: Callable[[Answer], float]) -> list[list[float]]:
        return [
            [value(a) - value(b) for a, b in zip(mine, other, strict=True)]
            for mine, other in zip(ours, theirs, strict=True)
        ]

    return AnswerRow(
        policy=name,
        task=task,
        questions=len(answers),
        clusters=len(ours),
        exact=sum(answer.exact for answer in answers) / len(answers),
        token_accuracy=sum(answer.right for answer in answers) / tokens,
        log_probability=total / tokens if math.isfinite(total) else None,
        differing=sum(a.exact != b.exact for a, b in zip(answers, expected, strict=True)),
        exact_change=None
        if own
        else _share(differences(lambda answer: float(answer.exact)), least=-1.0),
        log_probability_change=_mean(
            differences(lambda answer: answer.log_probability / answer.tokens)
        )
        if finite and not own
        else None,
    )


def _needle_points(found: Mapping[str, Cells]) -> list[NeedlePoint]:
    points = []
    for name, cells in found.items():
        places: dict[tuple[int, float], list[Answer]] = {}
        for cell in cells.values():
            labels, answers = from_cell(cell)
            places.setdefault((int(labels["length"]), labels["depth"]), []).extend(answers)
        for (length, depth), answers in sorted(places.items()):
            tokens = sum(answer.tokens for answer in answers)
            total = math.fsum(answer.log_probability for answer in answers)
            exact = sum(answer.exact for answer in answers) / len(answers)
            mean = total / tokens if math.isfinite(total) else None
            points.append(NeedlePoint(name, length, depth, exact, mean))
    return points


def _harness_rows(found: Mapping[str, Cells]) -> list[HarnessRow]:
    return [
        HarnessRow(name, cut=cell["cut"], **figure)
        for name, cells in found.items()
        for cell in cells.values()
        for figure in cell["figures"]
        if figure["value"] is not None
    ]


def _answers(cells: Cells) -> dict[int, list[Answer]]:
    return {number: from_cell(cell)[1] for number, cell in cells.items()}


def _mean(clusters: Sequence[Sequence[float]]) -> Interval | None:
    """The mean with its interval; None where there are too few clusters for one."""
    if len(clusters) < LEAST_CLUSTERS:
        return None
    return _interval(clustered_mean(clusters))


def _share(clusters: Sequence[Sequence[float]], least: float = 0.0) -> Interval | None:
    """As ``_mean``, of values from ``least`` to 1.

    Clusters that are all alike have no spread and would give an interval without width. What can
    be said then is how many others there may be without one of them having been seen.
    """
    found = _mean(clusters)
    if found is None:
        return None
    value, low, high = found.value, found.low, found.high
    if len({math.fsum(cluster) / len(cluster) for cluster in clusters}) == 1:
        unseen = most_where_none(len(clusters))
        low, high = value - unseen * (value - least), value + unseen * (1.0 - value)
    return Interval(value, max(least, low), min(1.0, high))


def _not_negative(found: Interval | None) -> Interval | None:
    return None if found is None else replace(found, low=max(0.0, found.low))


def _interval(found: MeanInterval, shape: Callable[[float], float] = float) -> Interval:
    return Interval(shape(found.mean), shape(found.low), shape(found.high))
