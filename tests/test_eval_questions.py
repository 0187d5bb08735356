"""Needle, copy and recall: what they ask, that it can be asked again, and how answers count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.generation import (
    agreeing_tokens,
    continue_greedily,
    cut_prompts,
)
from ascend_kv.evaluate.quality.questions import (
    Answer,
    Question,
    Source,
    as_cell,
    from_cell,
    make_copies,
    make_needles,
    make_recall,
    score_question,
)
from ascend_kv.evaluate.quality.recipe import (
    CopyRecipe,
    GenerationRecipe,
    NeedleRecipe,
    RecallRecipe,
)

BEGIN = 1
TEXT = [300 + i % 50 for i in range(2000)]


class Characters:
    """A tokenizer of one token a character, with a beginning-of-sequence token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [BEGIN] * add_special_tokens + [ord(letter) for letter in text]}


def source(seed: int = 0, text: Sequence[int] = TEXT) -> Source:
    return Source(Characters(), text, seed)


def read(tokens: Sequence[int]) -> str:
    return "".join(chr(token) if token < 256 else "." for token in tokens)


def test_needles_have_their_length_and_their_depth() -> None:
    recipe = NeedleRecipe(lengths=(200, 333), depths=(0.0, 50.0, 100.0), repeats=2)
    questions = make_needles(recipe, source())
    assert len(questions) == 12
    for question in questions:
        tokens = question.token_ids
        assert len(tokens) == question.labels["length"] and tokens[0] == BEGIN
        ((first, stop),) = question.answers
        answer, asked = read(tokens[first:stop]), read(tokens[:first])
        assert stop == len(tokens) and answer[0] == " " and len(answer) == 6
        sentence = asked[asked.rindex("\n\nThe secret number") :] + answer
        place = asked.index(sentence)  # the needle says what is asked for, word by word
        around = len(sentence) + len(".\n\n") + len(sentence)
        hay = len(tokens) - around - 1
        assert place - 1 == round(hay * question.labels["depth"] / 100)


def test_depths_of_one_needle_differ_in_its_place_alone() -> None:
    recipe = NeedleRecipe(lengths=(250,), depths=(10.0, 90.0), repeats=1)
    first, second = make_needles(recipe, source())
    assert first.token_ids != second.token_ids
    assert Counter(first.token_ids) == Counter(second.token_ids)
    assert first.answers == second.answers


def test_the_same_seed_asks_the_same() -> None:
    recipe = NeedleRecipe(lengths=(200,), repeats=3)
    assert make_needles(recipe, source(4)) == make_needles(recipe, source(4))
    assert make_needles(recipe, source(4)) != make_needles(recipe, source(5))
    longer = NeedleRecipe(lengths=(300, 200), repeats=3)  # others beside it change nothing
    assert make_needles(recipe, source())[0] in make_needles(longer, source())


