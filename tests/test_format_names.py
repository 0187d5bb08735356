"""The formats by their names, what each costs, and what is refused with the legal names."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused

from ascend_kv.cache_formats import FormatSpec, MixedFormat
from ascend_kv.config import CacheConfig
from ascend_kv.devices import DEVICES, get_device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry, format_spec, layer_format
from ascend_kv.resolved_cache import resolve_block_size, resolve_formats
from ascend_kv.user_values import from_mapping

GEOMETRY = ModelGeometry("llama", 6, 6, 3, 40, 240, 10, 128, "bfloat16", (None,) * 6)


def test_names_that_people_type() -> None:
    assert format_spec("fp8") == format_spec("fp8_e4m3") != format_spec("fp8_e5m2")
    assert (
        format_spec("int4_per_token_head") == format_spec("int4") == format_spec("int4/symmetric")
    )
    assert format_spec("int8_per_token_head") == format_spec("int8")
    assert format_spec("int4_per_token_head/asymmetric") == format_spec("int4", symmetric=False)


@pytest.mark.parametrize(
    ("name", "bits", "expected"),
    [
        ("fp8", 8, 5 * 64 + 5 * 4),
        ("fp8_e5m2/token", 8, 5 * 64 + 4),
        ("fp8/head/static", 8, 5 * 64),
        ("int4", 4, 5 * 32 + 5 * 2),
        ("int4/asymmetric", 4, 5 * 32 + 5 * 4),
        ("int4/group16/asymmetric", 4, 5 * 32 + 5 * 4 * 4),
        ("int4/asymmetric/hadamard", 4, 5 * 32 + 5 * 4),
    ],
)
def test_bytes_of_one_token_of_one_layer(name: str, bits: int, expected: int) -> None:
    spec = format_spec(name)
    assert spec.value_bits == bits
    assert spec.vectors_bytes(kv_heads=5, head_dim=64) == expected
    assert spec.token_bytes(kv_heads=5, head_dim=64) == 2 * expected


NAMES = [
    "float16",
    "int8/token_head",
    "int8/group32/asymmetric",
    "int8/channel/static/asymmetric",
    "fp8_e4m3/head/static",
    "fp8_e5m2/token",
    "int4/token_head/asymmetric",
    "k:int8/token_head+v:int4/token_head",
    "k:int4/token_head/asymmetric/hadamard+v:fp8_e4m3/token_head",
    "k:float16+v:int4/group8",
    "k:fp8_e4m3/layer/static+v:bfloat16",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_format_is_written_as_it_is_read(name: str) -> None:
    assert str(layer_format(name)) == name


def test_words_hold_instead_of_the_arguments() -> None:
    spec = format_spec("int8/token/symmetric", "group", False, "dynamic", 8)
    assert spec == format_spec("int8", "token")
    spec = format_spec("int8/group4", "token", False)
    assert spec == format_spec("int8", "group", False, group_size=4)


def test_keys_and_values_of_their_own() -> None:
    mixed = layer_format({"k": "int4/hadamard", "v": "fp8"}, symmetric=True)
    assert isinstance(mixed, MixedFormat)
    assert (mixed.key.hadamard, mixed.value.name) == (True, "fp8_e4m3")
    assert mixed.token_bytes(5, 64) == (5 * 32 + 5 * 2) + (5 * 64 + 5 * 4)
    assert layer_format("k:int8 + v:int8") == format_spec("int8")
    # of a name for both only the keys are rotated
    both = layer_format("int4/hadamard")
    assert (both.key.hadamard, both.value.hadamard) == (True, False)
    turned = layer_format("k:int4/hadamard+v:int4/hadamard")
    assert (turned.key.hadamard, turned.value.hadamard) == (True, True)
    assert layer_format(str(turned)) == turned
    static = layer_format("k:int8/channel/static+v:fp8/head/static")
    assert static.static_bytes(5, 64, 100) == 5 * 64 * 4 + 5 * 4
    assert layer_format({"k": "bf16", "v": "bf16"}) == format_spec("bfloat16")


@pytest.mark.parametrize(
    ("given", "field", "legal"),
    [
        ("int3", "kv_cache_dtype", "fp8_e4m3"),
        ("int4/per_head", "kv_cache_dtype int4/per_head", "hadamard"),
        ("float16/static", "kv_cache_dtype", "no words"),
        ("fp8/asymmetric", "symmetric", "True with fp8_e4m3"),
        ("int4/static", "scale_type", "dynamic with int4"),
        ("int4/channel", "granularity", "token, token_head, group with int4"),
        ("int8/hadamard", "kv_cache_dtype", "int8, or int4/hadamard"),
        ("int8/group", "group_size", "a divisor"),
        ("int8/asymmetric/symmetric", "kv_cache_dtype int8/asymmetric/symmetric", "one word of"),
        ("int8/head/group32", "kv_cache_dtype int8/head/group32", "one word of each kind"),
        ("int4/hadamard/hadamard", "kv_cache_dtype int4/hadamard/hadamard", "one word of"),
        ("int8/group1", "group_size", "at least 2"),
        ("int4_per_token_head/token", "granularity", "token_head with int4_per_token_head"),
        ("k:int8", "kv_cache_dtype", '"k:int8+v:int4"'),
        ("k:int8+w:int4", "kv_cache_dtype", '"k:int8+v:int4"'),
        ("k:int8+v:int8+v:int4", "kv_cache_dtype", '"k:int8+v:int4"'),
        ({"k": "int8"}, "kv_cache_dtype", '"k:int8+v:int4"'),
        ({"k": "int8", "v": 4}, "kv_cache_dtype", '"k:int8+v:int4"'),
        ("k:int8+v:int8/hadamard", "kv_cache_dtype", "int8, or int4/hadamard"),
        ("k:int8/head/static+v:int8", "kv_cache_dtype", "both static or both dynamic"),
    ],
)
def test_what_is_refused(given: Any, field: str, legal: str) -> None:
    error = refused(UsageError, layer_format, given)
    assert error.field == field
    assert legal in error.legal


@pytest.mark.parametrize(
    ("name", "head_dim", "hint"),
    [
        ("int4", 41, "two channels in a byte"),
        ("k:int8+v:int4", 41, "two channels in a byte"),
        ("int4/hadamard", 44, "mix 4 channels"),
        ("k:int8+v:int4/hadamard", 44, "mix 4 channels"),
        ("int4/group5", 40, "even"),
        ("int8/group7", 40, "smaller than a head"),
    ],
)
def test_heads_that_do_not_fit(name: str, head_dim: int, hint: str) -> None:
    spec = layer_format(name)
    assert hint in refused(UsageError, spec.check_head_dim, head_dim).hint


@pytest.mark.parametrize("name", ["int4", "int4/hadamard", "int4/group8", "k:int8+v:int4"])
def test_heads_that_fit(name: str) -> None:
    for head_dim in (40, 64, 80, 96, 128):
        layer_format(name).check_head_dim(head_dim)


def resolve(**options: Any) -> tuple[Any, ...]:
    return resolve_formats(GEOMETRY, from_mapping(CacheConfig, options, "cache"), "bfloat16")


def test_formats_by_layer() -> None:
    plain, int8 = format_spec("bfloat16"), format_spec("int8")
    mixed = layer_format({"k": "int4", "v": "fp8"})
    layers = {"0..1": "int8", 3: {"k": "int4", "v": "fp8"}, "-1": "auto"}
    assert resolve(kv_cache_dtype="fp8", kv_cache_dtype_layers=layers) == (
        *(int8, int8, format_spec("fp8"), mixed, format_spec("fp8"), plain),
    )
    # beside layers in the model's type
    options = {"kv_cache_dtype_skip_layers": [0], "kv_cache_dtype_layers": {"-2..-1": "int8"}}
    assert resolve(kv_cache_dtype="int4", **options)[::5] == (plain, int8)
    assert resolve(kv_cache_dtype_layers={"2": "int8"}) == (plain, plain, int8, *[plain] * 3)
    assert resolve(kv_cache_dtype="int4", symmetric=False)[0] == format_spec("int4/asymmetric")


@pytest.mark.parametrize(
    ("layers", "field", "legal"),
    [
        ({"6": "int8"}, "kv_cache_dtype_layers", "-6 to 5"),
        ({"3..1": "int8"}, "kv_cache_dtype_layers", "the first layer before the last"),
        ({"first": "int8"}, "kv_cache_dtype_layers", "two such as 0..3"),
        ({"0..2": "int8", "1": "int4"}, "kv_cache_dtype_layers", "layer 1 named once"),
        ({"0": "int8", "-6": "int4"}, "kv_cache_dtype_layers", "layer 0 named once"),
        ({"5": "int8"}, "kv_cache_dtype_skip_layers", "another layer"),
        ({"0": "int3"}, "kv_cache_dtype", "int8"),
        ({"0": ["int8"]}, "kv_cache_dtype", "int8"),
        ({"0": "int8/head"}, "granularity", "token_head"),
    ],
)
def test_layers_that_are_refused(layers: Any, field: str, legal: str) -> None:
    options = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [-1]}
    error = refused(UsageError, resolve, kv_cache_dtype_layers=layers, **options)
    assert error.field == field
    assert legal in error.legal


def test_odd_heads_are_refused_in_any_layer() -> None:
    odd = ModelGeometry("llama", 2, 6, 3, 41, 240, 10, 128, "float32", (None,) * 2)
    config = CacheConfig(kv_cache_dtype_layers={"1": "int4"})
    assert "odd" in refused(UsageError, resolve_formats, odd, config, "float32").hint


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("int8", ""),
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("int4", "int4"),
        ("k:int8+v:fp8", "fp8_e4m3"),
        ("k:int4+v:int8", "int4"),
    ],
)
def test_what_a_device_reads(device: str, name: str, side: str) -> None:
    """FP8 not on a 910B, INT4 on a CPU only; the reason and the legal formats are said."""
    call = CacheConfig(kv_cache_dtype=name, block_size=32), get_device(device), [layer_format(name)]
    if device == "cpu" or not side or (device.startswith("950") and side != "int4"):
        assert resolve_block_size(*call) == 32
        return
    error = refused(UsageError, resolve_block_size, *call)
    assert (error.field, error.given) == ("kv_cache_dtype", side)
    assert "int8" in error.legal and "int4" not in error.legal
    assert device in error.hint
    assert ("no INT4 kernel" if side == "int4" else "no FP8") in error.hint


def test_a_format_spec_alone_is_both_sides() -> None:
    spec: FormatSpec = format_spec("int8")
    assert spec.key is spec is spec.value
