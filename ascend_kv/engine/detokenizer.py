"""From tokens to text as they come, and stop strings wherever they appear.

A token is not a text: several may be needed for one character, and many tokenizers decide on a
space by the token before. So a few tokens are decoded anew each time, those since the last two
places where the text was whole, and only the growth is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer writes the beginning of a character whose end has not come yet."""


class Stop(NamedTuple):
    """A stop string that was met."""

    string: str
    """Which one."""
    length: int
    """Characters of the text that are kept."""


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        """``tokenizer`` is anything with Hugging Face's ``decode(ids, skip_special_tokens=)``."""
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._tokens: list[int] = []
        self._context = 0  # tokens before here are settled and no longer decoded
        self._read = 0  # tokens before here are in the text

    def append(self, token: int, stops: bool = True) -> Stop | None:
        """Take one token; the first stop string that its text completes, if ``stops``."""
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._tokens))
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return None
        return self._grow(after[len(before) :], stops)

    def finish(self) -> None:
        """Add what is left: a character whose end never came."""
        before = self._decode(self._context, self._read)
        self.text += self._decode(self._context, len(self._tokens))[len(before) :]
        self._read = len(self._tokens)

    def settled_text(self) -> str:
        """The text without an end that may still turn out to be part of a stop string."""
        held = max((len(string) for string in self._stop_strings), default=1) - 1
        return self.text[: max(0, len(self.text) - held)]

    def truncate(self, stop: Stop) -> None:
        """Cut the text where a stop string says."""
        self.text = self.text[: stop.length]

    def _grow(self, new: str, stops: bool) -> Stop | None:
        old_length = len(self.text)
        self.text += new
        self._context, self._read = self._read, len(self._tokens)
        if not stops:
            return None
        found = []
        for string in self._stop_strings:
            at = self.text.find(string, max(0, old_length - len(string) + 1))
            if at >= 0:
                end = at + len(string)
                found.append((end, Stop(string, end if self._include_stop else at)))
        return min(found)[1] if found else None

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        text: str = self._tokenizer.decode(
            self._tokens[start:stop], skip_special_tokens=self._skip_special
        )
        return text
