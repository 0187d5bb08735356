"""Profiles of several layouts, read: the same made-up run gives the same attribution in each."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import profile_files as made
import pytest
from profile_files import KERNEL_DETAILS, LAYOUTS, made_run

from ascend_kv.errors import UsageError
from ascend_kv.profile import json_stream
from ascend_kv.profile.attribution import PARTS, attribute
from ascend_kv.profile.categories import CATEGORIES, category_of, label_of
from ascend_kv.profile.json_stream import read_events
from ascend_kv.profile.spool import Spool
from ascend_kv.profile.summary import read_profile
from ascend_kv.profile.tables_csv import parse_shapes
from ascend_kv.profile.tasks import Remarks, to_nanoseconds

# Of profile_files.made_run, by hand, for 3 steps of 2 layers.
EXPECTED = {
    "attention": 6 * 20_125,
    "KV operators": 6 * 2_500,
    "matmul": 3 * (30_001 + 30_002),
    "other operators": 3 * 1_000,
    "communication": 3 * (9_999 + 9_998),
    "copies": 0,
    "host gaps": 6 * (500 + 875 + 6_000) + 2 * 49_000,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_attribution(layout: str, tmp_path: Path) -> None:
    tasks = made_run()
    random.Random(0).shuffle(tasks)
    profile = read_profile(made.write_table(tmp_path / "op_summary_1.csv", LAYOUTS[layout], tasks))
    (lane,) = profile.lanes
    assert lane.parts_ns == EXPECTED
    assert lane.span_ns == sum(EXPECTED.values()) and lane.longest_gap_ns == 49_000
    calls = {operator.name.rstrip("_"): operator.calls for operator in profile.operators}
    assert calls == {
        "kv_cache_store": 6,
        "FusedInferAttentionScore": 6,
        "MatMulV2": 6,
        "hcom_allReduce": 6,
        "ArgMaxV2": 3,
    }
    assert not profile.on_host
    named = "Step Id" in LAYOUTS[layout] or "Infer ID" in LAYOUTS[layout]
    assert [step.name for step in profile.steps] == (["1", "2", "3"] if named else [])


@pytest.mark.parametrize("packed", [True, False], ids=["newer", "older"])
@pytest.mark.parametrize("cut_off", [True, False], ids=["cut off", "whole"])
def test_traces_give_it_too(packed: bool, cut_off: bool, tmp_path: Path) -> None:
    events = made.trace_events(made_run(), packed)
    profile = read_profile(made.write_trace(tmp_path / "trace_view.json", events, cut_off))
    (lane,) = profile.lanes
    assert lane.parts_ns == EXPECTED and lane.lane.device == "0"
    assert "aten::linear" not in {operator.name for operator in profile.operators}
    assert any("breaks off" in remark for remark in profile.remarks) == cut_off


def test_steps_of_a_trace(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "cpu_op", "pid": 4321, "tid": 1, "args": {}}
    marks = [
        step | {"name": f"ProfilerStep#{number}", "ts": made.microseconds(made.START + start),
                "dur": 190.0}
        for number, start in ((5, 0), (6, 190_000))
    ]  # fmt: skip
    events = [*made.trace_events(made_run()), *marks]
    profile = read_profile(made.write_trace(tmp_path / "msprof_1.json", events))
    assert [(step.name, step.start_ns, step.span_ns) for step in profile.steps] == [
        ("5", 0, 190_000),
        ("6", 190_000, 190_000),
    ]
    first = profile.steps[0].parts_ns
    assert first["attention"] == 2 * 20_125 and first["other operators"] == 1_000
    assert sum(first.values()) == 190_000


@pytest.mark.parametrize("device", [True, False])
def test_sums_alone(device: bool, tmp_path: Path) -> None:
    path = made.write_statistic(tmp_path / "op_statistic_1.csv", made_run(), device)
    profile = read_profile(path)
    assert not profile.has_gaps and "host gaps" not in profile.lanes[0].parts_ns
    whole = {**EXPECTED, "communication": 6 * 20_000}
    del whole["host gaps"]
    assert profile.lanes[0].parts_ns == whole
    assert any("sums only" in remark for remark in profile.remarks)


def test_devices_are_kept_apart(tmp_path: Path) -> None:
    tasks = [*made_run(), *made_run(device="5")]
    table = made.write_table(tmp_path / "kernel_details.csv", KERNEL_DETAILS, tasks)
    trace = made.write_trace(tmp_path / "other" / "msprof_1.json", made.trace_events(tasks))
    for path in (table, trace):
        profile = read_profile(path)
        assert sorted(lane.lane.device for lane in profile.lanes) == ["0", "5"]
        assert all(lane.parts_ns == EXPECTED for lane in profile.lanes)
        assert profile.part_ns("attention") == EXPECTED["attention"]


def test_a_table_without_times(tmp_path: Path) -> None:
    header = "OP Type,Task Duration(us)"
    profile = read_profile(made.write_table(tmp_path / "op_summary.csv", header, made_run()))
    assert not profile.has_gaps and profile.lanes[0].parts_ns["matmul"] == EXPECTED["matmul"]
    assert any("no host gaps" in remark for remark in profile.remarks)


def test_rows_without_a_time_are_counted(tmp_path: Path) -> None:
    path = made.write_table(tmp_path / "op_summary.csv", made.CANN_8, made_run())
    lines = ("\ufeff" + path.read_text().replace("Block Dim", " block dim")).splitlines()
    broken = lines[1].replace("2.500", "N/A"), lines[2].replace("\t", "").replace("1714", "x")
    path.write_text("\n".join([*lines, *broken, "", "short"]) + "\n")
    profile = read_profile(path)
    assert profile.lanes[0].parts_ns == EXPECTED
    assert "1 rows of op_summary.csv have no duration and were left out." in profile.remarks
    assert "1 rows of op_summary.csv break off and were left out." in profile.remarks
    assert "1 rows of op_summary.csv have no start and were left out." in profile.remarks


REFUSED: dict[str, tuple[str, str]] = {
    "an empty table": ("op_summary.csv", "got"),
    "no durations": ("op_summary.csv", "Op Name,Task Start Time(us)\na,1\n"),
    "no names": ("op_summary.csv", "Task Start Time(us),Task Duration(us)\n1,2\n"),
    "no rows": ("op_summary.csv", made.CANN_8 + "\n"),
    "no sums": ("op_statistic.csv", "OP Type,Count\nMatMul,1\n"),
    "not a trace": ("trace_view.json", '"text"'),
    "an empty trace": ("trace_view.json", "[]"),
    "nothing": ("trace_view.json", ""),
    "an object without events": ("trace_view.json", '{"a": [1, 2], "b": {}}'),
    "broken off in an object": ("trace_view.json", '{"traceEvents": [], "a"'),
    "broken within": ("trace_view.json", '[{"ph": "X"}, {"ph" "X"}, ' + 99 * '{"a": 1},' + "]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_profile_is_refused(name: str, tmp_path: Path) -> None:
    file, text = REFUSED[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(UsageError) as refused:
        read_profile(tmp_path / file)
    assert refused.value.field == "profile" and file in str(refused.value.given)


def test_a_folder_without_a_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_trace_time.csv").touch()
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match=r"op_summary\*\.csv"):
            read_profile(path)


def test_the_folder_of_torch_npu_is_read_once_with_its_steps(tmp_path: Path) -> None:
    """It holds the same kernels four times: as a table, a trace, sums, and in msprof's folder."""
    run, rank = made_run(), tmp_path / "host_1_ascend_pt"
    output, msprof = rank / "ASCEND_PROFILER_OUTPUT", rank / "PROF_1" / "mindstudio_profiler_output"
    made.write_table(output / "kernel_details.csv", KERNEL_DETAILS, run)
    made.write_trace(output / "trace_view.json", made.trace_events(run))
    made.write_statistic(output / "op_statistic.csv", run)
    made.write_table(msprof / "op_summary_20260101.csv", made.CANN_8, run)
    made.write_table(
        tmp_path / "host_2_ascend_pt" / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv",
        KERNEL_DETAILS,
        run,
    )
    profile = read_profile(tmp_path)
    assert sorted(lane.lane.source for lane in profile.lanes) == [
        "host_1_ascend_pt",
        "host_2_ascend_pt",
    ]
    assert all(lane.parts_ns == EXPECTED for lane in profile.lanes)
    assert len(profile.steps) == 3
    for folder in (rank, output, msprof, msprof.parent):
        assert read_profile(folder).lanes[0].parts_ns == EXPECTED


