"""Caches full of garbage that kv_cache_store writes to, and what it should have written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import torch

from ascend_kv import ops
from ascend_kv.formats import format_of

K, N, S = 7, 2, 16


class Target:
    """Caches and parameters full of garbage, and a copy of it to see what changed."""

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        granularity: str = "token_head",
        symmetric: bool = True,
        dim: int = 40,
        block_size: int = S,
    ) -> None:
        shape = (K, N, block_size, dim)
        if dtype == torch.int8:
            self.caches = [torch.randint(-128, 128, shape, dtype=dtype) for _ in range(2)]
        else:
            self.caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
        self.scales: dict[str, torch.Tensor] = {}
        if dtype == torch.int8:
            heads = N if granularity == "token_head" else 1
            for name in ("scale",) if symmetric else ("scale", "zero_point"):
                for side in ("key", "value"):
                    self.scales[f"{side}_{name}"] = torch.full((K, heads, block_size), math.nan)
        self.before = [x.clone() for x in self]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.caches
        yield from self.scales.values()

    def store(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, **options: Any
    ) -> None:
        ops.kv_cache_store(key, value, *self.caches, slots, **self.scales, **options)

    def assert_only_written(self, slots: torch.Tensor) -> None:
        """What lies in other slots is still the garbage of before, bit for bit."""
        for now, before in zip(self, self.before, strict=True):
            untouched = torch.ones(K * now.shape[2], dtype=torch.bool)
            untouched[slots[slots >= 0].long()] = False
            untouched = untouched.view(K, now.shape[2])
            left, was = (x.transpose(1, 2)[untouched] for x in (now, before))
            assert bytes_of(left) == bytes_of(was)


def bytes_of(x: torch.Tensor) -> bytes:
    return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(torch.uint8).numpy().tobytes()


def draw(tokens: int, dim: int = 40, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [(torch.randn(tokens, N, dim) * 3).to(dtype) for _ in range(2)]


def slots_for(tokens: int, block_size: int = S) -> torch.Tensor:
    return torch.randperm(K * block_size)[:tokens]


def assert_quantized(target: Target, inputs: list[torch.Tensor], slots: torch.Tensor) -> None:
    """Codes, scales and zero points are the oracle's, exactly."""
    block_size = target.caches[0].shape[2]
    for side, x, cache in zip(("key", "value"), inputs, target.caches, strict=True):
        scale = target.scales[f"{side}_scale"]
        zero_point = target.scales.get(f"{side}_zero_point")
        granularity = "token_head" if scale.shape[1] == N else "token"
        dense = x.float().numpy().transpose(1, 0, 2)[None]
        codes, scales, zeros = oracle.quantize(dense, granularity, zero_point is None)
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            place = (slot // block_size, slice(None), slot % block_size)
            np.testing.assert_array_equal(cache[place].numpy(), codes[0, :, token])
            np.testing.assert_array_equal(scale[place].numpy(), scales[0, :, token, 0])
            if zero_point is not None:
                np.testing.assert_array_equal(zero_point[place].numpy(), zeros[0, :, token, 0])


LOW_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


def low_bit_target(
    sides: tuple[torch.dtype, torch.dtype], granularity: str, symmetric: bool, dim: int
) -> Target:
    """Keys and values in any of the quantized formats."""
    target = Target(granularity=granularity, dim=dim)
    target.scales = {}
    for number, (side, dtype) in enumerate(zip(("key", "value"), sides, strict=True)):
        kind = format_of(dtype)
        shape = (K, N, S, dim // kind.codes_per_element)
        cache = torch.randint(0, 256, shape, dtype=torch.uint8)
        target.caches[number] = cache.view(dtype)
        lies = {
            "token_head": (K, N, S),
            "token": (K, 1, S),
            "group": (K, N, S, dim // 8),
        }[granularity]
        for name in ("scale", "zero_point") if kind.zero_points and not symmetric else ("scale",):
            garbage = torch.full(lies, math.nan, dtype=kind.scale_dtype)
            target.scales[f"{side}_{name}"] = garbage
    target.before = [x.clone() for x in target]
    return target
