"""KVCacheQuantize, used as its documentation says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from ascend_kv import KVCacheQuantize
from ascend_kv.errors import UsageError

SHAPES = {
    "per_layer": (2, 1, 1, 1),
    "per_head": (2, 3, 1, 1),
    "per_token": (2, 1, 5, 1),
    "per_token_head": (2, 3, 5, 1),
    "per_channel": (2, 3, 1, 16),
}


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16) * 4 + 1


@pytest.mark.parametrize("mode", SHAPES)
def test_symmetric(mode: str) -> None:
    k, v = draw()
    quantizer = KVCacheQuantize(quant_mode=mode, scale_type="dynamic")
    k_int8, v_int8, k_scale, v_scale = quantizer.quantize(k, v)
    for x, codes, scale in ((k, k_int8, k_scale), (v, v_int8, v_scale)):
        wanted, scales, _ = oracle.quantize(x.numpy(), mode.removeprefix("per_"), True)
        np.testing.assert_array_equal(codes.numpy(), wanted)
        np.testing.assert_array_equal(scale.numpy(), scales)
        assert scale.shape == SHAPES[mode]
    back = quantizer.dequantize(k_int8, v_int8, k_scale, v_scale)
    for x, y, scale in zip((k, v), back, (k_scale, v_scale), strict=True):
        assert ((x - y).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize("mode", SHAPES)
def test_asymmetric(mode: str) -> None:
    k, v = draw()
    quantizer = KVCacheQuantize(quant_mode=mode, symmetric=False)
    stored = quantizer.quantize(k, v)
    k_int8, v_int8, k_scale, v_scale, k_zero_point, v_zero_point = stored
    wanted, scales, zeros = oracle.quantize(v.numpy(), mode.removeprefix("per_"), False)
    np.testing.assert_array_equal(v_int8.numpy(), wanted)
    np.testing.assert_array_equal(v_scale.numpy(), scales)
    np.testing.assert_array_equal(v_zero_point.numpy(), zeros)
    assert k_zero_point.shape == k_scale.shape == SHAPES[mode]
    for x, y, scale in zip((k, v), quantizer.dequantize(*stored), (k_scale, v_scale), strict=True):
        assert ((x - y).abs() <= scale * 0.5001).all()
    assert stored.k_int8 is k_int8


def test_the_defaults_are_per_head_dynamic_symmetric() -> None:
    k, v = draw()
    results = KVCacheQuantize().quantize(k, v)
    assert len(results) == 4 and results.k_scale.shape == SHAPES["per_head"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    k, v = (x.to(dtype) for x in draw())
    quantizer = KVCacheQuantize("per_token_head")
    stored = quantizer.quantize(k, v)
    assert stored.k_int8.dtype == torch.int8 and stored.k_scale.dtype == torch.float32
    assert quantizer.dequantize(*stored).v.dtype == torch.float32
    back = quantizer.dequantize(*stored, dtype=dtype)
    assert back.k.dtype == back.v.dtype == dtype
    exact = stored.v_int8.double() * stored.v_scale.double()
    assert ((back.v.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()


def test_nan_reads_back_as_nan() -> None:
    k, v = draw()
    k[0, 1, 2, 3] = math.nan
    quantizer = KVCacheQuantize("per_token_head")
    back = quantizer.dequantize(*quantizer.quantize(k, v))
    assert back.k[0, 1, 2].isnan().all() and int(back.k.isnan().sum()) == 16
    assert back.v.isfinite().all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_static(symmetric: bool) -> None:
    k, v = draw()
    scales: dict[str, Any] = {"k_scale": torch.full((1, 3, 1, 1), 0.01), "v_scale": 0.05}
    if not symmetric:
        scales |= {"k_zero_point": torch.full((1, 3, 1, 1), 0.2), "v_zero_point": 1}
    quantizer = KVCacheQuantize("per_head", "static", symmetric, **scales)
    stored = quantizer.quantize(k, v)
    zero = 0.0 if symmetric else 0.2
    for place in np.ndindex(*k.shape):
        step, zero_point = np.float32(0.01), np.float32(zero)
        wanted = oracle.quantize_static([k[place].item()], step, zero_point, symmetric)
        assert int(stored.k_int8[place]) == wanted[0]
    assert stored.v_scale.shape == (1, 1, 1, 1)
    back = quantizer.dequantize(*stored)
    inside = (v - (0 if symmetric else 1)).abs() < 0.05 * 127
    assert ((back.v - v).abs()[inside] <= 0.0251).all()
    with pytest.raises(UsageError) as error:
        quantizer.quantize(k, v * math.nan)
    assert error.value.field == "v"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("quant_mode", {"quant_mode": "per_block"}),
        ("quant_mode", {"quant_mode": "head"}),
        ("scale_type", {"scale_type": "calibrated"}),
        ("k_scale", {"scale_type": "static"}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0}),
        ("k_scale", {"k_scale": 1.0}),
        (
            "k_zero_point",
            {"scale_type": "static", "k_scale": 1.0, "v_scale": 1.0, "symmetric": False},
        ),
        (
            "k_zero_point",
            {"scale_type": "static", "k_scale": 1.0, "v_scale": 1.0, "k_zero_point": 1.0},
        ),
        ("k_scale", {"scale_type": "static", "k_scale": -1.0, "v_scale": 1.0}),
        ("k_scale", {"scale_type": "static", "k_scale": 0.0, "v_scale": 1.0}),
        ("k_scale", {"scale_type": "static", "k_scale": 1e-60, "v_scale": 1.0}),
        ("v_scale", {"scale_type": "static", "k_scale": 1, "v_scale": torch.zeros(1, 3, 1, 1)}),
        ("k_scale", {"scale_type": "static", "k_scale": [1.0], "v_scale": 1.0}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0, "v_scale": "1.0"}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0, "v_scale": True}),
        ("symmetric", {"symmetric": "no"}),
        ("symmetric", {"symmetric": None}),
        ("quant_mode", {"quant_mode": ["per_head"]}),
        ("quant_mode", {"quant_mode": None}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0, "v_scale": math.nan}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0, "v_scale": math.inf}),
        ("v_scale", {"scale_type": "static", "k_scale": 1.0, "v_scale": torch.ones(3)}),
        (
            "k_zero_point",
            {
                "scale_type": "static",
                "symmetric": False,
                "k_scale": 1.0,
                "v_scale": 1.0,
                "k_zero_point": math.nan,
                "v_zero_point": 0.0,
            },
        ),
    ],
)
def test_settings_that_are_refused(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        KVCacheQuantize(**arguments)
    assert error.value.field == field


def test_refused_tensors() -> None:
    k, v = draw()
    quantizer = KVCacheQuantize()
    for field, call in (
        ("v", lambda: quantizer.quantize(k, v[:, :2])),
        ("k", lambda: quantizer.quantize(k[0], v[0])),
        ("k", lambda: quantizer.quantize(k.to(torch.int32), v)),
        ("v", lambda: quantizer.quantize(k, v.double())),
    ):
        with pytest.raises(UsageError) as error:
            call()
        assert error.value.field == field
    stored = quantizer.quantize(k, v)
    with pytest.raises(UsageError, match="k_zero_point"):
        quantizer.dequantize(*stored, stored.k_scale, stored.v_scale)
    with pytest.raises(UsageError, match="k_zero_point"):
        KVCacheQuantize(symmetric=False).dequantize(*stored)
    static = KVCacheQuantize("per_layer", "static", k_scale=torch.ones(1, 3, 1, 1), v_scale=1.0)
    with pytest.raises(UsageError, match=r"k_scale.*\(2, 1, 1, 1\)"):
        static.quantize(k, v)


def test_what_dequantize_refuses_is_named_as_its_arguments_are() -> None:
    quantizer = KVCacheQuantize("per_head", symmetric=False)
    good = quantizer.quantize(*draw())._asdict()
    one = torch.ones(2, 3, 5, 1)
    for field, changes in {
        "k_int8": {"k_int8": good["k_int8"].float()},
        "v_int8": {"v_int8": good["v_int8"].short()},
        "v_int8 ": {"v_int8": good["v_int8"][:, :, :4]},
        "k_int8 ": {"k_int8": None},
        "k_int8  ": {"k_int8": good["k_int8"][0], "v_int8": good["v_int8"][0]},
        "k_scale": {"k_scale": one},  # per token and head
        "v_scale": {"v_scale": good["v_scale"].double()},
        "v_scale ": {"v_scale": good["v_scale"][:, :2]},
        "k_scale ": {"k_scale": None},
        "v_scale  ": {"v_scale": 1.0},
        "k_zero_point": {"k_zero_point": one},
        "v_zero_point": {"v_zero_point": good["v_zero_point"].half()},
        "k_zero_point ": {"k_zero_point": [0.0]},
        "dtype": {"dtype": torch.int8},
    }.items():
        with pytest.raises(UsageError) as error:
            quantizer.dequantize(**(good | changes))
        assert error.value.field == field.strip()
    with pytest.raises(UsageError, match="k: got None"):
        quantizer.quantize(None, good["k_scale"])  # type: ignore[arg-type]
