"""The events of a Chrome trace one by one, whatever the size of the file.

A trace is an array of objects (msprof, torch_npu) or an object whose ``traceEvents`` is one
(torch). json's own decoder reads each object out of a window of text that moves over the file.
torch_npu leaves the last bracket away when it is stopped while it writes: what is there counts.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ascend_kv.errors import UsageError
from ascend_kv.profile.tasks import Remarks

_CHUNK = 1 << 20
_LONGEST_VALUE = 64 << 20
"""Characters of one event, or of what stands beside the events; more is taken for no trace."""
_LEGAL = "a Chrome trace: an array of events, or an object with traceEvents"
# Numbers stay text: a float cannot hold the times.
_DECODER = json.JSONDecoder(parse_float=str)


def read_events(path: Path, remarks: Remarks) -> Iterator[dict[str, Any]]:
    """Yield every object of the array of events.

    Args:
        path: the trace, perhaps with the ending ``.gz``.
        remarks: is told of a file that breaks off.

    Raises:
        UsageError: not a trace; names the place.
        OSError: the file cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        window = _Window(path, file)  # type: ignore[arg-type]
        first = window.next_character()
        if first not in ("[", "{"):
            hint = f"It begins with {first!r}." if first else "It is empty."
            raise UsageError("profile", str(path), _LEGAL, hint)
        events = _elements if first == "[" else _of_object
        try:
            yield from events(window, remarks)
        except EOFError:
            raise window.error("the file ends here") from None


def _of_object(window: _Window, remarks: Remarks) -> Iterator[dict[str, Any]]:
    """The events of an object, whose other values are read and forgotten."""
    found = False
    window.skip()
    while window.next_character() not in ("}", ""):
        if window.next_character() == ",":
            window.skip()
            continue
        key = window.value()
        if window.next_character() != ":":
            raise window.error("a key without a value")
        window.skip()
        if key == "traceEvents" and window.next_character() == "[":
            found = True
            yield from _elements(window, remarks)
        else:
            window.value()
    if not found:
        raise UsageError("profile", str(window.path), _LEGAL, "This object has no traceEvents.")


def _elements(window: _Window, remarks: Remarks) -> Iterator[dict[str, Any]]:
    """The objects of the array that begins here; a comma too many does no harm."""
    window.skip()
    while (character := window.next_character()) != "]":
        if character == "":
            remarks.add("The trace breaks off: its writer was stopped. What is there was read.")
            return
        if character == ",":
            window.skip()
            continue
        try:
            value = window.value()
        except EOFError:
            remarks.add("The trace breaks off: its writer was stopped. What is there was read.")
            return
        if isinstance(value, dict):
            yield value
    window.skip()


class _Window:
    """A stretch of the file's text and a place in it."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self.file = path, file
        self.text, self.at, self.before = "", 0, 0

    def next_character(self) -> str:
        """The next one that is no blank, without taking it; "" at the end of the file."""
        while True:
            while self.at < len(self.text):
                character = self.text[self.at]
                if character not in " \t\r\n\ufeff":
                    return character
                self.at += 1
            if not self._more():
                return ""

    def skip(self) -> None:
        """Take one character."""
        self.at += 1

    def value(self) -> Any:
        """Take one JSON value.

        Raises:
            UsageError: not JSON.
            EOFError: the file ends within the value.
        """
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > _LONGEST_VALUE:
                    raise self.error(error.msg) from None
                if not self._more():
                    if error.msg.startswith("Unterminated") or self._near_end(error.pos):
                        raise EOFError from None
                    raise self.error(error.msg, error.pos) from None
                continue
            # A number at the very end of the window may go on behind it.
            if end == len(self.text) and self._more():
                continue
            self.at = end
            return value

    def _near_end(self, at: int) -> bool:
        """Whether a literal that begins there may have been cut off by the end of the file."""
        return at > len(self.text.rstrip()) - len("-Infinity")

    def error(self, reason: str, at: int | None = None) -> UsageError:
        place = self.before + (self.at if at is None else at)
        return UsageError("profile", str(self.path), _LEGAL, f"Character {place:,}: {reason}.")

    def _more(self) -> bool:
        try:
            chunk = self.file.read(_CHUNK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            legal = "a whole gzip file, or the trace without .gz"
            raise UsageError("profile", str(self.path), legal, f"{error}.") from None
        if not chunk:
            return False
        self.before += self.at
        self.text, self.at = self.text[self.at :] + chunk, 0
        return True
