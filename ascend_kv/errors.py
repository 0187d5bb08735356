"""The two errors a user can meet, and the exit code each one means.

``UsageError`` is for what the user can put right: it names the field, what was given and what
is legal. ``RunError`` is for what failed while running. Both end the command line without a
traceback. Asserts are for our own bugs.
"""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(ValueError):
    """Something the user gave is not legal; exit code 2.

    Args:
        field: name of the argument, key or file at fault.
        given: the value that was given.
        legal: the legal values: a description, or a collection of names that is listed.
        hint: what to do about it, one sentence.
    """

    exit_code = 2

    def __init__(
        self, field: str, given: object, legal: str | Iterable[object], hint: str = ""
    ) -> None:
        self.field = field
        self.given = given
        self.legal = legal if isinstance(legal, str) else ", ".join(str(item) for item in legal)
        self.hint = hint
        message = f"{field}: got {given!r}; legal: {self.legal}"
        super().__init__(f"{message}. {hint}" if hint else message)


class UnsupportedModelError(UsageError):
    """The model cannot be served, by name and with the reason; exit code 2."""


class RunError(RuntimeError):
    """Something failed while running that no other argument would mend; exit code 1."""

    exit_code = 1
