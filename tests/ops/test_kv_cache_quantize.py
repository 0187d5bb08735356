"""kv_cache_quantize: codes, scales and zero points exactly as float32 arithmetic gives them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import oracle_formats
import pytest
import torch
from compare import assert_rounded

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.formats import REDUCED_DIMS


def assert_is_oracles(x: torch.Tensor, granularity: str, symmetric: bool) -> None:
    codes, scale, zero_point = ops.kv_cache_quantize(x, granularity, symmetric)
    wanted, scales, zeros = oracle.quantize(x.float().numpy(), granularity, symmetric)
    assert codes.dtype == torch.int8
    np.testing.assert_array_equal(codes.numpy(), wanted)
    np.testing.assert_array_equal(scale.numpy(), scales)
    if symmetric:
        assert zero_point.shape == (0,)
    else:
        np.testing.assert_array_equal(zero_point.numpy(), zeros)
    for result in (codes, scale, zero_point):
        assert result.is_contiguous()


@pytest.mark.parametrize("granularity", REDUCED_DIMS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_granularities(granularity: str, symmetric: bool, tokens: int) -> None:
    assert_is_oracles(torch.randn(2, 3, tokens, 40) * 5, granularity, symmetric)


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_and_head_dims(dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(1, 2, 7, dim) * 5).to(dtype)
    for granularity in ("token_head", "channel"):
        for symmetric in (True, False):
            assert_is_oracles(x, granularity, symmetric)


@pytest.mark.parametrize("granularity", [*REDUCED_DIMS, "group"])
@pytest.mark.parametrize("storage", ["fp8_e4m3", "fp8_e5m2", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_and_int4(storage: str, granularity: str, dtype: torch.dtype) -> None:
    """Bytes and scales of the oracle, and back within what float32 rounds."""
    x = (torch.randn(2, 3, 5, 24) * 5).to(dtype)
    x[0, 0, 0] = 0.0
    x[0, 1, 2, 7], x[1, 0, 0, 23] = math.nan, math.inf
    grouped = granularity == "group"
    group = 6 if grouped else 0
    for symmetric in (True, False) if storage == "int4" else (True,):
        codes, scale, zeros = ops.kv_cache_quantize(
            x, granularity, symmetric, group_size=group, storage=storage
        )
        rows = x.float().reshape(2, 3, 20, 6) if grouped else x.float()
        name = "token_head" if grouped else granularity
        wanted = oracle_formats.quantize(rows.numpy(), name, storage, symmetric)
        stored = codes.view(torch.uint8).numpy()
        np.testing.assert_array_equal(stored, wanted[0].reshape(stored.shape))
        for given, expected in zip((scale, zeros), wanted[1:], strict=True):
            if given.numel():
                np.testing.assert_array_equal(given.numpy(), expected.reshape(given.shape))
        assert (zeros.shape == (0,)) == symmetric and zeros.dtype == scale.dtype
        for result in (torch.float32, torch.bfloat16):
            back = ops.kv_cache_dequantize(codes, scale, zeros, group, result)
            numbers = oracle_formats.as_numbers(wanted[0], storage) * wanted[1].astype(float)
            if not symmetric:
                numbers = numbers + wanted[2].astype(float)
            assert_rounded(back, numbers.reshape(x.shape), slack=4e-6)


@pytest.mark.parametrize("storage", ["fp8_e4m3", "fp8_e5m2"])
def test_static_scales_of_fp8(storage: str) -> None:
    x, scale = torch.randn(1, 2, 3, 8) * 5, torch.rand(1, 2, 1, 8) * 1e-4
    codes, given, _ = ops.kv_cache_quantize(x, "channel", True, scale, storage=storage)
    assert torch.equal(given, scale) and given.data_ptr() != scale.data_ptr()
    for place in np.ndindex(1, 2, 3, 8):
        factor = scale[0, place[1], 0, place[3]]
        wanted = oracle_formats.fp8_static([float(x[place])], np.float32(factor), storage)
        assert int(codes.view(torch.uint8)[place]) == wanted[0]


def test_fp8_and_int4_mistakes() -> None:
    x, one = torch.randn(1, 2, 3, 8), torch.ones(1, 1, 1, 1)
    for options, message in (
        ({"storage": "int5"}, "storage: got 'int5'"),
        ({"storage": "fp8_e4m3", "symmetric": False}, "no zero points"),
        ({"storage": "int4", "scale": one}, "whose scales are dynamic"),
        ({"storage": "int4", "granularity": "group", "group_size": 1}, "an even number"),
    ):
        arguments: dict[str, Any] = {"granularity": "head"} | options
        with pytest.raises(UsageError, match=message):
            ops.kv_cache_quantize(x, **arguments)
    with pytest.raises(UsageError, match="head_dim 7"):
        ops.kv_cache_quantize(x[..., :7], "head", storage="int4")


def test_strided_input() -> None:
    x = torch.randn(7, 2, 3, 40).permute(1, 2, 0, 3)[..., ::2]
    assert not x.is_contiguous()
    for granularity in REDUCED_DIMS:
        assert_is_oracles(x, granularity, False)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [1, 3, 8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_channels(symmetric: bool, group_size: int, dtype: torch.dtype) -> None:
    """Each group as a vector of its own: constants, zeros and what is not a number too."""
    x = torch.randn(2, 3, 5, 24).to(dtype)
    x[0, 0, 0] = 0.0
    x[0, 0, 1] = -2.5
    x[0, 1, 2, 7], x[1, 0, 0, 23] = math.nan, math.inf
    groups = 24 // group_size
    codes, scale, zero_point = ops.kv_cache_quantize(x, "group", symmetric, group_size=group_size)
    rows = x.float().reshape(2, 3, 5 * groups, group_size)
    wanted, scales, zeros = oracle.quantize(rows.numpy(), "token_head", symmetric)
    np.testing.assert_array_equal(codes.numpy(), wanted.reshape(2, 3, 5, 24))
    np.testing.assert_array_equal(scale.numpy(), scales.reshape(2, 3, 5, groups))
    if symmetric:
        assert zero_point.shape == (0,)
    else:
        np.testing.assert_array_equal(zero_point.numpy(), zeros.reshape(2, 3, 5, groups))
    back = ops.kv_cache_dequantize(codes, scale, zero_point, group_size=group_size)
    poisoned = back.isnan().reshape(2, 3, 5, groups, group_size)
    assert torch.equal(poisoned, scale.isnan()[..., None].expand_as(poisoned))
    assert int(poisoned.sum()) == 2 * group_size
    steps = scale.repeat_interleave(group_size, 3)
    error = (back - x.float()).abs() - 0.5001 * steps - 1e-6
    assert error[~back.isnan()].amax() <= 0


@pytest.mark.parametrize("granularity", [*REDUCED_DIMS, "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_static(granularity: str, symmetric: bool) -> None:
    size = 8 if granularity == "group" else 0
    x = torch.randn(2, 3, 5, 40) * 2
    _, scale, zero_point = ops.kv_cache_quantize(x, granularity, symmetric, group_size=size)
    scale = scale * 0.5  # half the range: the rest saturates
    zeros = None if symmetric else zero_point
    codes, again, zeros_again = ops.kv_cache_quantize(x, granularity, symmetric, scale, zeros, size)
    assert torch.equal(again, scale) and again.data_ptr() != scale.data_ptr()
    if zeros is None:
        assert zeros_again.shape == (0,)
    else:
        assert torch.equal(zeros_again, zeros)
    repeats = 40 // scale.shape[3]
    steps, places = (
        np.broadcast_to(p.repeat_interleave(repeats if size else 1, 3).numpy(), x.shape)
        for p in (scale, torch.zeros_like(scale) if zeros is None else zeros)
    )
    for place in np.ndindex(*x.shape):
        wanted = oracle.quantize_static([x[place].item()], steps[place], places[place], symmetric)
        assert int(codes[place]) == wanted[0]
    assert int(codes.max()) == 127 and int(codes.min()) == (-127 if symmetric else -128)


def test_static_broadcasts() -> None:
    x = torch.randn(2, 3, 5, 8)
    scale = torch.full((1, 3, 1, 1), 0.02)
    codes, again, _ = ops.kv_cache_quantize(x, "token_head", scale=scale)
    assert torch.equal(codes, (x / 0.02).round().clamp(-127, 127).to(torch.int8))
    assert again.shape == (1, 3, 1, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_static_refuses_what_it_cannot_mark(bad: float) -> None:
    x = torch.randn(1, 1, 2, 4)
    x[0, 0, 1, 2] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        ops.kv_cache_quantize(x, "head", scale=torch.ones(1, 1, 1, 1))


def test_opcheck(opcheck: Any) -> None:
    x = torch.randn(2, 3, 5, 8).to(torch.bfloat16)
    for granularity in REDUCED_DIMS:
        opcheck("kv_cache_quantize", x, granularity, granularity != "token")
    opcheck("kv_cache_quantize", x, "group", False, group_size=4)
    scale = torch.ones(1, 3, 1, 1)
    opcheck("kv_cache_quantize", x, "head", True, scale)
    opcheck("kv_cache_quantize", x.transpose(1, 2), "token_head", False, scale[:, :1], scale[:, :1])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("x", {"x": torch.randn(3, 5, 8)}),
        ("x", {"x": torch.zeros(2, 3, 5, 8, dtype=torch.int8)}),
        ("granularity", {"granularity": "per_head"}),
        ("group_size", {"group_size": 4}),
        ("group_size", {"granularity": "group"}),
        ("group_size", {"granularity": "group", "group_size": 3}),
        ("scale", {"scale": torch.ones(1, 4, 1, 1)}),
        ("scale", {"scale": torch.ones(2, 3, 5, 1)}),
        ("scale", {"scale": torch.ones(3)}),
        ("scale", {"scale": torch.ones(1, 1, 1, 1, dtype=torch.float16)}),
        ("zero_point", {"zero_point": torch.ones(1, 1, 1, 1)}),
        ("zero_point", {"zero_point": torch.ones(1, 1, 1, 1), "symmetric": False}),
        ("zero_point", {"scale": torch.ones(1, 3, 1, 1), "symmetric": False}),
        (
            "zero_point",
            {
                "scale": torch.ones(1, 1, 1, 1),
                "zero_point": torch.ones(1, 3, 1, 1),
                "symmetric": False,
            },
        ),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    legal = {"x": torch.randn(2, 3, 5, 8), "granularity": "head"}
    with pytest.raises(UsageError) as error:
        ops.kv_cache_quantize(**{**legal, **change})
    assert error.value.field == field
