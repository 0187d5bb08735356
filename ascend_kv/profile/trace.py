"""Chrome traces: msprof's, torch_npu's trace_view and torch.profiler's.

An NPU's tasks are told by their ``Task Type`` and stream, collectives by their names. Where a
trace has neither, it is one of a CPU, and its operators (``cat: cpu_op``), which lie within one
another, are the tasks. Steps are the slices ``ProfilerStep#N`` that a profiler with a schedule
writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ascend_kv.profile.json_stream import read_events
from ascend_kv.profile.tasks import Lane, Remarks, Shapes, Steps, Task, to_nanoseconds

STEP = "ProfilerStep#"
# Tasks that mark or wait for a place in a stream; nothing is computed or moved.
_IDLE = re.compile(r"WAIT|RECORD|PROFILER_TRACE|PLACE_HOLDER|MODEL_EXECUTE", re.IGNORECASE)
_COLLECTIVE = re.compile(r"hcom_|hccl_?(all|reduce|broadcast|send|recv|batch)", re.IGNORECASE)
# Process numbers of msprof: (host process << 10) | (place of the row << 5) | device.
_DEVICE_BITS = 5
_PACKED = 1 << 15
HOST = "host"
"""The device of a CPU's operators."""


def read_trace(path: Path, source: str, steps: Steps, remarks: Remarks) -> Iterator[Task]:
    """Yield the tasks of a trace, those of a device and the operators of the host alike.

    A trace may put the device's part last, so whoever has read all of it knows whether there was
    one; the operators of the host are then to be left out (``Lane.device`` is ``HOST``).

    Args and errors as ``tables_csv.read_kernels``.
    """
    for event in read_events(path, remarks):
        if event.get("ph") != "X":
            continue
        start, duration = to_nanoseconds(event.get("ts", "")), to_nanoseconds(event.get("dur", ""))
        if start is None or duration is None:
            remarks.add(f"{{n}} events of {path.name} have no time and were left out.")
            continue
        name = str(event.get("name", ""))
        if name.startswith(STEP):
            steps.add(None, name.removeprefix(STEP), start, start + duration)
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, Mapping) else {}
        if "Task Type" in arguments:
            kind = str(arguments["Task Type"])
            if not _IDLE.search(kind) and not _IDLE.search(name):
                yield Task(Lane(source, _device(event)), name, "", kind, start, duration)
        elif _COLLECTIVE.match(name) and "notify_id" not in arguments:
            lane = Lane(source, _device(event))
            yield Task(lane, name, "", "COMMUNICATION", start, duration)
        elif event.get("cat") == "cpu_op":
            yield _operator(Lane(source, HOST), name, start, duration, arguments)


def _operator(
    lane: Lane, name: str, start: int, duration: int, arguments: Mapping[str, Any]
) -> Task:
    """An operator on the host, with the shapes that ``record_shapes`` leaves."""
    dtypes = arguments.get("Input type", ())
    values = arguments.get("Concrete Inputs", ())
    return Task(
        lane,
        name,
        "",
        "",
        start,
        duration,
        _shapes(arguments.get("Input Dims", ())),
        tuple(map(str, dtypes)) if isinstance(dtypes, list) else (),
        tuple(map(str, values)) if isinstance(values, list) else (),
    )


def _shapes(dims: Any) -> Shapes:
    if not isinstance(dims, list):  # torch_npu writes text, for which no reader is needed yet
        return ()
    return tuple(
        tuple(dim) if isinstance(dim, list) and all(isinstance(n, int) for n in dim) else ()
        for dim in dims
    )


def _device(event: Mapping[str, Any]) -> str:
    """The device's number: it is in the process number unless that is a small, older one."""
    pid = event.get("pid")
    if isinstance(pid, int) and pid >= _PACKED:
        return str(pid & ((1 << _DEVICE_BITS) - 1))
    return "0"
