"""The DeepSeek-V4 recipe: the shipped file, a short run of all of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from deepseek_models import make_deepseek
from deepseek_runs import FLOAT32

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.evaluate import deepseek_decode
from ascend_kv.evaluate.console import Log, table_console
from ascend_kv.evaluate.deepseek_decode import time_decode
from ascend_kv.evaluate.deepseek_recipe import (
    DeepseekRecipe,
    bytes_table,
    load_deepseek_recipe,
    run_deepseek,
)
from ascend_kv.integrations.deepseek_v4_step import CompressedStep
from ascend_kv.integrations.loading import load_model
from ascend_kv.integrations.random_deepseek import make_random_deepseek

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "recipes" / "deepseek_v4.yaml"
SHORT: dict[str, Any] = {
    "schedule": ["window", "csa", "hca"],
    "dtype": "float32",
    "prompt_tokens": [140, 3, 60, 129],
    "output_tokens": 12,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 4,
    "decode_context_tokens": 3000,
    "decode_steps": 3,
}


def test_the_shipped_file_has_every_key_and_explains_it() -> None:
    load_deepseek_recipe(SHIPPED)
    text = SHIPPED.read_text(encoding="utf-8")
    for field in dataclasses.fields(DeepseekRecipe):
        assert re.search(rf"^# .*\n{field.name}: ", text, flags=re.MULTILINE), field.name


def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(SHORT), encoding="utf-8")
    result = run_deepseek(load_deepseek_recipe(path), Log(table_console(stderr=True)))
    _, serving, decode = result.tables()
    assert [row[0] for row in serving.rows] == [
        "the model's type",
        "INT8 indexer keys",
        "INT8 entries and keys",
        "the model's type, little memory",
    ]
    assert serving.notes[0] == "Bytes allocated are the geometry's: yes, to the byte."
    roomy, tight = serving.rows[0], serving.rows[3]
    assert (roomy[-2], roomy[-1], tight[-1]) == ("0", "100%", "100%")
    assert int(tight[-2]) > 0, "nobody was preempted"
    assert len(decode.rows) == 5 and all("ms" in row[1] for row in decode.rows)
    smaller = {row[0].split(",")[0]: float(row[-1]) for row in decode.rows[:1]}
    assert smaller["hca"] > 1
    content = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert [one["cache_bytes"] for one in content["served"]] == [
        one["geometry_bytes"] for one in content["served"]
    ]
    assert len(content["decode"]) == 5 and content["decode"][0]["seconds"] > 0
    flash = content["geometry"][0]
    assert flash["context_tokens"] == 1 << 17 and set(flash["bytes"]) == set(
        content["served"][0]["cache_bytes"]
    )


def test_bytes_beside_those_that_were_published() -> None:
    rows = {row[0]: row for row in bytes_table().rows}
    assert rows["Flash, 128K tokens, 16 bit"][4] == "0.845 GiB"
    assert rows["Flash, 1024K tokens, 16 bit"][4] == "6.724 GiB"
    assert rows["Pro, 128K tokens, 16 bit"][4] == "1.210 GiB"
    assert rows["Pro, 1024K tokens, 16 bit"][4::2] == ("9.625 GiB", "9.62 GiB")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("schedule", {"schedule": ["full"]}),
        ("schedule", {"schedule": []}),
        ("dtype", {"dtype": "int8"}),
        ("prompt_tokens", {"prompt_tokens": [0]}),
        ("prompt_tokens", {"prompt_tokens": []}),
        ("output_tokens", {"output_tokens": 0}),
        ("decode_steps", {"decode_steps": 0}),
    ],
)
def test_mistakes_in_a_recipe_are_refused(
    tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**SHORT, **change}), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        load_deepseek_recipe(path)
    assert field in error.value.field


def test_files_that_are_no_recipes_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / "tools" / "deepseek_v4.py"))["main"]
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    for name in ("nowhere.yaml", "list.yaml", "broken.yaml"):
        assert main([str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err


def test_a_layer_that_the_model_has_not_got_is_not_timed(tmp_path: Path) -> None:
    loaded = load_model(make_random_deepseek(tmp_path, ["window", "csa"]))
    for kind, context in (("hca", 1000), ("csa", 3), ("csa", 10**7)):
        with pytest.raises(UsageError):
            time_decode(loaded, kind, FLOAT32, context, 5)


@pytest.mark.parametrize(
    ("kind", "steps", "seconds"),
    [("csa", 3, 1 + 2 * 1000 / 4), ("csa", 5, 1 + 2 * 1000 / 4), ("hca", 3, 1 + 1000 / 128)],
)
def test_a_steps_time_has_its_share_of_compressing_and_its_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, steps: int, seconds: float
) -> None:
    """On a clock by which planning takes 1 s and compressing, entries or indexer keys, 1000 s."""
    clock = [0.0]

    def slow(call: Any, takes: float) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            clock[0] += takes
            return call(*args, **options)

        return timed

    monkeypatch.setattr(deepseek_decode, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(deepseek_decode, "CompressedStep", slow(CompressedStep, 1))
    monkeypatch.setattr(ops, "hca_compress", slow(ops.hca_compress, 1000))
    loaded = load_model(make_deepseek(tmp_path, kind))
    assert time_decode(loaded, kind, FLOAT32, 300, steps).seconds == pytest.approx(seconds)


def test_the_script_is_sound() -> None:
    script = ROOT / "recipes" / "deepseek_v4.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    help_text = subprocess.run(["bash", script, "--help"], capture_output=True, text=True).stdout
    assert "bash recipes/deepseek_v4.sh" in help_text
