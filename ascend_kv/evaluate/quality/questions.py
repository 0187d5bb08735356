"""Tasks with known answers that need no data set: needle, copy, recall.

They are made from a tokenizer, a text and a seed, so they fit every model and can be made again.
The answer is never written by the model: the question goes in with its answer, and the answer's
tokens are scored one by one given those before (teacher forcing). An answer whose tokens are all
the likeliest ones is what greedy decoding would give, and a small model that gets none of them
right still shows in their log probability what a cache takes from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.recipe import CopyRecipe, NeedleRecipe, RecallRecipe
from ascend_kv.evaluate.quality.scoring import Scorer, chunks, log_probabilities

_CITIES = (
    *("Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Riga", "Perth", "Turin", "Porto", "Izmir"),
    *("Sapporo", "Bergen", "Windhoek", "Tampere", "Cuzco", "Bristol", "Nagoya", "Dakar"),
)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Question(NamedTuple):
    """One sequence, and the places in it where something is known to be right."""

    labels: dict[str, float]
    """Where it belongs in a table, such as length, repeat and depth."""
    token_ids: list[int]
    answers: list[tuple[int, int]]
    """First and last-plus-one position of every answer."""


@dataclass(frozen=True)
class Answer:
    """How one answer was scored."""

    tokens: int
    right: int
    """Tokens that were the likeliest."""
    log_probability: float
    """Sum over the tokens, nats."""

    @property
    def exact(self) -> bool:
        """Whether greedy decoding gives this answer."""
        return self.right == self.tokens


class Source:
    """Tokens to make questions of."""

    def __init__(self, tokenizer: Any, token_ids: Sequence[int], seed: int) -> None:
        """Keep what questions are made of.

        Args:
            tokenizer: Hugging Face's.
            token_ids: of the text.
            seed: the same seed, the same questions.
        """
        self._tokenizer, self.token_ids, self._seed = tokenizer, token_ids, seed
        self.beginning = list(tokenizer("")["input_ids"])
        """What the tokenizer puts before every text, such as a beginning-of-sequence token."""

    def piece(self, text: str) -> list[int]:
        """Token ids of a piece of a longer text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def draw(self, *name: object) -> random.Random:
        """Chance of its own for everything that has a name."""
        return random.Random(f"{self._seed}/{'/'.join(map(str, name))}")


def make_needles(recipe: NeedleRecipe, source: Source) -> list[Question]:
    """A sentence with a number, hidden in the text, and its beginning again at the end.

    Texts, needles and numbers differ by length and repeat; all depths of these are the same but
    for the place of the needle.

    Raises:
        UsageError: the text is shorter than the longest question.
    """
    questions = []
    for length in recipe.lengths:
        for repeat in range(recipe.repeats):
            chance = source.draw("needle", length, repeat)
            lead = source.piece(f"\n\nThe secret number of {chance.choice(_CITIES)} is")
            answer = source.piece(f" {chance.randrange(10_000, 100_000)}")
            sentence = lead + answer + source.piece(".\n\n")
            around = len(source.beginning) + len(sentence) + len(lead) + len(answer)
            hay = _cut(source, length - around, length, chance)
            for depth in recipe.depths:
                place = round(len(hay) * depth / 100)
                prompt = source.beginning + hay[:place] + sentence + hay[place:] + lead
                tokens = prompt + answer
                labels = {"length": float(length), "repeat": float(repeat), "depth": depth}
                questions.append(Question(labels, tokens, [(len(prompt), len(tokens))]))
    return questions


def _cut(source: Source, tokens: int, length: int, chance: random.Random) -> list[int]:
    if tokens < 1:
        legal = f"{length - tokens + 1} or more with this tokenizer: question and answer take that"
        raise UsageError("needle.lengths", length, legal)
    if len(source.token_ids) < tokens:
        raise UsageError(
            "text",
            f"{len(source.token_ids)} tokens",
            f"at least {tokens} tokens, for needle.lengths {length}",
            "Give a longer text, or lower needle.lengths.",
        )
    start = chance.randrange(len(source.token_ids) - tokens + 1)
    return list(source.token_ids[start : start + tokens])