def test_slices_of_a_table_are_read_together(tmp_path: Path) -> None:
    run = made_run()
    for number, part in enumerate((run[7:], run[:7])):
        made.write_table(tmp_path / f"op_summary_slice_{number}_2026.csv", made.CANN_8, part)
    assert read_profile(tmp_path).lanes[0].parts_ns == EXPECTED


def test_a_compressed_trace_beside_itself(tmp_path: Path) -> None:
    path = made.write_trace(tmp_path / "trace_view.json", made.trace_events(made_run()))
    with gzip.open(tmp_path / "trace_view.json.gz", "wt") as file:
        file.write(path.read_text())
    assert read_profile(tmp_path).lanes[0].parts_ns == EXPECTED
    path.unlink()
    assert read_profile(tmp_path).lanes[0].parts_ns == EXPECTED


def test_a_step_operator_cuts_steps(tmp_path: Path) -> None:
    path = made.write_table(tmp_path / "op_summary.csv", made.CANN_8, made_run())
    profile = read_profile(path, step_operator="ArgMaxV2")
    assert [step.span_ns for step in profile.steps] == [141_000, 190_000, 190_000]
    with pytest.raises(UsageError, match="MatMulV2") as refused:
        read_profile(path, step_operator="ArgMin")
    assert refused.value.field == "--step-operator"


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_in_pieces(
    chunk: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the window cuts the text, every event comes out as it was."""
    events: list[dict[str, Any]] = [
        {"name": 'a "quoted" ] } , {', "n": number, "deep": [[1, 2], {"x": None}], "u": "é\n"}
        for number in range(5)
    ]
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    before = {"schemaVersion": 12, "list": [1, [2]], "text": "traceEvents", "empty": []}
    for content in (events, {**before, "traceEvents": events, "after": [{"no": "event"}]}):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(content, indent=indent))
        assert list(read_events(path, Remarks())) == events


@pytest.mark.parametrize("left_away", [1, 2, 5, 30])
def test_a_trace_that_breaks_off_gives_what_is_whole(left_away: int, tmp_path: Path) -> None:
    events = [{"name": f"event {number}", "dur": "12.5"} for number in range(4)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events)[:-left_away])
    remarks = Remarks()
    assert list(read_events(path, remarks)) == events[: 4 if left_away == 1 else 3]
    assert len(remarks.lines()) == 1


def test_times_are_exact() -> None:
    assert to_nanoseconds("1714123456789012.345\t") == 1_714_123_456_789_012_345
    assert to_nanoseconds(12) == 12_000 and to_nanoseconds("0.5") == 500
    assert to_nanoseconds("3.1415") == 3_141 and to_nanoseconds(" -1.5") == -1_500
    assert to_nanoseconds("1.5E+3") == 1_500_000
    assert [to_nanoseconds(text) for text in ("N/A", "", "nan", "inf", "x.5")] == [None] * 5
    longest = 2**63 // 1000
    assert to_nanoseconds(str(longest)) == longest * 1000
    beyond = (str(longest + 1), "9" * 5000, 1e308, "1e999999999", "-1e99")
    assert [to_nanoseconds(text) for text in beyond] == [None] * 5


def test_shapes_of_a_table() -> None:
    assert parse_shapes('"32,28,1,128;1024,4,128,128;;"') == ((32, 28, 1, 128), (1024, 4, 128, 128), (), ())  # fmt: skip  # noqa: E501
    assert parse_shapes("") == () and parse_shapes("[2,3]; x") == ((2, 3), ())


CATEGORY_OF = {
    "attention": [
        "FusedInferAttentionScore", "IncreFlashAttention", "PromptFlashAttention",
        "PagedAttentionMaskOperation", "aten::scaled_dot_product_attention", "merge_attention",
        "ascend_kv::paged_attention", "SparseFlashMla", "LightningIndexer", "select_topk",
    ],
    "KV operators": [
        "ascend_kv::kv_cache_store", "kv_cache_quantize_reduce", "ReshapeAndCache",
        "ReshapeAndCacheNdKernel", "ScatterPaKvCache", "GatherPaKvCache", "KvRmsNormRopeCache",
        "hca_compress_pool", "Compressor", "QuantUpdateScatter",
    ],
    "matmul": [
        "MatMulV2", "aclnnMatmul", "GroupedMatmul", "QuantBatchMatmulV3", "aten::mm", "aten::bmm",
        "aten::linear", "aten::addmm", "BatchMatMulV2", "aten::_int_mm", "MatmulAllReduce",
    ],
    "communication": [
        "hcom_allReduce__1_2_3", "hcclAllGather", "c10d::allreduce_", "AllGatherAicpu",
    ],
    "copies": ["MEMCPY_ASYNC", "TensorMove"],
    "other operators": [
        "RmsNorm", "aten::add", "SwiGlu", "ArgMaxV2", "aten::index", "Cast", "aten::embedding",
        "RotaryMul", "aten::mul", "Linspace",
    ],
}  # fmt: skip


@pytest.mark.parametrize("category", CATEGORY_OF)
def test_categories(category: str) -> None:
    assert {name: category_of(name, "", "") for name in CATEGORY_OF[category]} == dict.fromkeys(
        CATEGORY_OF[category], category
    )


def test_the_core_tells_collectives_and_copies() -> None:
    assert category_of("x", "MatMulV2", "COMMUNICATION") == "communication"
    assert category_of("x", "MatMulV2", "HCCL_AI_CPU") == "communication"
    assert category_of("x", "", "SDMA_SQE") == "copies"
    assert category_of("layer_3/MatMul_2", "Add", "AI_CORE") == "matmul"  # the name helps


def test_labels() -> None:
    assert label_of("aclnnMatmul_MatMulCommon_MatMulV2", "") == "MatMulV2"
    assert label_of("aclnnMatmul_MatMulCommon_MatMulV2", "MatMulV3") == "MatMulV3"
    assert label_of("hcom_allReduce__428_0_1", "hcom_allReduce_") == "hcom_allReduce"
    assert label_of("ascend_kv::kv_cache_store", "") == "kv_cache_store"
    assert label_of("_1", "") == "_1"


def brute_force(tasks: list[tuple[int, int, int]], categories: list[int]) -> list[int]:
    """Nanosecond by nanosecond."""
    parts = [0] * len(PARTS)
    for moment in range(tasks[0][0], max(end for _, end, _ in tasks)):
        running = [
            (categories[operator], number)
            for number, (start, end, operator) in enumerate(tasks)
            if start <= moment < end
        ]
        parts[min(running)[0] if running else -1] += 1
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_attribution_against_counting_every_nanosecond(seed: int) -> None:
    draw = random.Random(seed)
    categories = [draw.randrange(len(CATEGORIES)) for _ in range(7)]
    tasks = sorted(
        (start := draw.randrange(400), start + draw.choice((0, 1, 5, 40, 150)), draw.randrange(7))
        for _ in range(draw.choice((1, 3, 40)))
    )
    steps = [(10, 100, "a"), (100, 101, "b"), (150, 700, "c")]
    done = attribute(tasks, categories, steps)
    assert done.parts_ns == brute_force(tasks, categories)
    assert sum(done.operators_ns.values()) == sum(done.parts_ns[:-1])
    for step in done.steps:
        inside = max(0, min(step.end_ns, done.end_ns) - max(step.start_ns, done.start_ns))
        assert sum(step.parts_ns) == inside


def test_an_operator_gets_what_it_calls() -> None:
    matmul, other = CATEGORIES.index("matmul"), CATEGORIES.index("other operators")
    tasks = [(0, 100, 0), (0, 90, 1), (10, 80, 1), (20, 30, 2)]
    done = attribute(tasks, [matmul, matmul, other])
    assert done.operators_ns == {0: 100}


@pytest.mark.parametrize("records", [0, 1, 3, 4, 5, 23])
def test_the_spool_sorts_what_does_not_fit(records: int) -> None:
    draw = random.Random(records)
    given = [
        (draw.randrange(3), draw.randrange(2**62), -draw.randrange(2**62), draw.randrange(9))
        for _ in range(records)
    ]
    spool = Spool(run_records=4)
    for record in given:
        spool.add(record)
    assert len(spool.runs) == records // 4
    assert list(spool.sorted()) == sorted(given)


def test_a_table_that_breaks_off_loses_the_broken_row_only(tmp_path: Path) -> None:
    header = "Op Name,Op Type,Task Duration(us),Task Start Time(us),Input Shapes\n"
    rows = ["a,MatMulV2,100.0,1000.0,\n", "b,MatMulV2,200.0,2000.0,\n"]
    whole, cut = tmp_path / "op_summary_1.csv", tmp_path / "op_summary_2.csv"
    whole.write_text(header + "".join(rows))
    cut.write_text(header + rows[0] + "b,MatMulV2,2")
    assert not any("break off" in remark for remark in read_profile(whole).remarks)
    profile = read_profile(cut)
    assert profile.lanes[0].parts_ns["matmul"] == 100_000
    assert sum(profile.lanes[0].parts_ns.values()) == 100_000
    assert any("1 rows" in remark and "break off" in remark for remark in profile.remarks)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"[" + b" " * 999)[:20], b"plain text", b""],
    ids=["cut off", "no archive", "empty"],
)
def test_a_broken_archive_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace_view.json.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_profile(file)
    assert str(file) in str(refused.value)
