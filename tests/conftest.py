"""What all tests share: the same seeds, no more threads than help, and reasons to skip."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

# Small tensors gain nothing from threads, and tests may run side by side.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run; look only if a test asks.

    What takes minutes comes first, so that no core waits for it at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    asked_for = config.getoption("markexpr")
    for mark, find_reason in (("npu", _no_npu), ("network", _no_network), ("slow", _no_time)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = find_reason() if marked and mark not in asked_for else None
        for item in marked:
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_npu() -> str | None:
    from ascend_kv.ops.platform import find_device

    return None if find_device() == "npu" else "no Ascend NPU with CANN and torch_npu here"


def _no_time() -> str | None:
    return None if os.environ.get("CI") else "takes minutes; run it with -m slow, or with CI set"


def _no_network() -> str | None:
    """In CI the package index is expected, so there such tests run, and fail without it."""
    if os.environ.get("CI"):
        return None
    probe = [sys.executable, "-m", "pip", "index", "versions", "--retries", "0", "--timeout", "10"]
    done = subprocess.run([*probe, "iniconfig"], capture_output=True)
    return "the package index cannot be reached" if done.returncode else None
