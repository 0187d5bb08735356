"""What ``ascend-kv profile`` says: bandwidth, comparison, JSON, plots, and how it ends."""

from __future__ import annotations

import json
import re
import runpy
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import profile_files as made
import pytest
from full_disk import fill_disk
from profile_files import KERNEL_DETAILS, made_run

from ascend_kv import cli
from ascend_kv.errors import UsageError
from ascend_kv.profile import json_stream, spool, summary
from ascend_kv.profile.command import run_profile
from ascend_kv.profile.report import bandwidth_rows
from ascend_kv.profile.summary import read_profile
from ascend_kv.profile.tasks import Lane, Task
from ascend_kv.profile.traffic import moved_bytes

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "recipes" / "profile.md"
PNG = b"\x89PNG\r\n\x1a\n"
LANE = Lane("made up", "0")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return made.write_table(tmp_path / "now" / "kernel_details.csv", KERNEL_DETAILS, made_run())


def slower(factor: int) -> list[made.Made]:
    """The made-up run with attention that takes longer, everything behind it moved back."""
    tasks = []
    for task in made_run():
        wider = task.kind == "FusedInferAttentionScore"
        duration = task.duration * factor if wider else task.duration
        tasks.append(task._replace(start=task.start * factor, duration=duration))
    return tasks


