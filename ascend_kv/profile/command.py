"""``ascend-kv profile``: read one profile or two, and say what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.profile.compare import compare
from ascend_kv.profile.inputs import WORKLOAD
from ascend_kv.profile.plots import draw_plots
from ascend_kv.profile.report import (
    as_json,
    comparison_tables,
    profile_tables,
    step_table,
)
from ascend_kv.profile.summary import Profile, read_profile
from ascend_kv.text_table import TextTable
from ascend_kv.whole_files import write_whole

EXAMPLES = """\
What it does:
  Reads what msprof, torch_npu.profiler or torch.profiler wrote and says where the time went:
  attention, KV operators, matmul, communication, copies, and the gaps in which the device waited
  for the host. Per KV operator it gives the bandwidth achieved, against the device's documented
  peak where --device names one. Nothing of torch is loaded; files of any size are streamed.

What it reads:
  a folder (PROF_*, *_ascend_pt, ASCEND_PROFILER_OUTPUT, several of them for several ranks), or
  op_summary*.csv, kernel_details.csv   kernels, with shapes where the profiler kept them
  msprof_*.json, trace_view.json        the same as a timeline, without shapes
  a Chrome trace of torch.profiler      operators of a CPU
  op_statistic*.csv                     sums only: no gaps, no steps

Examples:
  ascend-kv profile PROF_000001_20260101
  ascend-kv profile after --compare before --device 910B3
  ascend-kv profile op_summary.csv --step-operator ArgMaxV2 --output runs/profile
  ascend-kv profile runs/one/profile/int8 --json

Make one with ascend-kv bench RECIPE.yaml --profile. Keys of the JSON: recipes/profile.md.
Exit codes: 0 done, 1 something failed, 2 something given was not legal.
"""


class Report(NamedTuple):
    """What the command found; ``files`` is what it wrote."""

    profile: Profile
    tables: list[TextTable]
    json: dict[str, Any]
    files: list[Path]


def run_profile(
    path: Path,
    *,
    before: Path | None = None,
    device: str | None = None,
    step_operator: str | None = None,
    directory: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Read, compare, draw.

    Args:
        path: the profile.
        before: one to compare it with.
        device: whose peaks to compare with; None: what the profile names.
        step_operator: what ends a step, where the profile names no steps.
        directory: gets profile.json and the plots; None: nothing is written.
        say: is told of files that take a while.

    Raises:
        UsageError: a file, device or operator that is not there or not legal.
        OSError: a file cannot be read or written.
    """
    profile = read_profile(path, device, step_operator, say)
    profiles = [(path.name or str(path), profile)]
    content = as_json(profile)
    tables = profile_tables(profile)
    if before is not None:
        earlier = read_profile(before, device, step_operator, say)
        comparison = compare(earlier, profile)
        tables += comparison_tables(comparison)
        content |= {"before": as_json(earlier), "comparison": comparison.as_json()}
        profiles.insert(0, (f"before: {before.name or before}", earlier))
    files = []
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "profile.json", json.dumps(content, indent=1))
        files = [directory / name for name in ("profile.json", *draw_plots(profiles, directory))]
    return Report(profile, tables, content, files)


def report_folders(directory: Path) -> tuple[TextTable, list[Path]]:
    """Report each folder of ``bench --profile`` into itself, and all of them in one table.

    Args:
        directory: holds a folder for each cache format.

    Returns:
        The parts of a decode step by format, and where the reports are.

    Raises:
        UsageError, OSError: as ``run_profile``.
    """
    folders = sorted(file.parent for file in directory.glob(f"*/{WORKLOAD}"))
    reports = [run_profile(folder, directory=folder) for folder in folders]
    profiles = [report.profile for report in reports]
    table = step_table([((x.workload or {})["kv_cache_dtype"], x) for x in profiles])
    return table, [done.files[0] for done in reports]
