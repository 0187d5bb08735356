"""Checks that operators work in a captured graph; see ``npu_run.py``.

While a graph is captured, launches are recorded and nothing runs: a host function that waited for
a kernel or looked at what it wrote would find nothing. A replay must compute on what lies in the
tensors then, so a host function must not have looked at them either.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from npu_calls import captured, npu, same

from ascend_kv import ops

Tensor = torch.Tensor


def refill(*tensors: Tensor) -> None:
    """New numbers in the same memory."""
    for x in tensors:
        x.copy_(torch.randn(x.shape) * 3)


def check_quantize_in_a_graph() -> None:
    def both(call: Any, x: Tensor, kind: str) -> tuple[Tensor, ...]:
        codes, scale, zero_point = call("kv_cache_quantize", x, kind, False)
        return codes, scale, zero_point, call("kv_cache_dequantize", codes, scale, zero_point)

    for kind in ("layer", "channel", "token_head"):
        x = torch.full((2, 3, 200, 64), float("nan"))
        found, replay = captured(lambda x=x, kind=kind: both(npu, x, kind))
        for _ in range(2):
            refill(x)
            replay()
            for one, other in zip(found, both(reference, x, kind), strict=True):
                same(one, other)


def check_paged_in_a_graph() -> None:
    for dtype, kind in itertools.product((torch.int8, torch.bfloat16), (torch.int32, torch.int64)):
        paged(dtype, kind)


def paged(dtype: torch.dtype, slot_type: torch.dtype) -> None:
    shape, tokens = (6, 3, 16, 64), 9
    key, value = torch.full((2, tokens, 3, 64), float("nan"), dtype=torch.bfloat16)
    slots = torch.full((tokens,), -1, dtype=slot_type)
    tables = torch.zeros(2, 3, dtype=torch.int32)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(shape[:3]) for _ in range(2)] if dtype is torch.int8 else []
    mutated = [*caches, *scales]

    def both(call: Any, *mutated: Tensor) -> Any:
        given = dict(zip(("key_scale", "value_scale"), mutated[2:], strict=False))
        call("kv_cache_store", key, value, *mutated[:2], slots, **given)
        return call("kv_cache_load", *mutated[:2], tables, [40, 17], dtype=key.dtype, **given)

    found, replay = captured(lambda: both(npu, *mutated))
    for _ in range(2):
        refill(key, value)
        slots.copy_(torch.randperm(96)[:tokens])
        tables.copy_(torch.randperm(6).view(2, 3))
        copies = [x.clone() for x in mutated]
        replay()
        for one, other in zip(found, both(reference, *copies), strict=True):
            same(one, other)
        for one, other in zip(mutated, copies, strict=True):
            same(one, other)


def check_compress_in_a_graph() -> None:
    compress(128, False)
    compress(4, True)


def compress(ratio: int, overlap: bool) -> None:
    channels, lengths = 128 * (1 + overlap), [2 * ratio + 1, ratio]
    kv, gate = torch.full((2, sum(lengths), channels), float("nan"))
    bias, weight = torch.randn(ratio, channels), torch.randn(128)

    def both(call: Any) -> tuple[Tensor, Tensor]:
        entries = call("hca_compress", kv, gate, lengths, ratio, position_bias=bias,
                       overlap=overlap, norm_weight=weight)  # fmt: skip
        return entries, call("hca_decompress", entries, lengths, ratio)

    found, replay = captured(lambda: both(npu))
    for _ in range(2):
        refill(kv, gate)
        replay()
        for one, other in zip(found, both(reference), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def reference(name: str, *args: Any, **kwargs: Any) -> Any:
    """The operator on CPU tensors."""
    return getattr(ops, name)(*args, **kwargs)
