"""Checks of ``hca_compress`` and ``hca_decompress``; see ``npu_run.py``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from npu_calls import FLOATS, draw, kept_reference, kernels_served, npu, refuses, same

from ascend_kv import ops
from ascend_kv.ops.registration import handed_over


def check_compress() -> None:
    shapes = itertools.product((1, 2, 4, 128), (False, True), (64, 72, 512))
    for ratio, overlap, dim in shapes:
        batch = draw.choice([1, 3, 40])
        lengths = [draw.randrange(0, 3 * ratio + 2) for _ in range(batch)]
        lengths[0] = 2 * ratio + 1
        channels = 2 * dim if overlap else dim
        dtype, tokens = draw.choice(FLOATS), sum(lengths)
        kv, gate = torch.randn(2, tokens, channels).to(dtype)
        firsts = [draw.choice([0, 1, 5]) for _ in lengths]
        arguments: dict[str, Any] = {"overlap": overlap, "norm_eps": 1e-3}
        arguments["dtype"] = draw.choice([None, *FLOATS])
        if draw.random() < 0.7:
            arguments["position_bias"] = torch.randn(ratio, channels).to(draw.choice(FLOATS))
        if draw.random() < 0.7:
            arguments["norm_weight"] = torch.randn(dim).to(draw.choice(FLOATS))
        if draw.random() < 0.7:
            arguments["first_windows"] = firsts
            if overlap:
                before = torch.randn(2, batch, ratio, dim).to(dtype)
                arguments["previous_kv"], arguments["previous_gate"] = before
        if draw.random() < 0.7:
            arguments["rotary_dim"] = 8
            arguments["rotary_table"] = torch.rand(9 * ratio, 4, 2).to(draw.choice(FLOATS))
        found = npu("hca_compress", kv, gate, lengths, ratio, **arguments)
        expected = ops.hca_compress(kv, gate, lengths, ratio, **arguments)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # float32 sums in another order, then one rounding
        exact = ops.hca_compress(
            kv.float(), gate.float(), lengths, ratio,
            **{**arguments, "dtype": torch.float32,
               **{n: arguments[n].float() for n in ("previous_kv", "previous_gate")
                  if n in arguments}},
        )  # fmt: skip
        size = exact.abs().amax(-1, keepdim=True)
        eps = torch.finfo(found.dtype).eps
        assert ((found.float() - exact).abs() <= 1e-5 * size + 0.51 * eps * exact.abs()).all()
    kernels_served("hca_compress")


def check_compress_otherwise() -> None:
    kv = torch.randn(9, 64)
    assert npu("hca_compress", kv[:3], kv[:3], [3], 4).shape == (0, 64)
    assert npu("hca_compress", kv[:0], kv[:0], [], 4).shape == (0, 64)
    rotary = {"rotary_dim": 4, "rotary_table": torch.rand(9, 2, 2)}
    before = handed_over("hca_compress", "npu")
    same(npu("hca_compress", kv, kv, [9], 4, **rotary), ops.hca_compress(kv, kv, [9], 4, **rotary))
    reason = "rotary_dim, or the channels before it, not a multiple of 8"
    kept_reference("hca_compress", reason, before)
    wide = torch.randn(4, 100_008)
    before = handed_over("hca_compress", "npu")
    same(npu("hca_compress", wide, wide, [4], 4), ops.hca_compress(wide, wide, [4], 4))
    kept_reference("hca_compress", "a window too large for the unified buffer", before)


def check_compress_refuses() -> None:
    name, kv = "hca_compress", torch.randn(9, 64)
    previous = torch.randn(1, 4, 32)
    refuses("kv", "[64]", name, kv[0], kv, [9], 4)
    refuses("kv", "[9, 63]", name, kv[:, :63], kv[:, :63], [9], 4, overlap=True)
    refuses("kv", "Int", name, kv.int(), kv.int(), [9], 4)
    refuses("gate", "[8, 64]", name, kv, kv[:8], [9], 4)
    refuses("gate", "Half", name, kv, kv.half(), [9], 4)
    refuses("ratio", "0", name, kv, kv, [9], 0)
    refuses("lengths", "-1", name, kv, kv, [10, -1], 4)
    refuses("lengths", "8", name, kv, kv, [8], 4)
    refuses("position_bias", "[3, 64]", name, kv, kv, [9], 4, position_bias=kv[:3])
    refuses("position_bias", "Int", name, kv, kv, [9], 4, position_bias=kv[:4].int())
    refuses("norm_weight", "[63]", name, kv, kv, [9], 4, norm_weight=kv[0, :63])
    refuses("first_windows", "2", name, kv, kv, [9], 4, first_windows=[0, 0])
    refuses("first_windows", "-1", name, kv, kv, [9], 4, first_windows=[-1])
    refuses("previous_kv", "a tensor", name, kv, kv, [9], 4, previous_kv=previous)
    refuses("previous_kv", "None", name, kv, kv, [9], 4, overlap=True, first_windows=[1])
    refuses("previous_gate", "None", name, kv, kv, [9], 4, overlap=True, previous_kv=previous)
    pair = {"previous_kv": previous, "previous_gate": previous[:, :3]}
    refuses("previous_gate", "[1, 3, 32]", name, kv, kv, [9], 4, overlap=True, **pair)
    pair = {"previous_kv": previous.half(), "previous_gate": previous}
    refuses("previous_kv", "Half", name, kv, kv, [9], 4, overlap=True, **pair)
    table = torch.rand(5, 4, 2)
    refuses("rotary_dim", "7", name, kv, kv, [9], 4, rotary_dim=7, rotary_table=table)
    refuses("rotary_table", "None", name, kv, kv, [9], 4, rotary_dim=8)
    refuses("rotary_table", "a tensor", name, kv, kv, [9], 4, rotary_table=table)
    short = {"rotary_dim": 8, "rotary_table": table[:4]}
    refuses("rotary_table", "[4, 4, 2]", name, kv, kv, [9], 4, **short)
    refuses("dtype", "Int", name, kv, kv, [9], 4, dtype=torch.int32)


def check_decompress() -> None:
    for dtype in FLOATS:
        entries = torch.randn(5, 2, 72).to(dtype)[:, 1]
        same(
            npu("hca_decompress", entries, [13, 3, 8], 4),
            ops.hca_decompress(entries, [13, 3, 8], 4),
        )
    assert npu("hca_decompress", entries[:0], [3], 4).shape == (0, 72)
    before = handed_over("hca_decompress", "npu")
    wide = torch.randn(1, 100_000)
    same(npu("hca_decompress", wide, [2], 2), wide.repeat(2, 1))
    kept_reference("hca_decompress", "an entry too large for the unified buffer", before)
    refuses("entries", "[4, 72]", "hca_decompress", entries[:4], [13, 3, 8], 4)
    refuses("entries", "[72]", "hca_decompress", entries[0], [4], 4)
    refuses("entries", "Int", "hca_decompress", entries.int(), [20], 4)
    refuses("ratio", "0", "hca_decompress", entries, [20], 0)
    refuses("lengths", "-4", "hca_decompress", entries, [-4], 4)
