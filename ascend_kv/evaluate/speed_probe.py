"""How fast the machine is just now, by a fixed piece of work that has nothing to do with the model.

On machines that are shared, or that change their clock, the same step can take half as long again
a minute later. A probe that is timed at calibration, and again and again while something is
measured, tells such a drift from a prediction that is wrong. Its work is what a decode step is
made of, a few rows times matrices that are read from memory, but it knows neither model nor cache
nor scheduler: what it says does not depend on what is predicted.
"""

from __future__ import annotations

import statistics
import time

import torch

from ascend_kv.ops import platform

ROWS = 8
MATRICES = (16, 1536, 1024)
"""So many matrices of so many rows and columns: 101 MB in float32."""
PASSES = 2
"""Times that all are read; together a few hundredths of a second on two cores."""
EVERY_SECONDS = 1.0
"""Time between two probes of something that takes long."""


class SpeedProbe:
    """The work; made once, and run wherever something is measured."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self._device = device
        self._matrices = torch.randn(MATRICES, generator=generator).to(device)
        self._rows = torch.randn((ROWS, MATRICES[-1]), generator=generator).to(device)
        self._run()  # the first time is slower

    def watch(self) -> SpeedWatch:
        """Begin to watch something."""
        return SpeedWatch(self)

    @torch.inference_mode()
    def _run(self) -> None:
        platform.synchronize(self._device)
        for _ in range(PASSES):
            for matrix in self._matrices:
                torch.nn.functional.linear(self._rows, matrix)
        platform.synchronize(self._device)

    def seconds(self) -> float:
        """Do it once, and say how long it took."""
        started = time.perf_counter()
        self._run()
        return time.perf_counter() - started


class SpeedWatch:
    """Probes while one thing is measured.

    Attributes:
        samples: seconds of each probe so far.
    """

    def __init__(self, probe: SpeedProbe) -> None:
        self._probe = probe
        self.samples: list[float] = []
        self._last = -EVERY_SECONDS

    @property
    def total_seconds(self) -> float:
        """What the probes took together, and what was measured did not."""
        return sum(self.samples)

    @property
    def typical_seconds(self) -> float:
        """Of a probe: the median, which single delays do not move."""
        return statistics.median(self.samples)

    def look(self, always: bool = False) -> None:
        """Probe if the last one is long enough ago, or ``always``."""
        if always or time.perf_counter() - self._last >= EVERY_SECONDS:
            self.samples.append(self._probe.seconds())
            self._last = time.perf_counter()
