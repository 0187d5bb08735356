"""The machine a figure was measured on: without it the figure means nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import NamedTuple

from ascend_kv import __version__

_UNKNOWN = "unknown"


class Machine(NamedTuple):
    """What a report says about where it was made."""

    device: str
    """``npu`` or ``cpu``: where the model and the cache were."""
    processor: str
    cores: int
    """Processor cores this process may use."""
    threads: int
    """Threads torch computes with."""
    memory_bytes: int | None
    system: str
    versions: dict[str, str]

    @property
    def label(self) -> str:
        """Short enough for a plot's title."""
        if self.device != "cpu":
            return self.device
        return f"{self.processor}, {self.threads} thread{'s' if self.threads != 1 else ''}"


def this_machine(device: str, threads: int) -> Machine:
    """Describe this machine. ``threads`` is torch's count; nothing here imports torch."""
    return Machine(
        device=device,
        processor=_processor(),
        cores=_usable_cores(),
        threads=threads,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        versions=_versions(),
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or _UNKNOWN


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "ascend_kv": __version__}
    for package in ("torch", "torch_npu", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
