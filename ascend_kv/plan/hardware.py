"""What a plan has to know of a card beyond ``devices``: usable memory, matrix rate, links.

Every figure with its source. Cards that only published measurements ran on (``A3-die``) are here
too, so that these measurements can be held against a roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ascend_kv.devices import DEVICES, Device, get_device

_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One card, or one die of a card with two, as PyTorch sees them.

    Attributes:
        name: of the card.
        memory_bytes: what is soldered on.
        usable_bytes: what PyTorch can have of it.
        hbm_bytes_per_second: memory bandwidth; None where none is published.
        cube_flops: matrix multiplication in 16 bit, dense; INT8 is twice as fast.
        vector_bytes_per_second: all vector cores together.
        host_bytes_per_second: from and to the host's memory.
        link_bytes_per_second: from and to another card of the same host, each way.
        sources: attribute name -> where its figure was read.
    """

    name: str
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    hbm_bytes_per_second: float | None = None
    cube_flops: float | None = None
    vector_bytes_per_second: float | None = None
    host_bytes_per_second: float = 31.5e9
    link_bytes_per_second: float = 56e9
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)


_CUBE_CYCLE = 2 * 16 * 16 * 16
"""Floating-point operations of one cube core in a cycle: one 16 x 16 x 16 product."""

_SHARED_SOURCES = {
    "cube_flops": "24 or 20 cube cores x 16 x 16 x 16 products a cycle x the chip's frequency: "
    "Ascend C guide, SIMD overview, and CANN runtime, platform_config",
    "vector_bytes_per_second": "vector cores x 256 bytes a cycle x frequency, as in devices",
    "host_bytes_per_second": "PCIe 4.0 x16: 16 GT/s x 16 lanes x 128/130 (PCI-SIG); not measured",
    "link_bytes_per_second": "assumed: 56 GB/s over HCCS on A2, which a working note in "
    "cann-recipes-infer has without a source (.agents/skills/model-infer-parallel-analysis)",
}
_SEEN_64 = (
    "60.96 GiB: what PyTorch calls the total capacity of a 64 GiB card in vllm-ascend issues 1127 "
    "(910B2) and 1987; 61.27 GiB in pull request 8289"
)
_SEEN_32 = "assumed: what a 64 GiB card keeps for itself (3.04 GiB), kept by a 32 GiB card too"


def _of_910b(device: Device) -> Hardware:
    assert device.memory_bytes is not None and device.cube_cores is not None
    rates = device.rates
    return Hardware(
        name=device.name,
        memory_bytes=device.memory_bytes,
        usable_bytes=device.memory_bytes - round(3.04 * _GIB),
        hbm_bytes_per_second=rates.hbm_bytes_per_second if rates else None,
        cube_flops=device.cube_cores * _CUBE_CYCLE * rates.frequency_hz if rates else None,
        vector_bytes_per_second=(device.vector_cores or 0)
        * rates.vector_bytes_per_cycle
        * rates.frequency_hz
        if rates
        else None,
        sources=MappingProxyType(
            {
                **device.sources,
                **_SHARED_SOURCES,
                "usable_bytes": _SEEN_64 if device.memory_bytes > 32 * _GIB else _SEEN_32,
            }
        ),
    )


_ANNOUNCED = "announced at Huawei Connect 2025; not read from a data sheet"


def _announced_950(name: str, memory_gb: int, bandwidth: float, flops: float) -> Hardware:
    keeps = "assumed: as much kept by the system as on a 910B (3.04 GiB)"
    return Hardware(
        name=name,
        memory_bytes=memory_gb * 10**9,
        usable_bytes=memory_gb * 10**9 - round(3.04 * _GIB),
        hbm_bytes_per_second=bandwidth,
        cube_flops=flops,
        sources=MappingProxyType(
            {
                "memory_bytes": _ANNOUNCED,
                "hbm_bytes_per_second": _ANNOUNCED,
                "cube_flops": f"half of the 1 PFLOPS in FP8 {_ANNOUNCED}",
                "usable_bytes": keeps,
                "host_bytes_per_second": "assumed to be the 910B's",
                "link_bytes_per_second": "assumed to be the 910B's",
            }
        ),
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "cpu": Hardware("cpu"),
        **{name: _of_910b(DEVICES[name]) for name in ("910B1", "910B2", "910B3", "910B4")},
        "950": Hardware("950"),  # stands for two cards: no figures
        "950PR": _announced_950("950PR", 128, 1.6e12, 0.5e15),
        "950DT": _announced_950("950DT", 144, 4.0e12, 0.5e15),
        "A3-die": Hardware(
            "A3-die",
            hbm_bytes_per_second=1.6e12,
            cube_flops=24 * _CUBE_CYCLE * 1.8e9,
            sources=MappingProxyType(
                {
                    "hbm_bytes_per_second": "assumed to be a 910B2's: an Ascend 910C joins two",
                    "cube_flops": "as above",
                }
            ),
        ),
    }
)


def get_hardware(name: str) -> tuple[Device, Hardware]:
    """The device whose attention decides, and the card's figures.

    Raises:
        UsageError: an unknown name.
    """
    device = get_device(name)
    return device, HARDWARE[device.name]
