"""Which files of what the user names are read, and what else lies beside them.

msprof writes ``PROF_*/mindstudio_profiler_output``, torch_npu a folder ``*_ascend_pt`` with
``ASCEND_PROFILER_OUTPUT`` and msprof's folder in it, torch one trace, ``ascend-kv bench --profile``
a folder for each cache format. Of files that tell of the same tasks that which tells most is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError

KERNELS, TRACE, STATISTIC = "kernels", "trace", "statistic"
WORKLOAD = "workload.json"
"""What ran, written by ``ascend-kv bench --profile``."""

# In order of what they tell: shapes and types, times alone, sums alone.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (KERNELS, r"kernel_details.*\.csv"),
        (KERNELS, r"op_summary.*\.csv"),
        (TRACE, r"trace_view.*\.json(\.gz)?"),
        (TRACE, r"msprof_.*\.json"),
        (TRACE, r".*trace.*\.json(\.gz)?"),
        (STATISTIC, r"op_statistic.*\.csv"),
    )
)
_TORCH = 4
_IGNORED = re.compile(r".*step_trace.*")
_LEGAL = (
    "a folder of msprof, torch_npu or torch, or one of their files: op_summary*.csv, "
    "kernel_details.csv, op_statistic*.csv, msprof_*.json, trace_view.json, a Chrome trace"
)
_OUTPUT_FOLDERS = ("ASCEND_PROFILER_OUTPUT", "mindstudio_profiler_output")


class Input(NamedTuple):
    """Files that are read together: slices of one table, or one trace.

    Attributes:
        kind: KERNELS, TRACE or STATISTIC.
        source: what its lanes are called by where there are several sources.
        files: in order.
    """

    kind: str
    source: str
    files: tuple[Path, ...]


def find_inputs(path: Path) -> list[Input]:
    """What to read for a file or a folder: one input a profiled process.

    Raises:
        UsageError: nothing there that can be read.
    """
    if path.is_file():
        known = _kind(path.name)
        kind = KERNELS if path.suffix == ".csv" else TRACE
        return [Input(kind if known is None else _KINDS[known][0], path.name, (path,))]
    if not path.is_dir():
        raise UsageError("profile", str(path), _LEGAL, "There is no such file or folder.")
    found: dict[Path, list[tuple[int, Path]]] = {}
    for file in sorted(path.rglob("*")):
        rank = _kind(file.name)
        if rank is not None and file.is_file():
            found.setdefault(_process_folder(file, path), []).append((rank, file))
    if not found:
        raise UsageError("profile", str(path), _LEGAL, "Nothing below this folder is one of them.")
    return [
        given
        for folder, files in found.items()
        for given in _of_process(
            folder.relative_to(path).as_posix() if folder != path else path.name, files
        )
    ]


def _of_process(source: str, files: list[tuple[int, Path]]) -> list[Input]:
    """Large tables and traces come in slices, which are read together; torch's are one each."""
    best = min(rank for rank, _ in files)
    names = {file.name for _, file in files}
    chosen = [
        file
        for rank, file in files
        if rank == best and not (file.suffix == ".gz" and file.stem in names)
    ]
    if best == _TORCH and len(chosen) > 1:
        return [Input(TRACE, f"{source}/{file.name}", (file,)) for file in chosen]
    return [Input(_KINDS[best][0], source, tuple(chosen))]


def read_workload(path: Path) -> Mapping[str, Any] | None:
    """What ``--profile`` wrote beside the profile; None where there is none.

    Raises:
        UsageError: there is one that cannot be read.
    """
    file = (path if path.is_dir() else path.parent) / WORKLOAD
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(WORKLOAD, str(file), "JSON as --profile writes it", f"{error}.") from None
    if not isinstance(content, dict):
        raise UsageError(WORKLOAD, str(file), "JSON as --profile writes it")
    return content


def _kind(name: str) -> int | None:
    """The place in ``_KINDS``."""
    if _IGNORED.fullmatch(name):
        return None
    return next((rank for rank, (_, known) in enumerate(_KINDS) if known.fullmatch(name)), None)


def _process_folder(file: Path, top: Path) -> Path:
    """The folder of one profiled process: torch_npu's lies around msprof's."""
    for folder in file.parents:
        if folder.name.endswith("_ascend_pt"):
            return folder
        if folder == top:
            break
    for folder in file.parents:
        if folder == top:
            break
        if folder.name.startswith("PROF_") or folder.name in _OUTPUT_FOLDERS:
            return folder if folder.name.startswith("PROF_") else folder.parent
    return file.parent
