"""What each device holds and accepts, every figure with the public source it was read from.

These are the figures needed before anything runs: for planning, and to refuse a block size that
the device's attention would refuse later. A kernel asks the platform for its core counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ascend_kv.errors import UsageError

_GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """How fast an NPU's vector cores move and compute: peaks from documents, not measured here.

    Attributes:
        frequency_hz: of a vector core.
        vector_bytes_per_cycle: what one vector core computes on; one repeat is 256 bytes.
        read_bytes_per_cycle: one core's MTE2, global memory to unified buffer.
        write_bytes_per_cycle: one core's MTE3, the way back.
        hbm_bytes_per_second: all cores together, reads and writes.
        launch_seconds: from a launch to the first instruction, all cores of the device started.
    """

    frequency_hz: float
    vector_bytes_per_cycle: int
    read_bytes_per_cycle: int
    write_bytes_per_cycle: int
    hbm_bytes_per_second: float
    launch_seconds: float


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: as ``get_device`` takes it.
        memory_bytes: device memory; None where it varies or is not published.
        cube_cores, vector_cores: matrix and vector cores; None where there are none or the count
            is not published.
        ub_bytes: the unified buffer of one vector core; None as above.
        rates: how fast it moves and computes; None where that is not published.
        formats: KV cache formats its attention reads.
        default_block_size: tokens in a block where the user names no number.
        block_multiples: format name -> what a block size must be a multiple of.
        refused: format name -> why its attention does not read it, where that needs saying.
        by_references: formats without a kernel: the references, operators in PyTorch, serve them.
        sources: attribute name -> where its figure was read.
    """

    name: str
    memory_bytes: int | None
    cube_cores: int | None
    vector_cores: int | None
    ub_bytes: int | None
    formats: tuple[str, ...]
    default_block_size: int
    block_multiples: Mapping[str, int]
    sources: Mapping[str, str] = field(repr=False)
    rates: Rates | None = None
    refused: Mapping[str, str] = field(default_factory=dict, repr=False)
    by_references: tuple[str, ...] = ()

    def check_block_size(self, block_size: int, format_name: str) -> None:
        """Refuse a block size, or a format, that the device's attention cannot read.

        Args:
            block_size: tokens in a block.
            format_name: a ``FormatSpec.name``.

        Raises:
            UsageError: names the legal formats, or the legal block sizes.
        """
        if format_name not in self.formats:
            reason = self.refused.get(format_name)
            hint = f"On {self.name}{f': {reason}' if reason else ''}."
            raise UsageError("kv_cache_dtype", format_name, self.formats, hint)
        multiple = self.block_multiples[format_name]
        if block_size >= 1 and block_size % multiple == 0:
            return
        if multiple == 1:
            legal = "a whole number of at least 1"
        else:
            legal = f"{multiple}, {2 * multiple}, {3 * multiple} and so on: multiples of {multiple}"
        hint = f"For {format_name} on {self.name}; the default there is {self.default_block_size}."
        raise UsageError("block_size", block_size, legal, hint)


_CANN_ATTENTION = "aclnnFusedInferAttentionScoreV4 in the CANN operator documentation"
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_NO_FP8 = "it has no FP8, neither to cast to nor to attend over; a 950 has"
_NO_INT4 = (
    "there is no INT4 kernel for it, and its fused attention takes no INT4 keys from a paged cache "
    "with a float16 or bfloat16 query"
)


_GUIDE = "Ascend C performance guide in asc-devkit"


def _rates(name: str, frequency_hz: float) -> tuple[Rates, dict[str, str]]:
    """Of a 910B with 192 MB of L2, and the sources of its figures."""
    platform = f"CANN runtime, platform_config/Ascend{name}.ini"
    sources = {
        "frequency_hz": f"{platform}, cube_freq. The vector cores are taken to run at it too: 48 "
        f"cores x 64 lanes x 2 x 1.8 GHz are the 11.06 TOPS of the {_GUIDE}",
        "vector_bytes_per_cycle": f"{platform}, vec_calc_size: 128 half lanes",
        "read_bytes_per_cycle": f"{platform}, ddr_read_rate, taken as that of one vector core",
        "write_bytes_per_cycle": f"{platform}, ub_to_ddr_rate, taken as that of one vector core",
        "hbm_bytes_per_second": f"{_GUIDE}, splitting for the L2 cache: 1.6 TB/s beside 192 MB of "
        "L2, which this chip has",
        "launch_seconds": f"{_GUIDE}, analysis of profiles: 20 to 21 us on Atlas A2, all cores",
    }
    return Rates(frequency_hz, 256, 32, 64, 1.6e12, 20e-6), sources


