"""The formats: bytes, edge cases, and how large an error they promise."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import (
    FLOAT_DTYPES,
    INT8,
    REDUCED_DIMS,
    Encoded,
    UnquantizedFormat,
    format_of,
    reduced_dims,
    require_finite,
)
from ascend_kv.geometry import GRANULARITIES, format_spec

LARGEST = torch.finfo(torch.float32).max
DENORMAL = 2.0**-149


def encode(values: list[float], symmetric: bool = True) -> Encoded:
    """The values as one group."""
    return INT8.encode(torch.tensor([values]), (1,), symmetric)


def scale_of(encoded: Encoded) -> float:
    assert encoded.scale is not None and encoded.scale.dtype == torch.float32
    return float(encoded.scale)


def raw(x: torch.Tensor | None) -> bytes:
    assert x is not None
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def test_granularities_are_those_of_the_geometry() -> None:
    # groups of channels are no dimension of their own: a vector is cut into them first
    assert (*REDUCED_DIMS, "group") == GRANULARITIES
    assert reduced_dims("token") == (1, 3)
    with pytest.raises(UsageError, match="per_head"):
        reduced_dims("per_head")


def test_int8_symmetric_bytes() -> None:
    # absmax 254: scale 2.0; 1 / 2, 3 / 2 and 5 / 2 round to even
    encoded = encode([254.0, -254.0, 1.0, 3.0, 5.0, -1.0, 2.0, -2.0])
    assert raw(encoded.codes) == bytes.fromhex("7f 81 00 02 02 00 01 ff")
    assert raw(encoded.scale) == bytes.fromhex("00000040")
    assert encoded.zero_point is None


def test_int8_asymmetric_bytes() -> None:
    # 0 to 510: scale 2.0, zero point 256
    encoded = encode([0.0, 510.0, 256.0, 257.0, 259.0, 2.0], symmetric=False)
    assert raw(encoded.codes) == bytes.fromhex("80 7f 00 00 02 81")
    assert raw(encoded.scale) == bytes.fromhex("00000040")
    assert raw(encoded.zero_point) == bytes.fromhex("00008043")


def test_scales_are_divided_not_multiplied() -> None:
    """absmax / 127 in float32: multiplying by 1 / 127 gives another last bit here."""
    absmax = np.float32(9.0)
    assert absmax / np.float32(127) != absmax * (np.float32(1) / np.float32(127))
    assert scale_of(encode([9.0, 1.0])) == absmax / np.float32(127)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, "0000803f 0000c0bf"),
        (torch.float16, "003c 00be"),
        (torch.bfloat16, "803f c0bf"),
    ],
)
def test_unquantized_bytes(dtype: torch.dtype, expected: str) -> None:
    encoded = format_of(dtype).encode(torch.tensor([1.0, -1.5]), ())
    assert raw(encoded.codes) == bytes.fromhex(expected)
    assert encoded.scale is None and encoded.zero_point is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "token_head"])
def test_bytes_of_a_token_are_those_of_the_format_spec(granularity: str, symmetric: bool) -> None:
    for heads, dim in ((1, 64), (3, 80), (8, 128)):
        x = torch.randn(1, heads, 1, dim)
        encoded = INT8.encode(x, reduced_dims(granularity), symmetric)
        spec = format_spec("int8", granularity, symmetric)
        stored = sum(part.nbytes for part in encoded if part is not None)
        assert stored == spec.vectors_bytes(heads, dim)
        for dtype in FLOAT_DTYPES:
            spec = format_spec(str(dtype).removeprefix("torch."))
            assert format_of(dtype).encode(x, ()).codes.nbytes == spec.vectors_bytes(heads, dim)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_group(symmetric: bool) -> None:
    encoded = encode([0.0, -0.0, 0.0], symmetric)
    assert scale_of(encoded) == 0.0 and not encoded.codes.any()
    assert torch.equal(INT8.decode(encoded), torch.zeros(1, 3))


@pytest.mark.parametrize("value", [0.1, -1234.567, 3e38, 1e-42])
def test_constant_group(value: float) -> None:
    exact = torch.full((1, 5), value)
    asymmetric = encode([value] * 5, symmetric=False)
    assert scale_of(asymmetric) == 0.0 and not asymmetric.codes.any()
    assert torch.equal(INT8.decode(asymmetric), exact)
    symmetric = encode([value] * 5)
    if abs(value) > 1e-30:
        assert symmetric.codes.abs().eq(127).all()
        assert (INT8.decode(symmetric) / exact - 1).abs().max() < 2.5e-7


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("steps", [1, 64, 200, 5000])
def test_denormal_values(symmetric: bool, steps: int) -> None:
    values = [steps * DENORMAL, -steps * DENORMAL, 0.0]
    encoded = encode(values, symmetric)
    codes, scale, _ = oracle.quantize_group(values, symmetric)
    assert encoded.codes[0].tolist() == codes
    assert scale_of(encoded) == scale
    error = (INT8.decode(encoded) - torch.tensor([values])).abs().max()
    assert error <= max(0.5 * float(scale) + 2 * DENORMAL, 2 * steps * DENORMAL)
    assert error < 1.2e-38


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_poison_their_group(symmetric: bool, bad: float) -> None:
    x = torch.randn(3, 6)
    x[1, 4] = bad
    encoded = INT8.encode(x, (1,), symmetric)
    back = INT8.decode(encoded)
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()
    assert not encoded.codes[1].any()
    for part in (encoded.scale, None if symmetric else encoded.zero_point):
        assert part is None or part[1].isnan()


def test_both_infinities_in_one_group() -> None:
    for symmetric in (True, False):
        assert INT8.decode(encode([math.inf, -math.inf, 0.0], symmetric)).isnan().all()


def test_values_beyond_half_range() -> None:
    values = [1e30, -3e38, 70000.0]
    for symmetric in (True, False):
        back = INT8.decode(encode(values, symmetric))
        assert back.isfinite().all()
        assert abs(float(back[0, 1]) / -3e38 - 1) < 1e-2
        half = INT8.decode(encode(values, symmetric), torch.float16)
        assert torch.isneginf(half[0, 1])


def test_a_range_beyond_float32_is_poisoned_not_wrong() -> None:
    assert torch.isposinf(INT8.decode(encode([LARGEST, 1.0]))[0, 0])
    wide = [LARGEST * 0.9999, -LARGEST * 0.9999]
    assert INT8.decode(encode(wide)).isfinite().all()
    assert INT8.decode(encode(wide, symmetric=False)).isnan().all()
    almost = [LARGEST * 0.99, -LARGEST * 0.99]
    back = INT8.decode(encode(almost, symmetric=False))
    assert (back - torch.tensor([almost])).abs().max() <= scale_of(encode(almost, False)) * 0.51


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0])
def test_error_is_half_a_step(symmetric: bool, magnitude: float, offset: float) -> None:
    x = (torch.randn(50, 64) + offset) * magnitude
    encoded = INT8.encode(x, (1,), symmetric)
    error = (INT8.decode(encoded).double() - x.double()).abs()
    assert encoded.scale is not None
    roundings = 4 * 2.0**-24 * x.abs().amax(1, keepdim=True).double()
    assert (error <= encoded.scale.double() / 2 + roundings).all()
    if offset < 100 or not symmetric:  # the bound is not idle
        assert error.max() > 0.9 * encoded.scale.max() / 2


def test_codes_use_the_whole_range() -> None:
    x = torch.linspace(-1, 1, 4001)[None]
    assert INT8.encode(x, (1,)).codes.unique().tolist() == list(range(-127, 128))
    asymmetric = INT8.encode(x, (1,), symmetric=False)
    assert asymmetric.codes.unique().tolist() == list(range(-128, 128))


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_scales(symmetric: bool) -> None:
    x = torch.tensor([[-500.0, -1.5, -0.5, 0.5, 1.5, 500.0]])
    zero_point = None if symmetric else torch.tensor([[1.0]])
    encoded = INT8.encode_static(x, torch.tensor([[1.0]]), zero_point)
    if symmetric:
        assert encoded.codes[0].tolist() == [-127, -2, 0, 0, 2, 127]
    else:
        assert encoded.codes[0].tolist() == [-128, -2, -2, 0, 0, 127]
    for useless in (0.0, math.nan):
        assert not INT8.encode_static(x, torch.tensor([[useless]]), zero_point).codes.any()


def test_require_finite() -> None:
    require_finite("key", torch.tensor([1.0, -1e38]))
    for bad in (math.nan, math.inf):
        with pytest.raises(UsageError, match="key: got 'NaN or infinity'"):
            require_finite("key", torch.tensor([1.0, bad]))


@pytest.mark.parametrize("shape", [(2, 0, 3, 4), (0, 2, 3, 4), (2, 3, 0, 4)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_empty(shape: tuple[int, ...], symmetric: bool) -> None:
    for granularity, dims in REDUCED_DIMS.items():
        encoded = INT8.encode(torch.empty(shape), dims, symmetric)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
        assert encoded.codes.shape == shape and encoded.codes.dtype == torch.int8
        assert encoded.scale is not None and encoded.scale.shape == kept, granularity
        assert not encoded.scale.any()
        assert (encoded.zero_point is None) == symmetric


def test_input_is_left_alone() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    for symmetric in (True, False):
        INT8.encode(x, (1,), symmetric)
        INT8.encode_static(x, torch.ones(1, 1), None if symmetric else torch.ones(1, 1))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_unquantized_edges(dtype: torch.dtype) -> None:
    x = torch.tensor([65504.0, 65520.0, -1e30, math.nan, math.inf, 2.0**-24, 0.0])
    form = format_of(dtype)
    encoded = form.encode(x, ())
    assert encoded.codes.dtype == dtype
    back = form.decode(encoded)
    assert back.dtype == torch.float32
    assert back[3].isnan() and back[4] == math.inf and back[6] == 0
    assert back[5] == 2.0**-24
    if dtype == torch.float16:
        assert back[:3].tolist() == [65504.0, math.inf, -math.inf]
    elif dtype == torch.float32:
        assert torch.equal(back[:3], x[:3])
    assert form.decode(encoded, torch.bfloat16).dtype == torch.bfloat16


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="key_cache"):
        format_of(torch.int16, "key_cache")
    with pytest.raises(UsageError, match="dtype"):
        UnquantizedFormat(torch.int8)
    with pytest.raises(UsageError, match="scale"):
        INT8.decode(Encoded(torch.zeros(1, dtype=torch.int8)))
    with pytest.raises(UsageError, match="scale"):
        format_of(torch.float16).encode_static(torch.zeros(1), torch.ones(1))
