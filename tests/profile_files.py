"""Writes profiles in the layouts of several CANN releases. All times are made up.

Headers are those of msprof's documentation of its output files (for 8.x and 26.0), of the tests
in msprof's and torch_npu's own repositories, and of files quoted by users; older releases say
Block Dim where newer ones say Block Num. Nothing here ran on an NPU.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

START = 1_714_123_456_789_012_345  # ns since 1970, past what a float of microseconds can hold


class Made(NamedTuple):
    """A made-up task: nanoseconds since START."""

    name: str
    kind: str
    core: str
    start: int
    duration: int
    step: str = "0"
    device: str = "0"
    shapes: str = "N/A"
    dtypes: str = "N/A"


def made_run(steps: int = 3, layers: int = 2, device: str = "0") -> list[Made]:
    """Decode steps: per layer a store, attention, a matmul and a collective that it half hides."""
    tasks, clock = [], 0
    for step in range(1, steps + 1):
        for layer in range(layers):
            row = (str(step), device)
            tasks += [
                Made("kv_cache_store", "kv_cache_store", "AI_VECTOR_CORE", clock, 2_500, *row),
                Made(
                    "aclnnFusedInferAttentionScoreV4_FusedInferAttentionScore",
                    "FusedInferAttentionScore", "MIX_AIC", clock + 3_000, 20_125, *row,
                    "32,28,1,128;1024,4,128,128;1024,4,128,128;", "DT_BF16;INT8;INT8",
                ),
                Made(
                    "aclnnMatmul_MatMulCommon_MatMulV2", "MatMulV2", "AI_CORE", clock + 24_000,
                    30_001 + layer, *row, "32,3584;3584,3584", "DT_BF16;DT_BF16",
                ),
                Made(
                    f"hcom_allReduce__428_{layer}_{step}", "hcom_allReduce_", "COMMUNICATION",
                    clock + 44_000, 20_000, *row,
                ),
            ]  # fmt: skip
            clock += 70_000
        tasks.append(Made("ArgMaxV2_7", "ArgMaxV2", "AI_CORE", clock, 1_000, str(step), device))
        clock += 50_000
    return tasks


def microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


OLD = (
    "Model Name,Model ID,Task ID,Stream ID,Infer ID,Op Name,OP Type,Task Type,Task Start Time(us),"
    "Task Duration(us),Task Wait Time(us),Block Dim,Input Shapes,Input Data Types,Input Formats,"
    "Output Shapes,Output Data Types,Output Formats,aicore_time(us),total_cycles,vec_ratio"
)
CANN_8 = (
    "Device_id,Model ID,Task ID,Stream ID,Op Name,OP Type,OP State,Task Type,Task Start Time(us),"
    "Task Duration(us),Task Wait Time(us),Block Dim,Mix Block Dim,HF32 Eligible,Input Shapes,"
    "Input Data Types,Input Formats,Output Shapes,Output Data Types,Output Formats,Context ID,"
    "aicore_time(us),aic_total_cycles,aic_mac_time(us),aiv_time(us),aiv_vec_time(us)"
)
CANN_26 = CANN_8.replace("Block Dim", "Block Num").replace(
    "aic_mac_time(us)",
    "aic_read_main_memory_datas(KB),aic_write_main_memory_datas(KB),"
    "aiv_read_main_memory_datas(KB),aiv_write_main_memory_datas(KB)",
)
KERNEL_DETAILS = (
    "Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,"
    "Start Time(us),Duration(us),Wait Time(us),Block Num,Mix Block Num,HF32 Eligible,Input Shapes,"
    "Input Data Types,Input Formats,Output Shapes,Output Data Types,Output Formats,Context ID"
)
KERNEL_DETAILS_LEVEL_0 = (
    "Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim"
)
LAYOUTS = {
    "op_summary of CANN 6": OLD,
    "op_summary of CANN 8": CANN_8,
    "op_summary of CANN 26": CANN_26,
    "kernel_details": KERNEL_DETAILS,
    "kernel_details, level 0": KERNEL_DETAILS_LEVEL_0,
}
# Cells by the name of their column, in all layouts; everything else is N/A.
_CELLS = {
    "Device_id": "device", "Infer ID": "step", "Step Id": "step", "Op Name": "name",
    "Name": "name", "OP Type": "kind", "Type": "kind", "Task Type": "core",
    "Accelerator Core": "core", "Input Shapes": "shapes", "Input Data Types": "dtypes",
}  # fmt: skip


def write_table(path: Path, header: str, tasks: Sequence[Made], **cells: str) -> Path:
    """Write a table of kernels; ``cells`` are further columns' values, the same in all rows.

    Times get msprof's tab behind them, which keeps spreadsheets from rounding.
    """
    columns = header.split(",")
    level_0 = "Step Id" not in columns and "Start Time(us)" in columns
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for task in tasks:
            row = []
            for column in columns:
                field = _CELLS.get(column)
                if column.endswith("Start Time(us)"):
                    value = microseconds(START + task.start) + "\t"
                elif column.endswith("Duration(us)"):
                    value = microseconds(task.duration)
                elif level_0 and field in ("kind", "core"):
                    value = "N/A"  # not collected at task_time l0
                else:
                    value = getattr(task, field) if field else cells.get(column, "N/A")
                row.append(value)
            writer.writerow(row)
    return path


def write_statistic(path: Path, tasks: Sequence[Made], device: bool = True) -> Path:
    """An op_statistic of these tasks."""
    kinds = dict.fromkeys((task.kind, task.core) for task in tasks)
    header = (
        "OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)"
    )
    lines = [f"Device_id,{header}" if device else header]
    for kind, core in kinds:
        times = [task.duration for task in tasks if (task.kind, task.core) == (kind, core)]
        row = f"{kind},{core},{len(times)},{microseconds(sum(times))},1,1,1,1"
        lines.append(f"0,{row}" if device else row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def trace_events(tasks: Sequence[Made], packed: bool = True) -> list[dict[str, Any]]:
    """As msprof's json and torch_npu's trace_view have them: with waits, host parts and metadata.

    Args:
        tasks: made up.
        packed: process numbers say the device, as in newer releases.
    """

    def process(row: int, device: str) -> int:
        return (4321 << 10 | row << 5 | int(device)) if packed else row

    events: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        collective = task.core == "COMMUNICATION"
        arguments: dict[str, Any] = {"connection_id": number, "model id": 1}
        if not collective:
            arguments = {
                "Model Id": 4294967295, "Task Type": task.core, "Physic Stream Id": 2,
                "Task Id": number, "Batch Id": 0, "Subtask Id": 4294967295,
            }  # fmt: skip
        base = {
            "ph": "X",
            "pid": process(14 if collective else 13, task.device),
            "tid": 3 if collective else 2,
        }
        begin = microseconds(START + task.start)
        events.append(
            base | {"name": task.name, "ts": begin, "dur": task.duration / 1000, "args": arguments}
        )
        if collective:  # its parts, which are the same time again
            part = {"notify_id": "7", "task type": "Notify_Wait", "src rank": 0}
            events.append(base | {"name": "hcom_part", "ts": begin, "dur": 1e4, "args": part})
            waiting = {"Task Type": "NOTIFY_WAIT_SQE", "Physic Stream Id": 9}
            events.append(base | {"name": "Notify_Wait", "ts": begin, "dur": 9e4, "args": waiting})
        host = {"ph": "X", "pid": 4321, "tid": 4321, "cat": "cpu_op", "args": {}}
        events.append(host | {"name": "aten::linear", "ts": begin, "dur": 3.5})
    for name, row in (("Ascend Hardware", 13), ("Communication", 14), ("Overlap Analysis", 15)):
        events.append(
            {"ph": "M", "name": "process_name", "pid": process(row, "0"), "tid": 0,
             "args": {"name": name}}
        )  # fmt: skip
    events.append(
        {"ph": "X", "name": "Computing", "pid": process(15, "0"), "tid": 1,
         "ts": microseconds(START), "dur": 1e6}
    )  # fmt: skip
    return events


def write_trace(path: Path, events: Sequence[dict[str, Any]], cut_off: bool = False) -> Path:
    """A bare array, as CANN's tools write it, perhaps without its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(list(events))
    path.write_text(text[:-1] if cut_off else text)
    return path
