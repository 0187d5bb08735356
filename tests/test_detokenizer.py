"""Text as it grows: characters of several tokens, stop strings over token borders."""

from __future__ import annotations

import random

import pytest

from ascend_kv.engine.detokenizer import Detokenizer


class Bytes:
    """A byte-level tokenizer: token b is the byte b, tokens from 256 on are special."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<s>"
        text, raw = "", bytearray()
        for token in ids:
            if token < 256:
                raw.append(token)
            else:
                text += raw.decode(errors="replace") + special
                raw = bytearray()
        return text + raw.decode(errors="replace")


TEXT = "naïve 日本語 text 🙂 with 🇳🇴 flags — and plain words."


@pytest.mark.parametrize("skip", [True, False])
def test_text_equals_decoding_at_once_and_only_grows(skip: bool) -> None:
    tokens = [*TEXT.encode(), 256, *b" more"]
    detokenizer = Detokenizer(Bytes(), skip_special_tokens=skip)
    shown = ""
    for token in tokens:
        assert detokenizer.append(token) is None
        assert detokenizer.text.startswith(shown)
        assert "\N{REPLACEMENT CHARACTER}" not in detokenizer.text
        shown = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == Bytes().decode(tokens, skip)


def test_an_unfinished_character_comes_with_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    for token in [97, *"é".encode()[:1]]:
        detokenizer.append(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "a\N{REPLACEMENT CHARACTER}"


def test_random_bytes_never_break_it() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens = [rng.choice([*range(256), 300]) for _ in range(rng.randrange(12))]
        detokenizer = Detokenizer(Bytes())
        for token in tokens:
            detokenizer.append(token)
        detokenizer.finish()
        assert len(detokenizer.text) <= len(tokens)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", ["語 te", "日", "plain words.", "n"])
def test_the_first_stop_string_is_found_wherever_it_falls(stop: str, include: bool) -> None:
    detokenizer = Detokenizer(Bytes(), stop_strings=["never", stop], include_stop=include)
    data = TEXT.encode()
    number = 0
    while (met := detokenizer.append(data[number])) is None:
        number += 1
    assert met.string == stop
    end = TEXT.index(stop) + len(stop)
    assert number == len(TEXT[:end].encode()) - 1
    detokenizer.truncate(met)
    assert detokenizer.text == TEXT[: end if include else end - len(stop)]


def test_of_two_stop_strings_the_one_that_ends_first_counts() -> None:
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "one two three" * len(ids)

    detokenizer = Detokenizer(Words(), stop_strings=["three", "two"])
    met = detokenizer.append(1)
    assert met is not None and met.string == "two" and met.length == 4


def test_stop_strings_do_not_count_when_they_must_not() -> None:
    detokenizer = Detokenizer(Bytes(), stop_strings=["a"])
    assert detokenizer.append(97, stops=False) is None
    assert detokenizer.append(98) is None  # the earlier one is past
    assert detokenizer.append(97) is not None


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Bytes(), stop_strings=["END", "xy"])
    for token in b"text EN":
        detokenizer.append(token)
    assert detokenizer.settled_text() == "text "
    assert Detokenizer(Bytes()).settled_text() == ""


def test_what_is_shown_never_has_to_be_taken_back() -> None:
    class Pieces:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(("a", "b", "ab", "ba", "", "aab")[token] for token in ids)

    rng, met_some = random.Random(1), 0
    for _ in range(2000):
        count = rng.randint(1, 3)
        strings = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(count)]
        detokenizer = Detokenizer(Pieces(), True, strings, include_stop=rng.random() < 0.5)
        free, shown = rng.randrange(4), ""
        for number in range(12):
            met = detokenizer.append(rng.randrange(6), stops=number >= free)
            if met is not None:
                detokenizer.truncate(met)
                met_some += 1
                break
            assert detokenizer.settled_text().startswith(shown)
            shown = detokenizer.settled_text()
        assert detokenizer.text.startswith(shown)
    assert 500 < met_some < 2000
