"""Files that are written whole or not at all: an interruption leaves the older one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ascend_kv.errors import RunError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to, which becomes ``path`` when all went well.

    Raises:
        RunError: it cannot be written; an older file is still there then.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except OSError as error:
        raise RunError(cannot_write(path, error)) from error
    finally:
        with suppress(OSError):  # as where its folder is none
            unfinished.unlink()


def write_whole(path: Path, content: str) -> None:
    """The same for a text, in UTF-8."""
    with written_whole(path) as unfinished:
        unfinished.write_text(content, encoding="utf-8")


def check_place(path: Path) -> None:
    """See, before long work, that a file can be written there; one that is there stays.

    Raises:
        RunError: it cannot.
    """
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        probe.touch()
    except OSError as error:
        raise RunError(cannot_write(path, error)) from error
    finally:
        with suppress(OSError):
            probe.unlink()


def cannot_write(path: Path, error: OSError) -> str:
    """What a user is told about a file or folder that cannot be written."""
    return f"{path} cannot be written: {error.strerror or error}. Name another place"
