"""Cells on disk: what is computed once, so that an interrupted evaluation goes on.

Below the output directory::

    cells/settings.json             what all cells were computed with
    cells/<policy>/<task>/<n>.json  one cell each

A file is written whole or not at all. Cells of other settings are never mixed: whoever opens the
directory says with which settings it goes on, and is refused where they differ. Policies and
tasks may be added.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_kv.errors import RunError, UsageError
from ascend_kv.whole_files import cannot_write, write_whole

logger = logging.getLogger(__name__)

_SCHEMA = "ascend_kv.eval.cells/2"
_DIGITS = 9
_OPEN = ("tasks", "policies")
"""Settings whose names may become more."""
_NOT_SAID = "(not said)"
"""stands for a name that is not there, as of a setting that came later; null is a value"""


class CellStore:
    """The cells of one output directory."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Go on in a directory, or begin there.

        Args:
            directory: the output directory.
            settings: sections of settings; those below ``tasks`` and ``policies`` are compared
                name by name, so that there may be more or fewer of them than before.

        Settings without a cell, of a run that failed at once, give way to these.

        Raises:
            UsageError: the cells that are there were computed with other settings.
            RunError: the directory cannot be read or written.
        """
        self._folder = directory / "cells"
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}
        path = self._folder / "settings.json"
        given = json.loads(json.dumps({"schema": _SCHEMA} | dict(settings)))
        if any(self._folder.glob("*/*/*.json")):
            before = self._read_settings(path)
            _check_same(before, given, directory)
            for section in _OPEN:
                given[section] = before.get(section, {}) | given.get(section, {})
        self._make(path.parent)
        write_whole(path, json.dumps(given, indent=1) + "\n")

    def get(self, policy: str, task: str, item: object) -> dict[str, Any] | None:
        """A cell's content, or None where it has not been computed."""
        key = (policy, task, str(item))
        if key not in self._known:
            content = self._read(self._path(*key))
            if content is None:
                return None
            self._known[key] = content
        return self._known[key]

    def put(self, policy: str, task: str, item: object, content: Mapping[str, Any]) -> None:
        """Keep a cell. Numbers that are not finite become null, others have nine digits.

        Raises:
            RunError: it cannot be written.
        """
        key = (policy, task, str(item))
        rounded = _rounded(content)
        path = self._path(*key)
        self._make(path.parent)
        write_whole(path, json.dumps(rounded) + "\n")
        self._known[key] = rounded

    def _path(self, policy: str, task: str, item: str) -> Path:
        return self._folder / _file_name(policy) / _file_name(task) / f"{item}.json"

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(cannot_write(folder, error)) from error

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): its cell is computed again", path, error)
            return None
        if isinstance(content, dict) and content:
            return content
        logger.warning("%s holds nothing: its cell is computed again", path)
        return None

    def _read_settings(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            legal = "the output of an evaluation, or a directory without one"
            hint = f"Its settings cannot be read ({error}), so nothing says what its cells are of."
            raise UsageError("--output", str(path), legal, hint) from error
        return content if isinstance(content, dict) else {}


def _check_same(before: Mapping[str, Any], given: Mapping[str, Any], directory: Path) -> None:
    difference = _first_difference(before, given, "")
    if difference is None:
        return
    name, old, new = difference
    raise UsageError(
        name,
        new,
        f"{old!r}, with which the cells in {directory} were computed",
        "Name another --output, or give the same settings to go on there.",
    )


def _first_difference(
    before: Mapping[str, Any], given: Mapping[str, Any], prefix: str
) -> tuple[str, Any, Any] | None:
    names = before.keys() & given.keys() if prefix in _OPEN else before.keys() | given.keys()
    for name in sorted(names):
        old, new = before.get(name, _NOT_SAID), given.get(name, _NOT_SAID)
        where = f"{prefix}.{name}" if prefix else name
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = _first_difference(old, new, where)
            if inner is not None:
                return inner
        elif old != new:
            return where, old, new
    return None


def _file_name(name: str) -> str:
    """Legal on every file system, and another one for every name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:60]
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
