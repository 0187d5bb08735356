"""Cells on disk: kept whole, found again, never mixed with those of other settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.quality.cells import CellStore

SETTINGS: dict[str, Any] = {
    "model": {"name": "m", "layers": (1, 2)},
    "seed": 0,
    "tasks": {"perplexity": {"windows": 4}},
    "policies": {"int8": {"kv_cache_dtype": "int8"}},
}


def test_cells_come_back(tmp_path: Path) -> None:
    store = CellStore(tmp_path, SETTINGS)
    assert store.get("int8", "perplexity", 3) is None
    store.put("int8", "perplexity", 3, {"loss": [1 / 3, math.nan, -math.inf], "agreement": (1, 0)})
    again = CellStore(tmp_path, SETTINGS)
    for one in (store, again):
        assert one.get("int8", "perplexity", 3) == {
            "loss": [0.333333333, None, None],
            "agreement": [1, 0],
        }
    assert again.get("int8", "perplexity", 4) is None
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".part"]


@pytest.mark.parametrize(
    "names", [("a/b", "a_b"), ("a b", "a_b"), ("..", "."), ("x" * 90, "x" * 91)]
)
def test_every_name_has_a_place_of_its_own(tmp_path: Path, names: tuple[str, str]) -> None:
    store = CellStore(tmp_path, SETTINGS)
    for number, name in enumerate(names):
        store.put(name, f"task: {name}", 0, {"number": number})
    again = CellStore(tmp_path, SETTINGS)
    for number, name in enumerate(names):
        assert again.get(name, f"task: {name}", 0) == {"number": number}
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"model": {"name": "n", "layers": [1, 2]}}, "model.name"),
        ({"tasks": {"perplexity": {"windows": 5}}}, "tasks.perplexity.windows"),
        ({"policies": {"int8": {}}}, "policies.int8.kv_cache_dtype"),
        ({"text": "other"}, "text"),
        ({"came_later": None}, "came_later"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    CellStore(tmp_path, SETTINGS).put("int8", "perplexity", 0, {"loss": [1.0]})
    with pytest.raises(UsageError, match="--output") as caught:
        CellStore(tmp_path, SETTINGS | changes)
    assert caught.value.field == field


def test_settings_without_cells_give_way(tmp_path: Path) -> None:
    CellStore(tmp_path, SETTINGS)
    CellStore(tmp_path, SETTINGS | {"seed": 1}).put("int8", "perplexity", 0, {"loss": [1.0]})
    with pytest.raises(UsageError, match="seed"):
        CellStore(tmp_path, SETTINGS)


def test_policies_and_tasks_may_be_added_and_left_out(tmp_path: Path) -> None:
    CellStore(tmp_path, SETTINGS).put("int8", "perplexity", 0, {"loss": [1.0]})
    other = {"policies": {"fp8": {"x": 1}}, "tasks": {"needle": {"depths": [0]}}}
    CellStore(tmp_path, SETTINGS | other)
    with pytest.raises(UsageError, match=r"policies\.int8"):  # the first one is remembered
        CellStore(tmp_path, SETTINGS | {"policies": {"int8": {"kv_cache_dtype": "fp8"}}})
    kept = json.loads((tmp_path / "cells" / "settings.json").read_text())
    assert set(kept["policies"]) == {"int8", "fp8"} and set(kept["tasks"]) == {
        "perplexity",
        "needle",
    }


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_damaged_cell_is_computed_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    CellStore(tmp_path, SETTINGS).put("int8", "perplexity", 0, {"loss": [1.0]})
    (path,) = (tmp_path / "cells" / "int8").rglob("*.json")
    path.write_text(content)
    store = CellStore(tmp_path, SETTINGS)
    assert store.get("int8", "perplexity", 0) is None
    store.put("int8", "perplexity", 0, {"loss": [2.0]})
    assert CellStore(tmp_path, SETTINGS).get("int8", "perplexity", 0) == {"loss": [2.0]}


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), Path.unlink])
def test_cells_of_unknown_settings_are_refused(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    CellStore(tmp_path, SETTINGS).put("int8", "perplexity", 0, {"loss": [1.0]})
    damage(tmp_path / "cells" / "settings.json")
    with pytest.raises(UsageError, match=r"settings\.json.*cannot be read"):
        CellStore(tmp_path, SETTINGS)


def test_a_full_disk_is_an_error_and_leaves_no_half_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CellStore(tmp_path, SETTINGS)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(RunError, match="No space left"):
        store.put("int8", "perplexity", 0, {"loss": [1.0]})
    monkeypatch.undo()
    assert store.get("int8", "perplexity", 0) is None
    assert not list((tmp_path / "cells" / "int8").rglob("*.*"))