def make_copies(recipe: CopyRecipe, source: Source) -> list[Question]:
    """A passage of tokens drawn at random out of the text, twice; the second one is scored.

    Its first token is given, for nothing tells that the passage begins again.
    """
    questions = []
    for length in recipe.lengths:
        for number in range(recipe.passages):
            chance = source.draw("copy", length, number)
            passage = [chance.choice(source.token_ids) for _ in range(length)]
            tokens = source.beginning + passage + passage
            span = (len(tokens) - length + 1, len(tokens))
            questions.append(Question({"length": float(length)}, tokens, [span]))
    return questions


def make_recall(recipe: RecallRecipe, source: Source) -> list[Question]:
    """Lines of a word and a number, then some of the words again, each with its number.

    The words asked for are spread evenly over the list and come in random order.
    """
    questions = []
    for pairs in recipe.pairs:
        for number in range(recipe.lists):
            chance = source.draw("recall", pairs, number)
            words = _words(pairs, chance)
            values = [str(value) for value in chance.sample(range(100, 1000), min(pairs, 900))]
            values += [str(chance.randrange(100, 1000)) for _ in range(pairs - len(values))]
            tokens = list(source.beginning)
            for word, value in zip(words, values, strict=True):
                tokens += source.piece(f"{word}:") + source.piece(f" {value}") + source.piece("\n")
            asked = [
                round((place + 0.5) * pairs / recipe.questions - 0.5)
                for place in range(recipe.questions)
            ]
            chance.shuffle(asked)
            spans = []
            for place in asked:
                tokens += source.piece(f"{words[place]}:")
                answer = source.piece(f" {values[place]}")
                spans.append((len(tokens), len(tokens) + len(answer)))
                tokens += answer + source.piece("\n")
            questions.append(Question({"pairs": float(pairs)}, tokens, spans))
    return questions


def _words(count: int, chance: random.Random) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = (chance.choice(_CONSONANTS) + chance.choice(_VOWELS) for _ in range(3))
        words["".join(syllables)] = None
    return list(words)


def score_question(scorer: Scorer, question: Question, chunk_tokens: int) -> list[Answer]:
    """Run a question with its answers; a token of an answer is predicted by the one before it.

    Args:
        scorer: one policy's cache.
        question: what is asked.
        chunk_tokens: tokens a forward.
    """
    tokens = question.token_ids
    wanted = [place - 1 for first, stop in question.answers for place in range(first, stop)]
    scored: dict[int, tuple[float, bool]] = {}
    for start, chunk in chunks(tokens, chunk_tokens):
        rows = [place - start for place in wanted if start <= place < start + len(chunk)]
        logits = scorer.forward(chunk, start, rows or [len(chunk) - 1])
        for place, row in zip(rows, log_probabilities(logits)):
            target = tokens[start + place + 1]
            same = int(row.argmax()) == target
            scored[start + place + 1] = (float(row[target]), same)
    answers = []
    for first, stop in question.answers:
        marks = [scored[place] for place in range(first, stop)]
        right = sum(same for value, same in marks if math.isfinite(value))
        answers.append(Answer(stop - first, right, sum(value for value, _ in marks)))
    return answers


def as_cell(question: Question, answers: Sequence[Answer]) -> dict[str, Any]:
    """What is kept of a question."""
    return {"labels": question.labels, "answers": [asdict(answer) for answer in answers]}


def from_cell(cell: dict[str, Any]) -> tuple[dict[str, float], list[Answer]]:
    """Labels and answers out of a cell; a log probability that was not finite is NaN."""
    answers = [
        Answer(
            answer["tokens"],
            answer["right"],
            math.nan if answer["log_probability"] is None else answer["log_probability"],
        )
        for answer in cell["answers"]
    ]
    return cell["labels"], answers
