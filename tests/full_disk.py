"""A disk on which a file is written beside another one and does not get its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Put an older file there, which nothing replaces from now on."""
    path.write_text("old")
    replace = os.replace

    def full(source: str | Path, target: str | Path) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
