"""Devices: figures have sources, and block sizes that attention would refuse are refused here."""

from __future__ import annotations

import pytest

from ascend_kv.devices import DEVICES, get_device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import format_spec


def test_the_910b_family() -> None:
    figures = {
        name: (get_device(name).memory_bytes, get_device(name).cube_cores)
        for name in ("910B1", "910B2", "910B3", "910B4")
    }
    assert figures == {
        "910B1": (64 * 2**30, 24),
        "910B2": (64 * 2**30, 24),
        "910B3": (64 * 2**30, 20),
        "910B4": (32 * 2**30, 20),
    }
    for name in figures:
        device = get_device(name)
        assert device.vector_cores == 2 * (device.cube_cores or 0)
        assert device.ub_bytes == 196_608
        assert device.default_block_size == 128
        assert get_device(f"Ascend{name}") is device


def test_vector_throughput_is_the_published_one() -> None:
    device = get_device("910B2")
    assert device.rates is not None and device.vector_cores is not None
    lanes = device.rates.vector_bytes_per_cycle / 4
    tops = device.vector_cores * lanes * 2 * device.rates.frequency_hz / 1e12
    assert tops == pytest.approx(11.06, abs=0.005)


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_has_a_source_and_every_format_a_rule(name: str) -> None:
    device = get_device(name)
    figures = ("memory_bytes", "cube_cores", "vector_cores", "ub_bytes")
    stated = {figure for figure in figures if getattr(device, figure) is not None}
    stated |= {"formats", "default_block_size", "block_multiples"}
    if device.rates is not None:
        stated |= set(vars(device.rates))
    assert stated == set(device.sources)
    assert set(device.block_multiples) == set(device.formats)
    for format_name in device.formats:
        assert format_spec(format_name).name == format_name
        device.check_block_size(device.default_block_size, format_name)


@pytest.mark.parametrize(
    ("name", "format_name", "legal", "illegal"),
    [
        ("910B3", "float16", (16, 48, 128), (0, -16, 8, 24, 100)),
        ("910B3", "bfloat16", (16, 48), (8, 24)),
        ("910B3", "int8", (32, 96, 128), (0, -32, 16, 48)),
        ("cpu", "int8", (1, 7, 16), (0, -1)),
        ("cpu", "float32", (1, 16), (0,)),
    ],
)
def test_block_sizes(
    name: str, format_name: str, legal: tuple[int, ...], illegal: tuple[int, ...]
) -> None:
    device = get_device(name)
    for block_size in legal:
        device.check_block_size(block_size, format_name)
    for block_size in illegal:
        with pytest.raises(UsageError) as caught:
            device.check_block_size(block_size, format_name)
        assert caught.value.field == "block_size"
        assert caught.value.given == block_size
        assert str(device.block_multiples[format_name]) in caught.value.legal
        assert str(device.default_block_size) in caught.value.hint


def test_formats_and_devices_that_are_unknown_are_refused() -> None:
    for format_name in ("float32", "fp8_e4m3"):
        with pytest.raises(UsageError, match="float16, bfloat16, int8"):
            get_device("910B1").check_block_size(128, format_name)
    with pytest.raises(UsageError) as caught:
        get_device("910B5")
    assert caught.value.legal == "cpu, 910B1, 910B2, 910B3, 910B4, 950PR, 950DT, 950"


def test_names_as_cann_reports_them() -> None:
    assert get_device("Ascend950PR_9589") is get_device("950PR")
    assert get_device("Ascend950DT_9571").name == "950DT"
    assert get_device("Ascend910B3") is get_device("910B3")
    assert get_device("950").formats == get_device("950PR").formats == get_device("950DT").formats


def test_case_does_not_matter() -> None:
    assert get_device("910b1") is get_device("910B1")
    assert get_device("CPU") is get_device("cpu")
