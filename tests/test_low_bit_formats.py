"""FP8 and INT4: bytes, edge cases, and how large an error they promise. INT8: ``test_formats``."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracle_formats
import pytest
import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import (
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    QUANTIZED,
    REDUCED_DIMS,
    Encoded,
    Fp8Format,
    VectorFormat,
    format_named,
    format_of,
    reduced_dims,
)
from ascend_kv.geometry import format_spec

BOTH_FP8 = (FP8_E4M3, FP8_E5M2)
KINDS = [
    pytest.param(kind, symmetric, id=f"{kind.name}-{'' if symmetric else 'a'}symmetric")
    for kind in (*BOTH_FP8, INT4)
    for symmetric in (True, False)
    if symmetric or kind.zero_points
]


def raw(x: torch.Tensor | None) -> bytes:
    assert x is not None
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def encode(values: list[float], kind: VectorFormat, symmetric: bool = True) -> Encoded:
    """The values as one group."""
    return kind.encode(torch.tensor([values]), (1,), symmetric)


def test_formats_by_name_and_type() -> None:
    for kind in QUANTIZED:
        assert format_named(kind.name) is kind is format_of(kind.dtype)
    assert format_named("bfloat16").dtype == torch.bfloat16
    with pytest.raises(UsageError, match="int8, fp8_e4m3, fp8_e5m2, int4"):
        format_named("int5")


def test_e4m3_bytes() -> None:
    # absmax 448: scale 1. 17 and 19 lie between 16, 18 and 20: ties go to the even mantissa
    encoded = encode([448.0, -448.0, 1.0, -0.0, 2.0**-9, 17.0, 19.0, 2.0**-10], FP8_E4M3)
    assert raw(encoded.codes) == bytes.fromhex("7e fe 38 80 01 58 5a 00")
    assert raw(encoded.scale) == bytes.fromhex("0000803f")
    assert encoded.zero_point is None


def test_e5m2_bytes() -> None:
    encoded = encode([57344.0, -57344.0, 1.0, -1.75, 2.0**-16, 9.0, 11.0], FP8_E5M2)
    assert raw(encoded.codes) == bytes.fromhex("7b fb 3c bf 01 48 4a")
    assert raw(encoded.scale) == bytes.fromhex("0000803f")


def test_int4_symmetric_bytes() -> None:
    # absmax 14: scale 2; 1 / 2, 3 / 2 and 5 / 2 round to even; channel 0 in the low bits
    encoded = encode([14.0, -14.0, 1.0, 3.0, 5.0, -2.0], INT4)
    assert raw(encoded.codes) == bytes.fromhex("97 20 f2")
    assert raw(encoded.scale) == bytes.fromhex("0040")
    assert encoded.zero_point is None


def test_int4_asymmetric_bytes() -> None:
    # 0 to 30: scale 2, zero point 16
    encoded = encode([0.0, 30.0, 16.0, 17.0, 19.0, 2.0], INT4, symmetric=False)
    assert raw(encoded.codes) == bytes.fromhex("78 00 92")
    assert raw(encoded.scale) == bytes.fromhex("0040")
    assert raw(encoded.zero_point) == bytes.fromhex("004c")


@pytest.mark.parametrize("kind", BOTH_FP8, ids=lambda kind: kind.name)
def test_every_fp8_code_is_the_number_of_the_definition(kind: Fp8Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = oracle_formats.as_numbers(codes.numpy(), kind.name)
    np.testing.assert_array_equal(kind.codes_as_floats(codes.view(kind.dtype)).numpy(), wanted)
    assert kind.largest == oracle_formats.fp8_largest(kind.name)


@pytest.mark.parametrize("kind", BOTH_FP8, ids=lambda kind: kind.name)
def test_fp8_rounds_to_the_nearest_and_saturates(kind: Fp8Format) -> None:
    numbers = sorted({oracle_formats.fp8_value(c, kind.name) for c in range(128)} - {math.inf})
    numbers = [x for x in numbers if x == x]
    halfway = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    near = [
        float(np.nextafter(np.float32(x), np.float32(side))) for x in halfway for side in (0, 1e9)
    ]
    values = [*numbers, *halfway, *near, kind.largest * 1.07, kind.largest * 1.2, 3e38]
    values += [-x for x in values]
    codes = kind.encode_static(torch.tensor(values), torch.ones(1)).codes
    assert raw(codes) == bytes(oracle_formats.fp8_static(values, 1.0, kind.name))


def test_int4_packs_and_unpacks_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    floats = INT4.codes_as_floats(codes)
    assert floats[:4].tolist() == [0, 0, 1, 0] and floats[-2:].tolist() == [-1, -1]
    np.testing.assert_array_equal(floats.numpy(), oracle_formats.unpack(codes.numpy()))


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 3000.0, 1e30])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_codes_and_scales_are_the_oracles(
    kind: VectorFormat, symmetric: bool, magnitude: float, offset: float
) -> None:
    x = (torch.randn(1, 2, 5, 22) + offset) * magnitude
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = -2.5 * magnitude
    x[0, 1, 2, 7], x[0, 1, 3, 0], x[0, 1, 4, 21] = math.nan, math.inf, -math.inf
    for granularity, dims in REDUCED_DIMS.items():
        encoded = kind.encode(x, dims, symmetric)
        wanted = oracle_formats.quantize(x.numpy(), granularity, kind.name, symmetric)
        assert raw(encoded.codes) == wanted[0].tobytes(), granularity
        assert encoded.scale is not None and encoded.scale.dtype == kind.scale_dtype
        np.testing.assert_array_equal(encoded.scale.numpy(), wanted[1])
        if symmetric:
            assert encoded.zero_point is None
        else:
            assert encoded.zero_point is not None
            np.testing.assert_array_equal(encoded.zero_point.numpy(), wanted[2])


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_bytes_of_a_token_are_those_of_the_format_spec(kind: VectorFormat, symmetric: bool) -> None:
    for granularity in ("token", "token_head"):
        for heads, dim in ((1, 64), (3, 82), (8, 128)):
            encoded = kind.encode(
                torch.randn(1, heads, 1, dim), reduced_dims(granularity), symmetric
            )
            spec = format_spec(kind.name, granularity, symmetric)
            stored = sum(part.nbytes for part in encoded if part is not None)
            assert stored == spec.vectors_bytes(heads, dim)


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_poison_their_group(
    kind: VectorFormat, symmetric: bool, bad: float
) -> None:
    x = torch.randn(3, 6)
    x[1, 4] = bad
    encoded = kind.encode(x, (1,), symmetric)
    back = kind.decode(encoded)
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()
    assert not encoded.codes[1].view(torch.uint8).any()


@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_zero_and_constant_groups(kind: VectorFormat, symmetric: bool) -> None:
    zeros = encode([0.0, -0.0, 0.0, 0.0], kind, symmetric)
    assert torch.equal(kind.decode(zeros), torch.zeros(1, 4))
    back = kind.decode(encode([-3.0625] * 4, kind, symmetric))  # a half
    assert (back + 3.0625).abs().max() <= (0 if not symmetric else 3.1 * 2**-11)


@pytest.mark.parametrize("kind", BOTH_FP8, ids=lambda kind: kind.name)
def test_fp8_error_is_relative(kind: Fp8Format) -> None:
    relative = 2.0**-4 if kind is FP8_E4M3 else 2.0**-3
    smallest = 2.0**-10 if kind is FP8_E4M3 else 2.0**-17
    for magnitude in (1e-30, 1.0, 1e30):
        x = torch.randn(50, 64) * torch.logspace(-6, 0, 64) * magnitude
        encoded = kind.encode(x, (1,))
        assert encoded.scale is not None
        error = (kind.decode(encoded).double() - x.double()).abs()
        bound = torch.maximum(relative * x.double().abs(), smallest * encoded.scale.double())
        assert (error <= bound * (1 + 1e-6)).all()
        assert (error / bound).max() > 0.85  # the bound is not idle


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("magnitude", [1e-5, 1e-2, 1.0, 1000.0])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_int4_error_is_half_a_step_and_what_halves_cost(
    symmetric: bool, magnitude: float, offset: float
) -> None:
    x = (torch.randn(50, 64) + offset) * magnitude
    encoded = INT4.encode(x, (1,), symmetric)
    assert encoded.scale is not None
    error = (INT4.decode(encoded).double() - x.double()).abs()
    largest = x.abs().amax(1, keepdim=True).double()
    halves = largest * 2.0 ** (-11 if symmetric else -10) + 15 * 2.0**-25
    assert (error <= encoded.scale.double() / 2 + halves).all()
    if offset == 0 and magnitude > 1e-4:
        assert error.max() > 0.9 * encoded.scale.max() / 2


def test_int4_beyond_halves_is_poisoned_never_clipped() -> None:
    fits, beyond = 7 * 65504.0, 7 * 65536.0
    assert INT4.decode(encode([fits, 1.0], INT4))[0, 0] == fits
    assert INT4.decode(encode([beyond, 1.0], INT4)).isnan().all()
    assert INT4.decode(encode([70000.0, 70001.0], INT4, False)).isnan().all()
    assert INT4.decode(encode([-65000.0, 65000.0], INT4, False)).isfinite().all()


def test_codes_use_the_whole_range() -> None:
    x = torch.linspace(-1, 1, 4000)[None]
    assert INT4.codes_as_floats(INT4.encode(x, (1,)).codes).unique().tolist() == list(range(-7, 8))
    codes = INT4.encode(x, (1,), symmetric=False).codes
    assert INT4.codes_as_floats(codes).unique().tolist() == list(range(-8, 8))


@pytest.mark.parametrize("kind", BOTH_FP8, ids=lambda kind: kind.name)
def test_static_scales_of_fp8(kind: Fp8Format) -> None:
    beyond = 2.5 * kind.largest
    x = torch.tensor([[-beyond, 2.0, beyond, 0.0]])
    encoded = kind.encode_static(x, torch.tensor([[2.0]]))
    assert kind.decode(encoded).tolist() == [[-2 * kind.largest, 2.0, 2 * kind.largest, 0.0]]
    assert kind.clips(x, torch.tensor([[2.0]])).tolist() == [[True, False, True, False]]
    inside = torch.tensor([[2 * kind.largest * 1.03]])  # nearer to the largest than to the next
    assert not kind.clips(inside, torch.tensor([[2.0]])).any()
    for useless in (0.0, math.nan):
        codes = kind.encode_static(x, torch.tensor([[useless]])).codes
        assert not kind.codes_as_floats(codes).any()
        assert kind.clips(x[:, :3], torch.tensor([[useless]])).all()


def test_a_scale_of_its_own_never_clips() -> None:
    for kind in BOTH_FP8:
        x = torch.randn(2000, 8) * torch.logspace(-30, 30, 2000)[:, None]
        scale = kind.encode(x, (1,)).scale
        assert scale is not None and not kind.clips(x, scale).any()


@pytest.mark.parametrize("shape", [(2, 0, 3, 4), (0, 2, 3, 4), (2, 3, 0, 4)])
@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_empty(shape: tuple[int, ...], kind: VectorFormat, symmetric: bool) -> None:
    for dims in REDUCED_DIMS.values():
        encoded = kind.encode(torch.empty(shape), dims, symmetric)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
        assert encoded.codes.dtype == kind.dtype
        assert encoded.codes.shape == (*shape[:3], shape[3] // kind.codes_per_element)
        assert encoded.scale is not None and encoded.scale.shape == kept and not encoded.scale.any()
        assert (encoded.zero_point is None) == symmetric


def test_input_is_left_alone() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    for kind in QUANTIZED:
        kind.encode(x, (1,))
    FP8_E4M3.encode_static(x, torch.ones(1, 1))
    assert torch.equal(x, before)


def test_mistakes() -> None:
    x = torch.randn(3, 7)
    with pytest.raises(UsageError, match="head_dim: got 7"):
        INT4.encode(x, (1,))
    with pytest.raises(UsageError, match="dynamic scales only"):
        INT4.encode_static(x, torch.ones(1, 1))
    for kind in BOTH_FP8:
        with pytest.raises(UsageError, match="no zero points"):
            kind.encode(x, (1,), symmetric=False)
        with pytest.raises(UsageError, match="no zero points"):
            kind.encode_static(x, torch.ones(1, 1), torch.zeros(1, 1))
        with pytest.raises(UsageError, match="scale"):
            kind.decode(Encoded(torch.zeros(1).to(kind.dtype)))
