"""Recording what a device does, step by step, for ``ascend-kv profile``.

On an NPU that is torch_npu's profiler, with shapes, and with the counters of memory traffic, since
a kernel's bandwidth is the question; it has run on a stand-in only. On a CPU it is torch's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TRACE = "trace.json"
"""What a CPU's profile is called."""
WARM_UP_STEPS = 1
"""Recorded and thrown away: the first step under a profiler pays for its setting up."""


@contextmanager
def record(library: ModuleType | None, directory: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Profile ``WARM_UP_STEPS`` and ``steps`` more.

    Args:
        library: torch_npu, or None for a CPU.
        directory: gets the profile: torch_npu's folder, or ``TRACE``.
        steps: how many to keep.

    Yields:
        What is to be called at the end of each step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    profiler = _of_cpu(directory, steps) if library is None else _of_npu(library, directory, steps)
    with profiler:
        yield profiler.step


def _of_cpu(directory: Path, steps: int) -> Any:
    # Where its log is not told otherwise, it writes two lines for each recording.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    tool = torch.profiler
    return tool.profile(
        activities=[tool.ProfilerActivity.CPU],
        schedule=tool.schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(directory / TRACE)),
        record_shapes=True,
    )


def _of_npu(library: ModuleType, directory: Path, steps: int) -> Any:
    tool = library.profiler
    return tool.profile(
        activities=[tool.ProfilerActivity.CPU, tool.ProfilerActivity.NPU],
        schedule=tool.schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1),
        on_trace_ready=tool.tensorboard_trace_handler(str(directory)),
        record_shapes=True,
        experimental_config=tool._ExperimentalConfig(
            export_type=tool.ExportType.Text,
            profiler_level=tool.ProfilerLevel.Level1,
            aic_metrics=tool.AiCMetrics.MemoryAccess,
        ),
    )
