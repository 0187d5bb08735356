"""Checks of ``kv_cache_quantize`` and ``kv_cache_dequantize``; see ``npu_run.py``."""

from __future__ import annotations

import itertools

import torch
from npu_calls import FLOATS, draw, kept_reference, kernels_served, npu, refuses, same

from ascend_kv import ops
from ascend_kv.ops.registration import handed_over


def check_quantize_and_back() -> None:
    kinds = ("layer", "head", "token", "token_head", "channel", "group")
    for kind, symmetric, dtype in itertools.product(kinds, (True, False), FLOATS):
        shape = draw.choice([(2, 3, 5, 64), (1, 2, 130, 40), (1, 1, 900, 128)])
        x = torch.randn(shape).to(dtype)
        if draw.random() < 0.5:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        group = 8 if kind == "group" else 0
        found = npu("kv_cache_quantize", x, kind, symmetric, None, None, group)
        expected = ops.kv_cache_quantize(x, kind, symmetric, group_size=group)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        codes, scale, zero_point = expected
        zeros = draw.choice([None, zero_point]) if symmetric else zero_point
        back = npu("kv_cache_dequantize", codes, scale, zeros, group, dtype)
        same(back, ops.kv_cache_dequantize(codes, scale, zeros, group, dtype))
    kernels_served("kv_cache_quantize", "kv_cache_dequantize")


def check_given_scales() -> None:
    x = torch.randn(2, 3, 5, 64)
    shapes = ((1, 1, 1, 1), (2, 3, 1, 1), (1, 3, 1, 64), (1, 1, 5, 1), (1, 1, 1, 64))
    for shape, kind in zip(shapes, ("head", "head", "channel", "token", "channel"), strict=True):
        scale, zero_point = torch.rand(shape) * 0.02, torch.randn(shape)
        for zeros in (None, zero_point):
            found = npu("kv_cache_quantize", x, kind, zeros is None, scale, zeros)
            expected = ops.kv_cache_quantize(x, kind, zeros is None, scale, zeros)
            for one, other in zip(found, expected, strict=True):
                same(one, other)
            assert found[1].data_ptr() != scale.data_ptr()
            back = npu("kv_cache_dequantize", found[0], scale, zeros)
            same(back, ops.kv_cache_dequantize(found[0], scale, zeros))
    kernels_served("kv_cache_quantize", "kv_cache_dequantize")


def check_quantize_nothing_and_too_much() -> None:
    for shape, symmetric in itertools.product(((2, 3, 0, 8), (0, 3, 4, 8)), (True, False)):
        found = npu("kv_cache_quantize", torch.empty(shape), "head", symmetric)
        expected = ops.kv_cache_quantize(torch.empty(shape), "head", symmetric)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        same(npu("kv_cache_dequantize", *found[:2]), torch.empty(shape))
    x = torch.randn(1, 1, 2, 100_000)
    before = handed_over("kv_cache_quantize", "npu")
    same(npu("kv_cache_quantize", x, "channel")[0], ops.kv_cache_quantize(x, "channel")[0])
    kept_reference("kv_cache_quantize", "head_dim too large for the unified buffer", before)
    codes, scale = torch.ones(1, 2, 3, 8, dtype=torch.int8), torch.rand(1, 2, 3, 8)
    before = handed_over("kv_cache_dequantize", "npu")
    same(npu("kv_cache_dequantize", codes, scale), ops.kv_cache_dequantize(codes, scale))
    kept_reference("kv_cache_dequantize", "scales that differ by token and channel", before)


def check_quantize_refuses() -> None:
    x, scale = torch.randn(2, 3, 5, 64), torch.ones(2, 3, 1, 1)
    name = "kv_cache_quantize"
    refuses("x", "[3, 5, 64]", name, x[0], "head")
    refuses("x", "Double", name, x.double(), "head")
    refuses("granularity", "heads", name, x, "heads")
    refuses("group_size", "7", name, x, "group", True, None, None, 7)
    refuses("group_size", "8", name, x, "head", True, None, None, 8)
    refuses("scale", "[2, 3, 1, 64]", name, x, "head", True, torch.ones(2, 3, 1, 64))
    refuses("scale", "Half", name, x, "head", True, scale.half())
    refuses("zero_point", "[2, 3, 1, 1]", name, x, "head", True, scale, scale)
    refuses("zero_point", "None", name, x, "head", False, scale)
    refuses("zero_point", "[2, 3]", name, x, "head", False, scale, scale[..., 0, 0])
    codes = torch.zeros(2, 3, 5, 64, dtype=torch.int8)
    name = "kv_cache_dequantize"
    refuses("codes", "[5, 64]", name, codes[0, 0], scale)
    refuses("codes", "Float", name, x, scale)
    refuses("dtype", "Double", name, codes, scale, None, 0, torch.float64)
    refuses("group_size", "5", name, codes, scale, None, 5)
    refuses("scale", "[2, 2, 1, 1]", name, codes, scale[:, :2])
    refuses("zero_point", "[2, 3, 5, 1]", name, codes, scale, torch.ones(2, 3, 5, 1))
    refuses("scale", "meta", name, codes, scale.to("meta"))
