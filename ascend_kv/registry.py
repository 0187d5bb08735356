"""Names for classes: register under a name, look up by name, and an error that lists the names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

from ascend_kv.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to things of one kind.

    Args:
        kind: what is registered, in the words of the user; error messages begin with it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that enters what it decorates under ``name`` and returns it unchanged."""

        def enter(entry: T) -> T:
            assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """What was registered under ``name``.

        Raises:
            UsageError: an unknown name; lists the known ones and points to the nearest.
        """
        if name not in self._entries:
            raise UsageError(self.kind, name, self.names(), did_you_mean(name, self.names()))
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """The registered names in alphabetical order."""
        return tuple(sorted(self._entries))


def did_you_mean(name: object, legal: tuple[str, ...]) -> str:
    """A hint that points to the legal names nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(str(name), legal)
    return f"Did you mean {' or '.join(near)}?" if near else ""
