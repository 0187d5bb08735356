"""The twin of the Ascend C headers: every rule has a kernel that breaks it and a near-miss.

The kernels lie in op_kernels/twin/tests/faults_*.cpp. A line marked ``// BREAKS rule`` is where the
twin must stop, with that rule; the kernel of the same name marked CLEAN must run through.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

TWIN = Path(__file__).resolve().parents[1] / "op_kernels" / "twin"
sys.path.insert(0, str(TWIN))

import launch as twin  # noqa: E402

pytestmark = pytest.mark.skipif(
    twin.find_compiler() is None, reason="no C++ compiler for the twin (g++ or clang++)"
)

FAULTS = sorted((TWIN / "tests").glob("faults_*.cpp"))
KERNEL = re.compile(r"^(FAULT|CLEAN)\((\w+)\)")
BREAKS = re.compile(r"BREAKS ([\w-]+)")
SEEDS = range(6)  # each of three cores is first and last in some of them
CORES = re.compile(r"Run on (\d+) cores")  # said at the top of a file; else one


class Fault(NamedTuple):
    source: Path
    name: str
    rule: str
    line: int
    exact: bool  # the mark stands on a statement, not on a comment of its own


def read_faults(source: Path) -> tuple[list[Fault], list[str]]:
    """The faults of a file and the names of its clean kernels."""
    faults, clean, current = [], [], ""
    for number, line in enumerate(source.read_text().splitlines(), 1):
        found = KERNEL.match(line)
        if found:
            current = found[2]
            if found[1] == "CLEAN":
                clean.append(current)
        marked = BREAKS.search(line)
        if marked:
            exact = not line.strip().startswith("//")
            faults.append(Fault(source, current, marked[1], number, exact))
    return faults, clean


ALL = {source: read_faults(source) for source in FAULTS}
ALL_FAULTS = [fault for faults, _ in ALL.values() for fault in faults]


@functools.cache
def library(source: Path) -> twin.Library:
    found = re.findall(r"^(FAULT|CLEAN)\((\w+)\)", source.read_text(), re.M)
    return twin.build(source, kernels=[f"{kind.lower()}_{name}" for kind, name in found])


def run(source: Path, kernel: str, seed: int) -> twin.Result:
    x, y = np.ones(16384, np.float32), np.zeros(16384, np.float32)
    cores = CORES.search(source.read_text())
    return library(source).launch(
        kernel, int(cores[1]) if cores else 1, twin.inp(x), twin.out(y), seed=seed
    )


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda f: f"{f.name}-{f.rule}")
def test_fault_is_caught(fault: Fault) -> None:
    for seed in SEEDS:
        with pytest.raises(twin.Violation) as caught:
            run(fault.source, f"fault_{fault.name}", seed)
        assert caught.value.rule == fault.rule, str(caught.value)
        assert Path(caught.value.file).name == fault.source.name
        if fault.exact:
            assert caught.value.line == fault.line, str(caught.value)


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda f: f"{f.name}-{f.rule}")
def test_near_miss_passes(fault: Fault) -> None:
    for seed in SEEDS:
        run(fault.source, f"clean_{fault.name}", seed)


def test_every_fault_has_its_near_miss() -> None:
    for faults, clean in ALL.values():
        assert sorted(fault.name for fault in faults) == sorted(clean)


def test_every_rule_is_broken_by_a_fault() -> None:
    text = "".join(path.read_text() for path in [*TWIN.glob("*.cpp"), *TWIN.glob("*.h")])
    rules = set(re.findall(r'Violate\(\s*"([\w-]+)"', text)) | set(
        re.findall(r'"rule\\": \\"([\w-]+)', text)
    )
    rules |= set(re.findall(r'Race\(now,\s*"([\w-]+)"', text))
    conditional = set(re.findall(r'\? "([a-z]+-[a-z-]+)" : "([a-z]+-[a-z-]+)"', text))
    rules |= {rule for pair in conditional for rule in pair}
    assert len(rules) > 30
    assert rules == {fault.rule for fault in ALL_FAULTS}


def test_readme_lists_the_rules() -> None:
    text = (TWIN / "README.md").read_text().split("## Rules")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w-]+)` \|", text, re.M)
    assert sorted(listed) == sorted({fault.rule for fault in ALL_FAULTS})