def test_the_command_prints_what_the_json_holds(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(table.parent), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["tasks_on"] == "device" and content["device"] is None
    assert content["parts_seconds"]["attention"] == pytest.approx(6 * 20.125e-6)
    assert sum(content["parts_seconds"].values()) == pytest.approx(content["span_seconds"])
    assert content["operators"][0]["name"] == "MatMulV2"
    assert content["operators"][0]["longest_seconds"] == pytest.approx(30.002e-6)
    assert [step["name"] for step in content["steps"]] == ["1", "2", "3"]

    assert cli.main(["profile", str(table), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert re.search(r"attention +0\.121 +\d", printed.out)
    assert "host gaps" in printed.out and "Median 0.190 ms" in printed.out
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["steps"] == content["steps"]
    for name in ("parts.png", "steps.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(PNG)
        assert name in printed.err


def test_the_script_is_the_command(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "msprof_report.py"))["main"]
    assert script([str(table), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(table)
    assert script([str(table.parent / "gone")]) == 2


def test_before_and_after(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = made.write_table(tmp_path / "before" / "kernel_details.csv", KERNEL_DETAILS, slower(3))
    assert cli.main(["profile", str(table), "--compare", str(before), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)["comparison"]
    assert content["unit"] == "per step"
    parts = {row["name"]: row for row in content["parts"]}
    assert parts["attention"]["before_seconds"] == pytest.approx(2 * 3 * 20.125e-6)
    assert parts["attention"]["ratio"] == pytest.approx(1 / 3)
    assert parts["matmul"]["ratio"] == pytest.approx(1)
    assert parts["copies"]["ratio"] is None
    together = parts.pop("together")
    assert together["after_seconds"] == pytest.approx(
        sum(row["after_seconds"] for row in parts.values())
    )
    operators = {row["name"]: row for row in content["operators"]}
    assert operators["FusedInferAttentionScore"]["ratio"] == pytest.approx(1 / 3)

    assert cli.main(["profile", str(table), "--compare", str(before)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"attention +0\.121 +0\.040 +-0\.08\d +0\.33", printed)


def test_profiles_without_steps_compare_as_wholes_and_say_so(table: Path, tmp_path: Path) -> None:
    gone = [task._replace(kind="RmsNorm") for task in made_run() if task.kind == "ArgMaxV2"]
    before = made.write_table(tmp_path / "op_summary.csv", made.CANN_8, gone)
    comparison = run_profile(table, before=before).json["comparison"]
    assert comparison["unit"] == "whole profiles" and "same work" in comparison["remark"]
    rows = {row["name"]: row for row in comparison["operators"]}
    assert rows["RmsNorm"]["after_seconds"] == 0 and rows["MatMulV2"]["ratio"] is None


def test_counters_give_the_bandwidth_against_the_device(tmp_path: Path) -> None:
    counters = {
        "aic_read_main_memory_datas(KB)": "30000", "aic_write_main_memory_datas(KB)": "200.5",
        "aiv_read_main_memory_datas(KB)": "N/A",
    }  # fmt: skip
    path = made.write_table(tmp_path / "op_summary.csv", made.CANN_26, made_run(), **counters)
    rows = {row.name: row for row in bandwidth_rows(read_profile(path, "Ascend910B3"))}
    assert set(rows) == {"FusedInferAttentionScore", "kv_cache_store"}  # no matmul
    attention = rows["FusedInferAttentionScore"]
    assert attention.calls == 6 and attention.moved_bytes == 6 * round(1024 * 30200.5)
    assert attention.bytes_per_second == pytest.approx(1024 * 30200.5 / 20.125e-6)
    assert attention.peak_share == pytest.approx(attention.bytes_per_second / 1.6e12)
    assert attention.roofline_seconds == pytest.approx(6 * (20e-6 + 1024 * 30200.5 / 1.6e12))
    for device in (None, "910B4", "cpu"):  # without published rates
        (row, *_) = bandwidth_rows(read_profile(path, device))
        assert row.peak_share is None and row.roofline_seconds is None


def test_the_workload_gives_parts_a_bandwidth_where_shapes_do_not(table: Path) -> None:
    assert bandwidth_rows(read_profile(table)) == []
    note = {"device": "910B1", "bytes_per_step": {"attention": 8_000_000, "no part": 1}}
    (table.parent / "workload.json").write_text(json.dumps(note))
    profile = read_profile(table)
    assert profile.device is not None and profile.device.name == "910B1"
    (row,) = bandwidth_rows(profile)
    assert (row.name, row.source, row.moved_bytes) == ("attention", "workload", 24_000_000)
    assert row.bytes_per_second == pytest.approx(8e6 / (2 * 20.125e-6))
    (table.parent / "workload.json").write_text("[")
    with pytest.raises(UsageError, match=r"workload\.json"):
        read_profile(table)


def task(shapes: str, dtypes: str, lengths: dict[int, str] | None = None, **rest: Any) -> Task:
    """A call as a profile shows it."""
    sizes = tuple(
        tuple(int(n) for n in part.split(",")) if part else () for part in shapes.split(";")
    )
    texts = [(lengths or {}).get(place, "") for place in range(12)]
    return Task(LANE, "", "", "", 0, 1, sizes, tuple(dtypes.split(";")), tuple(texts), **rest)


STORE = "5,2,16;5,2,16;9,2,4,16;9,2,4,16;5;9,2,4;9,2,4;;"
INT8 = "half;half;signed char;signed char;long int;float;float;;"
# Tokens x heads x (key and value): 2 bytes read, 1 written, 4 of scale for the whole head.
TRAFFIC = {
    "store": ("kv_cache_store", task(STORE, INT8), 5 * 2 * 2 * (16 * 2 + 16 + 4)),
    "store, one token a head": (
        "kv_cache_store",
        task(STORE.replace("9,2,4;9,2,4;;", "9,1,4;9,1,4;;"), INT8),
        5 * 2 * (2 * (16 * 2 + 16) + 4),
    ),
    "store, static scales": (
        "kv_cache_store",
        task(STORE.replace("9,2,4;9,2,4;;", "1,2,1,16;1,2,1,16;;"), INT8),
        5 * 2 * 2 * (16 * 2 + 16),
    ),
    "store, bf16": (
        "kv_cache_store",
        task("5,2,16;5,2,16;9,2,4,16;9,2,4,16;5", "c10::BFloat16;" * 4 + "int"),
        5 * 2 * 2 * (16 * 2 + 16 * 2),
    ),
    "attention": (
        "paged_attention",
        task(
            "3,4,16;9,2,4,16;9,2,4,16;3,7;;;;9,2,4;9,2,4",
            "float;int8;int8;int;;;;float;float",
            {5: "[20, 7, 1]"},
        ),
        28 * 2 * 2 * (16 + 4) + 2 * 3 * 4 * 16 * 4,
    ),
    "attention, too many lengths to show": (
        "paged_attention",
        task("3,4,16;9,2,4,16;9,2,4,16;3,7", "float;int8;int8;int", {5: ""}),
        None,
    ),
    "load": (
        "kv_cache_load",
        task("9,2,4,16;9,2,4,16;1,7;;9,2,4;9,2,4", "int8;int8;int;;float;float",
             {3: "[28]", 11: "5"}),
        28 * 2 * 2 * (16 + 4 + 16 * 2),
    ),
    "load, INT4": (
        "kv_cache_load",
        task("9,2,4,8;9,2,4,8;1,7;;9,2,4;9,2,4", "uint8;unsigned char;int;;half;half",
             {3: "[28]", 11: "5"}),
        28 * 2 * 2 * (8 + 2 + 16 * 2),
    ),
    "load, INT4 keys beside FP8 values": (
        "kv_cache_load",
        task("9,2,4,8;9,2,4,16;1,7;;9,2,4;9,2,4", "uint8;c10::Float8_e5m2;int;;half;float",
             {3: "[28]", 11: "5"}),
        28 * 2 * (8 + 2 + 16 + 4 + 2 * 16 * 2),
    ),
    "store, FP8": (
        "kv_cache_store",
        task(STORE, INT8.replace("signed char", "c10::Float8_e4m3fn")),
        5 * 2 * 2 * (16 * 2 + 16 + 4),
    ),
    "load, to a type not shown": (
        "kv_cache_load",
        task("9,2,4,16;9,2,4,16;1,7", "int8;int8;int", {3: "[28]"}),
        None,
    ),
    "compress": ("hca_compress", task("256,32;256,32", "half;half"), 2 * 256 * 32 * 2),
    "another's scatter": (
        "ReshapeAndCache",
        task("5,2,16;5,2,16;9,2,4,16", "DT_BF16;DT_BF16;DT_BF16"),
        2 * 2 * 5 * 2 * 16 * 2,
    ),
    "a type unknown": ("ReshapeAndCache", task("5,2,16;5,2,16", "FP4;FP4"), None),
    "no shapes": ("kv_cache_store", task("", ""), None),
    "cut shapes": ("kv_cache_store", task("5,2,16;5,2,16", "half;half"), None),
    "not of the KV cache": ("MatMulV2", task("5,2;2,5", "half;half"), None),
    "counted": ("MatMulV2", task("", "", counted_bytes=77), 77),
    "counted, none": ("kv_cache_store", task(STORE, INT8, counted_bytes=0), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_that_have_to_move(name: str) -> None:
    operator, call, moved = TRAFFIC[name]
    assert moved_bytes(call, operator) == moved


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all leaves; mappings whose keys depend on the profile end in ``.*``."""
    if path.endswith("parts_seconds") or path == "workload":
        yield f"{path}.*"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from keys_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys_of(value[0], f"{path}[]")
    elif isinstance(value, list):
        yield f"{path}[]"
    else:
        yield path


def test_every_key_of_the_json_is_documented_and_no_other(table: Path, tmp_path: Path) -> None:
    (table.parent / "workload.json").write_text('{"bytes_per_step": {"attention": 1}}')
    content = run_profile(table, before=table).json
    del content["before"]  # the same again
    text = DOCUMENT.read_text()
    documented = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted({*keys_of(content), "before.*"})
    assert f"`{content['schema']}`" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{gone}"], "no such file"),
        (["{table}", "--device", "910C"], "910B3"),
        (["{table}", "--step-operator", "Nothing"], "MatMulV2"),
        (["{table}", "--compare", "{gone}"], "gone"),
    ],
)
def test_mistakes_end_with_code_2(
    arguments: list[str], said: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"table": str(table), "gone": str(table.parent / "gone")}
    assert cli.main(["profile", *(text.format(**places) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and "Traceback" not in printed.err


def test_a_folder_for_results_that_cannot_be_made(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(table), "--output", str(table / "below")]) == 1
    assert "kernel_details.csv" in capsys.readouterr().err


def test_an_older_report_outlives_a_full_disk(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, tmp_path / "profile.json")
    assert cli.main(["profile", str(table), "--output", str(tmp_path)]) == 1
    assert (tmp_path / "profile.json").read_text() == "old"


@pytest.mark.parametrize("kind", ["table", "trace"])
def test_memory_does_not_grow_with_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", 1 << 14)
    monkeypatch.setattr(spool, "_PAGE_RECORDS", 8)
    monkeypatch.setattr(summary, "Spool", lambda: spool.Spool(run_records=256))

    def peak(steps: int) -> int:
        run, path = made_run(steps, 10), tmp_path / f"{kind}{steps}"
        # Names that differ fill caches, which are bounded, but not that small.
        run = [task._replace(name=task.kind) for task in run]
        if kind == "table":
            made.write_table(path, made.CANN_8, run)
            path = path.rename(path.with_suffix(".csv"))
        else:
            made.write_trace(path, made.trace_events(run))
            path = path.rename(path.with_suffix(".json"))
        del run
        tracemalloc.start()
        read_profile(path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(5)  # what is cached once
    small, large = peak(20), peak(120)
    assert large < small + 100_000, (small, large)


def test_operators_beyond_counting_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_MOST_OPERATORS", 3)
    path = made.write_table(tmp_path / "op_summary.csv", made.CANN_8, made_run())
    profile = read_profile(path)
    assert sum(operator.calls for operator in profile.operators) == len(made_run())
    assert any("operators beyond" in remark for remark in profile.remarks)
