"""What the bench says to an engine: one JSON object a line, on standard input and output.

    {"do": "load", "model": FILE, "variant": NAME, "threads": COUNT, "most_tokens": COUNT}
        -> {"versions": {NAME: VERSION}, "loaded": TEXT}
    {"do": "prefill", "tokens": COUNT}
        -> {}                         that many tokens are in a cache of their own, ready to decode
    {"do": "decode", "tokens": COUNT, "steps": COUNT}
        -> {"seconds": [FLOAT, ...]}  of each step of the sequence that was prefilled with so many
    anything that fails
        -> {"error": TEXT}            the next request is served all the same

A cache grows with every step, all engines' alike. The end of standard input ends the process.

This file and the ``run_*.py`` beside it are read by the Python of an engine's own environment,
which has no ascend_kv: they import the standard library and that engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

Step = Callable[[], object]
"""Decodes one more token of one sequence and comes back when its logits are there."""

# Ordinary words in the vocabulary of SmolLM2; what the tokens are does not change the times.
_FIRST_TOKEN, _TOKENS = 1000, 20000


class Request(NamedTuple):
    """What an engine is to load."""

    model: Path
    """A GGUF file."""
    variant: str
    """How keys and values are stored, in the engine's own words."""
    threads: int
    most_tokens: int
    """The longest a sequence will get."""


class Engine(NamedTuple):
    """What ``run_*.py`` makes of a request."""

    versions: dict[str, str]
    loaded: str
    """What was read from the file, and in what type it is computed with."""
    prefill: Callable[[list[int]], Step]
    """Puts a prompt into a new cache, at batch speed, and returns what decodes from there."""


def prompt(tokens: int) -> list[int]:
    """The same token ids in every engine."""
    return [_FIRST_TOKEN + place * 7919 % _TOKENS for place in range(tokens)]


def versions(*packages: str) -> dict[str, str]:
    """Of what this environment holds."""
    return {package: version(package) for package in packages}


def serve(open_engine: Callable[[Request], Engine]) -> None:
    """Answer requests until there are no more."""
    # Engines print what they like: it goes where the bench keeps complaints, not between answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    session = _Session(open_engine)
    for line in sys.stdin:
        try:
            answer = session.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


class _Session:
    def __init__(self, open_engine: Callable[[Request], Engine]) -> None:
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._steps: dict[int, Step] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked.pop("do"):
            case "load":
                model = Path(asked.pop("model"))
                self._engine = self._open_engine(Request(model, **asked))
                return {"versions": self._engine.versions, "loaded": self._engine.loaded}
            case "prefill":
                assert self._engine is not None, "nothing is loaded"
                self._steps[asked["tokens"]] = self._engine.prefill(prompt(asked["tokens"]))
                return {}
            case "decode":
                step = self._steps[asked["tokens"]]
                return {"seconds": [_seconds(step) for _ in range(asked["steps"])]}
            case other:
                raise ValueError(f"asked to do {other!r}")


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
