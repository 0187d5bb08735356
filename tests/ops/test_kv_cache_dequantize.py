"""kv_cache_dequantize: code * scale + zero point, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_rounded, assert_within, largest

from ascend_kv import ops
from ascend_kv.errors import UsageError

SCALE_SHAPES = [(2, 1, 1, 1), (2, 3, 1, 1), (2, 1, 5, 1), (2, 3, 5, 1), (2, 3, 1, 40), (1, 1, 1, 1)]


def draw(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(-128, 128, (2, 3, 5, 40), dtype=torch.int8)
    return codes, torch.rand(shape) * 0.1, torch.randn(shape)


def truth(codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> Any:
    scales, zeros = (
        np.broadcast_to(0.0 if x is None else x.double().numpy(), codes.shape)
        for x in (scale, zero_point)
    )
    out = np.empty(codes.shape)
    for place in np.ndindex(*codes.shape):
        out[place] = float(codes[place]) * scales[place] + zeros[place]
    return out


@pytest.mark.parametrize("shape", SCALE_SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_values(shape: tuple[int, ...], symmetric: bool) -> None:
    codes, scale, zero_point = draw(shape)
    zeros = None if symmetric else zero_point
    given = ops.kv_cache_dequantize(codes, scale, zeros)
    exact = truth(codes, scale, zeros)
    assert given.dtype == torch.float32
    assert_within(given, exact, np.finfo(np.float32).eps * largest(exact))
    if symmetric:
        assert torch.equal(ops.kv_cache_dequantize(codes, scale, torch.empty(0)), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    codes, scale, zero_point = draw((2, 3, 5, 1))
    given = ops.kv_cache_dequantize(codes, scale, zero_point, dtype=dtype)
    exact = truth(codes, scale, zero_point)
    assert given.dtype == dtype
    assert_rounded(given, exact, slack=np.finfo(np.float32).eps * largest(exact))


def test_groups_of_channels() -> None:
    codes, scale, zero_point = draw((2, 3, 5, 5))
    given = ops.kv_cache_dequantize(codes, scale, zero_point, group_size=8)
    wide = [x.repeat_interleave(8, 3) for x in (scale, zero_point)]
    assert torch.equal(given, ops.kv_cache_dequantize(codes, *wide))


def test_strided_and_empty() -> None:
    codes, scale, _ = draw((2, 3, 5, 1))
    turned = codes.transpose(1, 2), scale.transpose(1, 2)
    given = ops.kv_cache_dequantize(*turned)
    assert given.is_contiguous()
    assert torch.equal(given, ops.kv_cache_dequantize(codes, scale).transpose(1, 2))
    assert ops.kv_cache_dequantize(codes[:, :, :0], scale[:, :, :0]).shape == (2, 3, 0, 40)


def test_edges() -> None:
    codes = torch.tensor([0, 1, -127, 127], dtype=torch.int8).view(1, 1, 1, 4)

    def read(scale: float, dtype: torch.dtype) -> list[float]:
        return (
            ops.kv_cache_dequantize(codes, torch.full((1, 1, 1, 1), scale), dtype=dtype)
            .ravel()
            .tolist()
        )

    assert all(math.isnan(x) for x in read(math.nan, torch.float32))
    assert read(0.0, torch.float32) == [0.0] * 4
    assert read(1000.0, torch.float16) == [0.0, 1000.0, -math.inf, math.inf]


def test_opcheck(opcheck: Any) -> None:
    codes, scale, zero_point = draw((2, 3, 5, 1))
    opcheck("kv_cache_dequantize", codes, scale)
    opcheck("kv_cache_dequantize", codes, scale, zero_point, 0, torch.float16)
    opcheck("kv_cache_dequantize", codes.transpose(1, 2), scale.transpose(1, 2))
    opcheck("kv_cache_dequantize", codes, torch.rand(2, 3, 5, 5), None, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("codes", {"codes": torch.zeros(3, 5, 8, dtype=torch.int8)}),
        ("codes", {"codes": torch.zeros(2, 3, 5, 8)}),
        ("scale", {"scale": torch.ones(2, 3, 4, 1)}),
        ("scale", {"scale": torch.ones(1, 1, 1, 1, dtype=torch.float64)}),
        ("scale", {"group_size": 4, "scale": torch.ones(2, 3, 5, 4)}),
        ("zero_point", {"zero_point": torch.ones(2, 3, 5, 1)}),
        ("group_size", {"group_size": 3}),
        ("group_size", {"group_size": -1}),
        ("dtype", {"dtype": torch.int32}),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    legal = {
        "codes": torch.zeros(2, 3, 5, 8, dtype=torch.int8),
        "scale": torch.ones(2, 3, 1, 1),
    }
    with pytest.raises(UsageError) as error:
        ops.kv_cache_dequantize(**{**legal, **change})
    assert error.value.field == field
