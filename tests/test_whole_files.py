"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_kv.errors import RunError
from ascend_kv.whole_files import write_whole, written_whole


def test_a_text_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "é")
    write_whole(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_is_interrupted_leaves_the_older_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "old")
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "a.json") as unfinished:
        unfinished.write_text("ne")
        raise KeyboardInterrupt
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_two_who_write_do_not_share_what_is_unfinished(tmp_path: Path) -> None:
    with written_whole(tmp_path / "a.json") as mine:
        mine.write_text("mine")
        with written_whole(tmp_path / "a.json") as theirs:
            theirs.write_text("theirs")
        assert (tmp_path / "a.json").read_text() == "theirs"
    assert (tmp_path / "a.json").read_text() == "mine"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(RunError, match=r"a\.json cannot be written"):
        write_whole(tmp_path / "a.json", "text")
    with pytest.raises(RunError, match="No such file"):
        write_whole(tmp_path / "nowhere" / "a.json", "text")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="Not a directory"):
        write_whole(tmp_path / "file" / "a.json", "text")
