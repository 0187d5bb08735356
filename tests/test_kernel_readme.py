"""The UB budget in ``op_kernels/README.md``: its figures are the tilings' and the twin's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_harness import SELECT_BYTES, UB_BYTES, needs_compiler, operators, usable_ub

from ascend_kv.evaluate.kernel_workloads import Workload, deepseek_workloads, qwen_workloads
from ascend_kv.evaluate.twin import OPERATORS

README = Path(__file__).resolve().parents[1] / "op_kernels/README.md"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
ROWS = {
    match[2].strip(): (match[1], match[3], int(match[4]), int(match[5]))
    for match in ROW.finditer(README.read_text(encoding="utf-8"))
}
WORKLOADS = {w.name: w for w in (*qwen_workloads(()), *deepseek_workloads(()))}


def test_every_large_workload_has_its_row() -> None:
    assert list(ROWS) and set(ROWS) == set(WORKLOADS)
    assert {operator for operator, *_ in ROWS.values()} == set(OPERATORS)


@needs_compiler
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_ub_budget(workload: Workload) -> None:
    operator, parts, tiling_bytes, twin_bytes = ROWS[workload.name]
    assert operator == workload.operator
    call = workload.build()
    _, run = getattr(operators, operator)(*call.args, **call.kwargs)
    used = max(result.total["ub_high_water"] for result in run.launches)
    assert (run.tiling.ub_bytes, used) == (tiling_bytes, twin_bytes)
    assert tiling_bytes <= usable_ub() and used <= UB_BYTES - SELECT_BYTES
    # The parts that are named are most of it, and not more than all of it.
    named = sum(
        1024 * float(size) * float(count or 1)
        for count, size in re.findall(r"(?:(\d) × )?([\d.]+)", parts)
    )
    assert 0.85 * twin_bytes - SELECT_BYTES <= named <= tiling_bytes, named
