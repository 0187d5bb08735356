"""A table as plain text cells, for terminals and Markdown files."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextTable:
    """A title, a header, rows of the same length and remarks below."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
