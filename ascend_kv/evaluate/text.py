"""The text that prompts are cut from and perplexity is measured on.

Python carries a long English text with every installation: the topics of its own ``help()``.
It needs no download and no licence question, and a user may name a file instead.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import NamedTuple

from ascend_kv.errors import UsageError


class Text(NamedTuple):
    """A text and where it came from, so that a report can name it."""

    source: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: Path | None = None) -> Text:
    """Read the user's file, or Python's documentation when there is none.

    Raises:
        UsageError: the file cannot be read, is not UTF-8 or holds nothing.
    """
    return python_documentation() if path is None else _read_file(path)


def python_documentation() -> Text:
    """All topics of ``pydoc_data.topics`` in alphabetical order.

    The text changes a little with the Python version, so the version is part of its name.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            "text",
            "pydoc_data.topics",
            "a Python installation that has it",
            "Give a text of your own with --text FILE.",
        ) from error
    content = "\n\n".join(topics[name] for name in sorted(topics))
    return Text(f"pydoc_data.topics of Python {platform.python_version()}", content)


def _read_file(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("text", str(path), "a text file in UTF-8") from error
    except OSError as error:
        raise UsageError("text", str(path), f"a readable file ({error.strerror})") from error
    if not content.strip():
        raise UsageError("text", str(path), "a file that is not empty")
    return Text(str(path), content)
