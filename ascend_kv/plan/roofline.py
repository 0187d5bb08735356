"""What a kernel's counters allow at best on a device, and which of its limits that is.

A launch costs its overhead and then as long as the slowest of these, each at its documented peak
and all overlapping perfectly::

    HBM              sectors of all cores * 32 bytes, and cache lines of scalar reads, / bandwidth
    one core's MTE   the busiest core's bytes read, or written, / what its MTE moves a cycle
    vector           the busiest core's vector repeats, one a cycle
    scalar           the busiest core's instructions: the scalar unit issues at most one a cycle

Not modelled, for want of published figures: the latency of an instruction and of a scalar read of
global memory, bank conflicts, short bursts, and the L2 cache, which may serve what was touched just
before faster than HBM. So a time here is what to compare a measurement with, not one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ascend_kv.devices import DEVICES, Device, Rates
from ascend_kv.errors import UsageError

SECTOR_BYTES = 32
CACHE_LINE_BYTES = 64
REPEAT_BYTES = 256
LIMITS = ("HBM", "one core's MTE", "vector", "scalar")

Counters = Mapping[str, int]
"""Of one core in one launch, by the names that the twin gives them."""


class Prediction(NamedTuple):
    """Of one operator, all its launches together.

    Attributes:
        seconds: predicted.
        bound: what most of it is due to: "launch" or one of ``LIMITS``.
        parts: seconds of the launches' overhead and of each of ``LIMITS``, by name.
        traffic_bytes: moved between global memory and the cores, simulated.
        balance: the busiest core's time over the mean of all the device's cores; 1 is even.
    """

    seconds: float
    bound: str
    parts: dict[str, float]
    traffic_bytes: int
    balance: float


def rates_of(device: Device) -> tuple[Rates, int]:
    """The rates and the number of vector cores of a device.

    Raises:
        UsageError: a device without published figures; lists those that have them.
    """
    if device.rates is None or device.vector_cores is None:
        known = [name for name, other in DEVICES.items() if other.rates is not None]
        raise UsageError("device", device.name, known, "Others have no published figures.")
    return device.rates, device.vector_cores


def floor_seconds(unavoidable_bytes: int, device: Device) -> float:
    """One launch, and the bytes that no kernel can save at HBM's peak."""
    rates, _ = rates_of(device)
    return rates.launch_seconds + unavoidable_bytes / rates.hbm_bytes_per_second


def traffic_bytes(launches: Sequence[Sequence[Counters]]) -> int:
    """Whole sectors, and whole lines of the data cache that scalar reads loaded."""
    return sum(
        SECTOR_BYTES * (core["read_sectors"] + core["write_sectors"])
        + CACHE_LINE_BYTES * core["cache_lines"]
        for cores in launches
        for core in cores
    )


def predict(launches: Sequence[Sequence[Counters]], device: Device) -> Prediction:
    """The best time that the counters allow.

    Args:
        launches: the counters of each core of each launch.
        device: with rates.

    Raises:
        UsageError: as ``rates_of``.
    """
    rates, num_cores = rates_of(device)
    parts = {"launch": rates.launch_seconds * len(launches), **dict.fromkeys(LIMITS, 0.0)}
    seconds, busiest, mean = parts["launch"], 0.0, 0.0
    for cores in launches:
        of_cores = [_core_seconds(core, rates) for core in cores]
        limits = {"HBM": traffic_bytes([cores]) / rates.hbm_bytes_per_second}
        for name in LIMITS[1:]:
            limits[name] = max(times[name] for times in of_cores)
        for name, time in limits.items():
            parts[name] += time
        seconds += max(limits.values())
        busy = [max(times.values()) for times in of_cores]
        busiest += max(busy)
        mean += sum(busy) / num_cores
    largest = max(LIMITS, key=parts.__getitem__)
    bound = "launch" if parts["launch"] > seconds - parts["launch"] else largest
    return Prediction(
        seconds, bound, parts, traffic_bytes(launches), busiest / mean if mean else 1.0
    )


def _core_seconds(core: Counters, rates: Rates) -> dict[str, float]:
    """How long each unit of one core is busy at least."""
    cycle = 1 / rates.frequency_hz
    read = SECTOR_BYTES * core["read_sectors"] / rates.read_bytes_per_cycle
    written = SECTOR_BYTES * core["write_sectors"] / rates.write_bytes_per_cycle
    pipes = ("scalar", "vector", "mte2", "mte3")
    issued = sum(core[f"{pipe}_instructions"] for pipe in pipes) + core["barriers"] + core["events"]
    repeats = core["vector_repeats"] * REPEAT_BYTES / rates.vector_bytes_per_cycle
    return {
        "one core's MTE": max(read, written) * cycle,
        "vector": repeats * cycle,
        "scalar": issued * cycle,
    }