@pytest.mark.parametrize(
    ("length", "text", "field"), [(70, TEXT, "needle.lengths"), (400, TEXT[:290], "text")]
)
def test_needles_that_do_not_fit(length: int, text: list[int], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_needles(NeedleRecipe(lengths=(length,)), source(text=text))
    assert caught.value.field == field


def test_copies_come_twice() -> None:
    for question in make_copies(CopyRecipe(lengths=(2, 17), passages=2), source()):
        length, tokens = int(question.labels["length"]), question.token_ids
        assert tokens[1 : 1 + length] == tokens[1 + length :]
        assert question.answers == [(2 + length, 1 + 2 * length)]  # the first token is given


@pytest.mark.parametrize(("pairs", "questions"), [(5, 5), (40, 7), (1000, 3)])
def test_recall_asks_for_what_was_listed(pairs: int, questions: int) -> None:
    recipe = RecallRecipe(pairs=(pairs,), lists=2, questions=questions)
    asked_first = []
    for question in make_recall(recipe, source()):
        lines = read(question.token_ids[1:]).splitlines()
        listed = dict(line.split(": ") for line in lines[:pairs])
        assert len(listed) == pairs
        assert len(lines) == pairs + questions == pairs + len(set(lines[pairs:]))
        for line, (first, stop) in zip(lines[pairs:], question.answers):
            word, number = line.split(": ")
            assert listed[word] == number
            assert read(question.token_ids[first:stop]) == f" {number}"
        asked_first.append(list(listed).index(lines[pairs].split(": ")[0]))
    if questions > 4:  # not in the list's order, nor in the same in every list
        assert len(set(asked_first)) > 1 or asked_first[0] > 0


class Oracle:
    """A model that knows the sequence but for some places, where it is wrong or says NaN."""

    def __init__(self, tokens: Sequence[int], wrong: Sequence[int] = (), nan: int = -1) -> None:
        self.tokens, self.wrong, self.nan = tokens, wrong, nan
        self.stored = 0

    def forward(self, token_ids: Sequence[int], start: int, rows: Sequence[int]) -> torch.Tensor:
        assert start in (0, self.stored) and list(token_ids) == list(
            self.tokens[start : start + len(token_ids)]
        )
        self.stored = start + len(token_ids)
        logits = torch.zeros(len(rows), 400)
        for row, place in enumerate(rows):
            following = start + place + 1
            token = self.tokens[following] if following < len(self.tokens) else 0
            logits[row, token + (following in self.wrong)] = 9.0
            if following == self.nan:
                logits[row] = math.nan
        return logits


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 30])
def test_answers_are_scored_token_by_token(chunk_tokens: int) -> None:
    question = Question({"pairs": 4.0}, list(range(10, 30)), [(5, 8), (19, 20), (12, 13)])
    found = score_question(Oracle(question.token_ids, wrong=[6, 13]), question, chunk_tokens)
    sure = -math.log1p(399 * math.exp(-9))
    assert [(answer.right, answer.tokens, answer.exact) for answer in found] == [
        (2, 3, False),
        (1, 1, True),
        (1, 1, True),
    ]
    assert found[0].log_probability == pytest.approx(3 * sure - 9, abs=1e-5)
    assert found[1].log_probability == pytest.approx(sure, abs=1e-5)


def test_an_answer_that_is_not_a_number_is_not_exact() -> None:
    question = Question({}, list(range(10, 20)), [(5, 7)])
    (answer,) = score_question(Oracle(question.token_ids, nan=6), question, 4)
    assert not answer.exact and math.isnan(answer.log_probability)


def test_cells_come_back() -> None:
    question = Question({"length": 9.0, "depth": 50.0}, [1, 2, 3], [(1, 3)])
    cell: dict[str, Any] = as_cell(question, [Answer(2, 1, -0.5)])
    assert from_cell(cell) == ({"length": 9.0, "depth": 50.0}, [Answer(2, 1, -0.5)])
    cell["answers"][0]["log_probability"] = None
    assert math.isnan(from_cell(cell)[1][0].log_probability)


@pytest.mark.parametrize(("prompts", "starts"), [(1, [0]), (2, [0, 1990]), (3, [0, 995, 1990])])
def test_prompts_are_spread_over_the_text(prompts: int, starts: list[int]) -> None:
    found = cut_prompts(GenerationRecipe(prompts=prompts, prompt_tokens=10), range(2000))
    assert found == [list(range(start, start + 10)) for start in starts]


@pytest.mark.parametrize(
    ("wrong", "agreed"), [([], 6), ([10], 0), ([11], 1), ([15], 5), ([13, 11], 1)]
)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 10, 99])
def test_agreement_ends_at_the_first_difference(
    wrong: list[int], agreed: int, chunk_tokens: int
) -> None:
    tokens = list(range(40, 56))
    model = Oracle(tokens)
    assert continue_greedily(model, tokens[:10], 6, chunk_tokens) == tokens[10:]
    model = Oracle(tokens, wrong)
    assert agreeing_tokens(model, tokens[:10], tokens[10:], chunk_tokens) == agreed
    assert model.stored == min(10 + agreed, 15)  # and nothing runs after it


def test_nan_agrees_with_nothing() -> None:
    tokens = list(range(40, 56))
    assert agreeing_tokens(Oracle(tokens, nan=12), tokens[:10], tokens[10:], 5) == 2