def _ascend_910b(
    name: str,
    memory_bytes: int,
    cube_cores: int,
    vector_cores: int,
    frequency_hz: float | None = None,
) -> Device:
    platform = f"CANN toolkit, platform_config/Ascend{name}.ini"
    rates, rate_sources = _rates(name, frequency_hz) if frequency_hz else (None, {})
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        cube_cores=cube_cores,
        vector_cores=vector_cores,
        ub_bytes=192 * 1024,
        formats=("float16", "bfloat16", "int8"),
        default_block_size=128,
        block_multiples=MappingProxyType({"float16": 16, "bfloat16": 16, "int8": 32}),
        sources=MappingProxyType(
            {
                "memory_bytes": platform,
                "cube_cores": platform,
                "vector_cores": platform,
                "ub_bytes": "asc-tools, cpudebug limits of ascend910B1",
                "formats": f"{_CANN_ATTENTION}; no FP8: vllm-ascend issue 8102",
                "default_block_size": f"{_CANN_ATTENTION} (128 recommended)",
                "block_multiples": _CANN_ATTENTION,
                **rate_sources,
            }
        ),
        rates=rates,
        refused=MappingProxyType({**dict.fromkeys(_FP8, _NO_FP8), "int4": _NO_INT4}),
    )


def _ascend_950(name: str) -> Device:
    # Only what is published is filled in. FP8 is served by the references there, as on a CPU: no
    # kernel of this package was made for a 950.
    assumed = "assumed to be the 910B's: not read for the 950 yet"
    return Device(
        name=name,
        memory_bytes=None,
        cube_cores=None,
        vector_cores=None,
        ub_bytes=None,
        formats=("float16", "bfloat16", "int8", *_FP8),
        default_block_size=128,
        block_multiples=MappingProxyType(
            {"float16": 16, "bfloat16": 16, "int8": 32, **dict.fromkeys(_FP8, 32)}
        ),
        sources=MappingProxyType(
            {
                "formats": f"{assumed}; FP8: vllm-ascend issue 8102",
                "default_block_size": assumed,
                "block_multiples": assumed,
            }
        ),
        refused=MappingProxyType({"int4": "there is no INT4 kernel for it"}),
        by_references=_FP8,
    )


def _cpu() -> Device:
    ours = "this package's reference operators"
    formats = ("float32", "float16", "bfloat16", "int8", *_FP8, "int4")
    return Device(
        name="cpu",
        memory_bytes=None,
        cube_cores=None,
        vector_cores=None,
        ub_bytes=None,
        formats=formats,
        default_block_size=16,
        block_multiples=MappingProxyType(dict.fromkeys(formats, 1)),
        sources=MappingProxyType(
            {"formats": ours, "block_multiples": ours, "default_block_size": "vLLM's default"}
        ),
    )


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _cpu(),
            _ascend_910b("910B1", 64 * _GIB, 24, 48, 1.85e9),
            _ascend_910b("910B2", 64 * _GIB, 24, 48, 1.8e9),
            _ascend_910b("910B3", 64 * _GIB, 20, 40, 1.8e9),
            # its bandwidth was found nowhere but in hearsay, so it has no rates
            _ascend_910b("910B4", 32 * _GIB, 20, 40),
            _ascend_950("950PR"),
            _ascend_950("950DT"),
            _ascend_950("950"),  # either of the two
        )
    }
)


def get_device(name: str, field: str = "device") -> Device:
    """The device of that name, as in ``DEVICES``, or as CANN has it: "Ascend950PR_9589".

    Upper and lower case are the same.

    Raises:
        UsageError: an unknown name, given as ``field``; lists the known ones.
    """
    wanted = short_name(name).casefold()
    for known, device in DEVICES.items():
        if known.casefold() == wanted:
            return device
    raise UsageError(field, name, DEVICES)


def short_name(name: str) -> str:
    """What CANN calls a chip without "Ascend" before and its variant after an underscore."""
    return name.removeprefix("Ascend").partition("_")[0]
