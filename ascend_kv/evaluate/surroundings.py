"""What surrounds a run and slows it silently: threads, NUMA nodes, settings, the NPUs' state.

Read from the kernel's files, the environment and ``npu-smi info``; nothing is changed. The table of
``npu-smi info`` has two lines a chip: number, name, health, power; then bus id, use of cores,
memory and HBM in MB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ascend_kv.evaluate.finding import BROKEN, OK, WARNING, Finding

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_HBM_IN_USE = 0.1
"""Of an NPU's memory; more is taken for somebody else's; assumed: an idle chip keeps less."""

_FIRST_LINE = re.compile(r"^\|\s*(\d+)\s+([\w-]*[A-Za-z][\w-]*)\s*\|\s*(\w+)\s*\|", re.MULTILINE)
_SECOND_LINE = re.compile(
    r"^\|\s*\d+\s*\|\s*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|$", re.MULTILINE
)
# Settings that cost speed when they have these values: what for they are meant.
_COSTLY: Mapping[str, tuple[str, str]] = {
    "ASCEND_LAUNCH_BLOCKING": ("1", "every launch waits for its end: for debugging"),
    "ASCEND_GLOBAL_LOG_LEVEL": ("01", "CANN logs everything: for debugging"),
    "ASCEND_SLOG_PRINT_TO_STDOUT": ("1", "CANN's log goes to standard output: for debugging"),
    "TASK_QUEUE_ENABLE": ("0", "the host launches one operator after the other"),
}
_SHOWN = ("ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF", "CPU_AFFINITY_CONF", *_COSTLY)


class Chip(NamedTuple):
    """One chip of ``npu-smi info``; memory in MB."""

    name: str
    health: str
    bus_id: str
    used: int
    total: int


def read_chips(text: str) -> list[Chip]:
    """The chips of ``npu-smi info``; none where its table is another than is known here."""
    firsts, seconds = _FIRST_LINE.findall(text), _SECOND_LINE.findall(text)
    if len(firsts) != len(seconds):
        return []
    return [
        Chip(f"{number} ({name})", health, bus.lower(), int(used), int(total))
        for (number, name, health), (bus, used, total) in zip(firsts, seconds)
    ]


def chip_findings(chips: list[Chip]) -> list[Finding]:
    """Health and memory of the NPUs; nothing where none is known."""
    if not chips:
        return []
    ill = [f"NPU {chip.name}: {chip.health}" for chip in chips if chip.health != "OK"]
    advice = "npu-smi info -t health -i N says what; a reset of the chip or of the machine may help"
    health = (
        Finding("NPU health", BROKEN, ", ".join(ill), advice)
        if ill
        else Finding("NPU health", OK, f"{len(chips)} OK")
    )
    busy = [chip for chip in chips if chip.total and chip.used > _HBM_IN_USE * chip.total]
    told = ", ".join(f"NPU {chip.name}: {chip.used} of {chip.total} MB" for chip in busy)
    memory = (
        Finding("NPU memory", WARNING, f"in use already: {told}", "npu-smi info names processes")
        if busy
        else Finding("NPU memory", OK, f"{chips[0].total} MB each, all but free")
    )
    return [health, memory]


def numa(chips: list[Chip], allowed: set[int]) -> Finding:
    """Whether the process stays within one NUMA node, and within the NPUs' own.

    Args:
        chips: of ``read_chips``.
        allowed: processors that the process may use.
    """
    nodes = {
        int(path.name.removeprefix("node")): _processors(path / "cpulist")
        for path in _NODES.glob("node[0-9]*")
    }
    nodes = {node: processors for node, processors in nodes.items() if processors}
    if len(nodes) < 2:
        return Finding("NUMA", OK, "one node")
    mine = sorted(node for node, processors in nodes.items() if processors & allowed)
    near = sorted(
        {node for chip in chips if (node := _node_of(chip)) is not None and node in nodes}
    )
    value = f"{len(nodes)} nodes; this process may run on {_listed(mine)}"
    if near:
        value += f"; the NPUs are at {_listed(near)}"
    if near and not set(mine) & set(near):
        node = near[0]
        advice = f"numactl --cpunodebind={node} --membind={node} COMMAND"
        return Finding("NUMA", WARNING, f"{value}: each launch crosses over", advice)
    if len(mine) > 1:
        advice = (
            f"numactl --cpunodebind={(near or mine)[0]} --membind={(near or mine)[0]} COMMAND: "
            "a process for each NPU, on the node of its NPU; on a CPU, memory of one node"
        )
        return Finding("NUMA", WARNING, value, advice)
    return Finding("NUMA", OK, value)


def threads(cores: int, computing: int | None) -> Finding:
    """Threads that torch computes with against the processors there are.

    Args:
        cores: that the process may use.
        computing: torch's number; None where it does not load.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    value = f"{computing if computing is not None else 'unknown'} for {cores} cores"
    if given is not None:
        value += f" (OMP_NUM_THREADS={given})"
    if computing is not None and computing > cores:
        advice = f"OMP_NUM_THREADS={cores}: threads beyond the cores wait for one another"
        return Finding("threads", WARNING, value, advice)
    return Finding("threads", OK, value)


def settings() -> Finding:
    """Environment variables of CANN and torch_npu that matter here."""
    there = {name: os.environ[name] for name in _SHOWN if name in os.environ}
    value = ", ".join(f"{name}={given}" for name, given in there.items()) or "none that matter"
    costly = [
        f"{name}: {why}"
        for name, (values, why) in _COSTLY.items()
        if there.get(name, "-") in values
    ]
    if costly:
        return Finding("settings", WARNING, value, f"unset {'; '.join(costly)}")
    return Finding("settings", OK, value)


def _processors(path: Path) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    ranges = [part.split("-") for part in text.split(",") if part]
    return {n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)}


def _node_of(chip: Chip) -> int | None:
    try:
        return int((_PCI / chip.bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None


def _listed(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers)) or 'none'}"
