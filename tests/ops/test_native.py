"""Which implementation serves on a CPU: what the variable asks for, and what the library fits."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascend_kv.errors import RunError, UsageError
from ascend_kv.ops import native, native_sources

built = pytest.mark.skipif(
    native.find_problem(native.LIBRARY) is not None,
    reason="the native CPU operators are not built here",
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that was built for this machine, and the list of those that are loaded."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: LOADED.append(path))
    LOADED.clear()
    describe(tmp_path / "library.so")
    (tmp_path / "library.so").touch()
    return tmp_path / "library.so"


LOADED: list[str] = []


def describe(library: Path, **changes: object) -> None:
    made_for = {
        "torch": torch.__version__,
        "cpu_features": [],
        "sources": native_sources.digest(),
        **changes,
    }
    library.with_suffix(".json").write_text(json.dumps(made_for))


def test_what_fits_is_loaded(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert native.load_cpu_operators(library) and [str(library)] == LOADED
    assert not caplog.records


@pytest.mark.skipif(not os.environ.get("CI"), reason="a machine may do without the operators")
def test_where_all_is_tested_the_operators_are_built() -> None:
    """Else every test of them would be skipped, and none would say that they do not compile."""
    assert native.find_problem(native.LIBRARY) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "1.0.0"}, f"built with torch 1.0.0, and this is {torch.__version__}"),
        ({"cpu_features": ["of_tomorrow"]}, "need of_tomorrow, which this CPU lacks"),
        ({"sources": "of an older checkout"}, "built from other sources than these"),
        (None, "no native CPU operators were built"),
        ("no library", "no native CPU operators were built"),
        ("cut", "does not say what the native CPU operators were built for"),
        ("[1]", "does not say what the native CPU operators were built for"),
        ("{}", "does not say what the native CPU operators were built for"),
    ],
)
def test_what_does_not_fit_is_not_loaded_and_said(
    library: Path,
    change: dict[str, object] | str | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    description = library.with_suffix(".json")
    if change is None:
        description.unlink()
    elif change == "no library":
        library.unlink()
    elif isinstance(change, str):
        description.write_text(description.read_text()[:20] if change == "cut" else change)
    else:
        describe(library, **change)
    with caplog.at_level(logging.WARNING):
        assert not native.load_cpu_operators(library)
    (record,) = caplog.records
    assert told in record.message and "pip install -e ." in record.message
    monkeypatch.setenv(native.VARIABLE, "native")
    with pytest.raises(RunError, match="ASCEND_KV_OPERATORS=native, but"):
        native.load_cpu_operators(library)
    assert LOADED == []


@pytest.mark.parametrize("wanted", ["auto", "native"])
def test_a_library_that_does_not_load_is_said(
    library: Path,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(path: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(torch.ops, "load_library", broken)
    monkeypatch.setenv(native.VARIABLE, wanted)
    if wanted == "native":
        with pytest.raises(RunError, match="undefined symbol"):
            native.load_cpu_operators(library)
    else:
        assert not native.load_cpu_operators(library)
        assert "do not load (undefined symbol)" in caplog.text


def test_the_reference_may_be_asked_for(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "reference")
    assert not native.load_cpu_operators(library) and LOADED == []


def test_an_unknown_choice_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "fast")
    with pytest.raises(UsageError, match="auto, native, reference"):
        native.load_cpu_operators(library)


def test_a_machine_that_tells_nothing_has_no_features(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_CPUINFO", tmp_path / "none")
    assert native.find_problem(library) is None
    describe(library, cpu_features=["avx2"])
    assert native.find_problem(library) is not None


@built
@pytest.mark.parametrize("wanted", native.CHOICES)
def test_the_variable_decides_who_serves(wanted: str) -> None:
    script = "from ascend_kv.ops import platform; print(platform.implementations('cpu'))"
    environment = os.environ | {native.VARIABLE: wanted}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    expected = "reference" if wanted == "reference" else "native"
    assert f"'paged_attention': '{expected}'" in done.stdout


@built
@pytest.mark.parametrize("wanted", native.CHOICES)
def test_to_how_many_bits_attention_over_codes_rounds(wanted: str) -> None:
    script = """
from ascend_kv.errors import RunError
from ascend_kv.ops import native, platform
try:
    print(native.whole_number_bits())
except RunError as error:
    print(error)
"""
    environment = os.environ | {native.VARIABLE: wanted}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    features = json.loads(native.LIBRARY.with_suffix(".json").read_text())["cpu_features"]
    if wanted == "reference":
        documented = ["no compiled operators are loaded, which alone round to whole numbers"]
    elif "amx_int8" in features:
        documented = ["24", "None"]  # the system may refuse the unit
    else:
        documented = ["16" if "avx2" in features and "avx512f" not in features else "None"]
    assert done.stdout.strip() in documented


def test_every_change_of_the_sources_shows(tmp_path: Path) -> None:
    assert native_sources.digest(tmp_path) is None  # an installed package has none
    (tmp_path / "op").mkdir()
    source, header = tmp_path / "op" / "op_cpu.cpp", tmp_path / "op" / "cpu_part.h"
    seen = set()
    for text in ("one", "two"):
        for file in (source, header):
            file.write_text(text)
            seen.add(native_sources.digest(tmp_path))
    source.rename(tmp_path / "op" / "other_cpu.cpp")
    seen.add(native_sources.digest(tmp_path))
    assert len(seen) == 5 and None not in seen
