"""Threads, NUMA nodes, settings and NPUs, on machines made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_kv.evaluate import surroundings
from ascend_kv.evaluate.finding import BROKEN, OK, WARNING
from ascend_kv.evaluate.surroundings import (
    Chip,
    chip_findings,
    numa,
    read_chips,
    settings,
    threads,
)

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 90.1        38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3375 / 65536         |
+===========================+===============+====================================================+
| 7     910B3               | Alarm         | 92.0        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          40000/ 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 7       0                 | 4711          | python                   | 36000                   |
+===========================+===============+====================================================+
"""
CHIPS = [
    Chip("0 (910B3)", "OK", "0000:c1:00.0", 3375, 65536),
    Chip("7 (910B3)", "Alarm", "0000:01:00.0", 40000, 65536),
]


def test_the_table_of_npu_smi() -> None:
    assert read_chips(NPU_SMI) == CHIPS
    assert read_chips("") == [] and read_chips(NPU_SMI.replace("40000/ 65536", "?")) == []


def test_the_state_of_the_chips() -> None:
    health, memory = chip_findings(CHIPS)
    assert health.state == BROKEN and health.value == "NPU 7 (910B3): Alarm"
    assert memory.state == WARNING and "40000 of 65536" in memory.value
    assert "NPU 0" not in memory.value
    assert [found.state for found in chip_findings(CHIPS[:1])] == [OK, OK]
    assert chip_findings([]) == []


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tmp_path / "node"
    for node, processors in ((0, "0-3,8"), (1, "4-7"), (2, "")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{processors}\n")
    for bus, node in (("0000:c1:00.0", 1), ("0000:01:00.0", -1)):
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(surroundings, "_NODES", nodes)
    monkeypatch.setattr(surroundings, "_PCI", tmp_path / "pci")


def test_numa(two_nodes: None) -> None:
    assert numa([], {0, 8}).state == OK
    spread = numa([], {3, 4})
    assert spread.state == WARNING and "nodes 0, 1" in spread.value
    assert "--cpunodebind=0" in spread.advice
    far = numa(CHIPS, {0, 1})
    assert far.state == WARNING and "crosses over" in far.value
    assert "--cpunodebind=1 --membind=1" in far.advice
    near = numa(CHIPS, {4, 5})
    assert near.state == OK and "the NPUs are at node 1" in near.value
    assert numa(CHIPS[1:], {4}).state == OK  # where that one is, the machine does not say
    assert numa(CHIPS, {3, 4}).state == WARNING


def test_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_NODES", tmp_path)
    assert numa(CHIPS, {0}).value == "one node"


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(4, 4) == ("threads", OK, "4 for 4 cores", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    many = threads(4, 8)
    assert many.state == WARNING and "OMP_NUM_THREADS=8" in many.value and "=4" in many.advice
    assert threads(4, None).state == OK


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in surroundings._SHOWN:
        monkeypatch.delenv(name, raising=False)
    assert settings() == ("settings", OK, "none that matter", "")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    assert settings().state == OK and "ASCEND_RT_VISIBLE_DEVICES=0,1" in settings().value
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    assert settings().state == WARNING and "unset ASCEND_LAUNCH_BLOCKING" in settings().advice
