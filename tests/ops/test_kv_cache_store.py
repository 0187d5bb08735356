"""kv_cache_store: the bytes it writes, and the bytes it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import oracle_formats
import pytest
import torch
from store_target import (
    LOW_BITS,
    K,
    N,
    S,
    Target,
    assert_quantized,
    bytes_of,
    draw,
    low_bit_target,
    slots_for,
)

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.formats import format_of
from ascend_kv.geometry import format_spec


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("granularity", ["token", "token_head"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(tokens: int, granularity: str, symmetric: bool) -> None:
    target = Target(granularity=granularity, symmetric=symmetric)
    inputs, slots = draw(tokens), slots_for(tokens)
    target.store(*inputs, slots)
    assert_quantized(target, inputs, slots)
    target.assert_only_written(slots)


@pytest.mark.parametrize("granularity", ["token", "token_head", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", LOW_BITS)
def test_fp8_and_int4(
    key: torch.dtype, dtype: torch.dtype, symmetric: bool, granularity: str
) -> None:
    """Each beside another format for the values; bytes are the oracle's."""
    sides = key, LOW_BITS[LOW_BITS.index(key) - 1]
    dim = 24
    target = low_bit_target(sides, granularity, symmetric, dim)
    inputs, slots = draw(9, dim, dtype), slots_for(9)
    inputs[0][4, 1, 3], inputs[1][5, 0, 7] = math.nan, math.inf
    inputs[0][2], inputs[1][3] = 0.0, -7.5
    slots[6] = -1
    target.store(*inputs, slots)
    target.assert_only_written(slots)
    for side, x, cache in zip(("key", "value"), inputs, target.caches, strict=True):
        kind = format_of(cache.dtype)
        zero_point = target.scales.get(f"{side}_zero_point")
        dense = x.float().numpy().transpose(1, 0, 2)[None]
        if granularity == "group":
            dense = dense.reshape(1, N, -1, 8)
        name = "token_head" if granularity == "group" else granularity
        codes, scales, zeros = oracle_formats.quantize(dense, name, kind.name, zero_point is None)
        codes = codes.reshape(N, 9, -1)
        wanted = {"scale": scales, "zero_point": zeros}
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            place = slot // S, slice(None), slot % S
            stored = cache.view(torch.uint8)[place].numpy()
            np.testing.assert_array_equal(stored, codes[:, token])
            for part, values in wanted.items():
                given = target.scales.get(f"{side}_{part}")
                if given is not None:
                    rows = values.reshape(values.shape[1], 9, -1)[:, token]
                    np.testing.assert_array_equal(given[place].numpy().reshape(rows.shape), rows)


def test_fp8_and_int4_mistakes() -> None:
    inputs, slots = draw(3, 24), slots_for(3)
    target = low_bit_target((torch.uint8, torch.float8_e5m2), "token_head", True, 24)
    with pytest.raises(UsageError, match="dynamic: got False.*int4"):
        target.store(*inputs, slots, dynamic=False)
    with pytest.raises(UsageError, match="key: got .*24"):
        target.store(*draw(3, 12), slots)
    float_scales = {**target.scales, "key_scale": target.scales["key_scale"].float()}
    with pytest.raises(UsageError, match="key_scale: got torch.float32; legal: torch.float16"):
        ops.kv_cache_store(*inputs, *target.caches, slots, **float_scales)
    zeros = {**target.scales, "value_zero_point": torch.zeros(K, N, S)}
    with pytest.raises(UsageError, match="value_zero_point.*fp8_e5m2 has no zero points"):
        ops.kv_cache_store(*inputs, *target.caches, slots, **zeros)
    with pytest.raises(UsageError, match="value_cache"):
        caches = target.caches[0], target.caches[1][..., :20]
        ops.kv_cache_store(*inputs, *caches, slots, **target.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_types(dtype: torch.dtype, stored: torch.dtype) -> None:
    target = Target(stored)
    inputs, slots = draw(7, dtype=dtype), slots_for(7)
    target.store(*inputs, slots)
    target.assert_only_written(slots)
    if stored == torch.int8:
        assert_quantized(target, inputs, slots)
        return
    for x, cache in zip(inputs, target.caches, strict=True):
        assert torch.equal(cache[slots // S, :, slots % S], x.to(stored))


@pytest.mark.parametrize("dim", [40, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_sizes(dim: int, block_size: int) -> None:
    target = Target(dim=dim, block_size=block_size)
    tokens = min(33, K * block_size)
    inputs, slots = draw(tokens, dim), slots_for(tokens, block_size)
    target.store(*inputs, slots)
    assert_quantized(target, inputs, slots)


@pytest.mark.parametrize("stored", [torch.int8, torch.float16])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_skipped_slots_write_nothing(stored: torch.dtype, slot_dtype: torch.dtype) -> None:
    target = Target(stored)
    inputs, slots = draw(7), slots_for(7).to(slot_dtype)
    slots[[0, 3, 6]] = -1
    inputs[0][3], inputs[1][0] = math.nan, math.inf
    target.store(*inputs, slots)
    target.assert_only_written(slots)
    kept = slots >= 0
    if stored == torch.int8:
        assert_quantized(target, [x[kept] for x in inputs], slots[kept])
    else:
        where = slots[kept].long()
        assert torch.equal(target.caches[1][where // S, :, where % S], inputs[1][kept].half())


def test_all_slots_skipped() -> None:
    target = Target()
    target.store(*draw(3), torch.full((3,), -1))
    target.assert_only_written(torch.empty(0))


def test_strided_input_and_caches() -> None:
    slots = slots_for(7)
    heads_first = [torch.randn(N, 7, 40).transpose(0, 1) for _ in range(2)]
    target, strided = Target(), Target()
    strided.caches = [torch.stack((x, x), 1)[:, 1] for x in strided.caches]
    strided.scales = {name: torch.stack((x, x), 1)[:, 1] for name, x in strided.scales.items()}
    for each in (target, strided):
        each.store(*heads_first, slots)
        assert_quantized(each, heads_first, slots)
    assert not strided.caches[0].is_contiguous()


def test_every_token_has_its_own_scale() -> None:
    """A later, larger token must not clip, nor change an earlier one."""
    target = Target()
    slots = slots_for(2)
    small, large = draw(1), [x * 1000 for x in draw(1)]
    target.store(*small, slots[:1])
    kept = [x.clone() for x in target]
    target.store(*large, slots[1:])
    first = (int(slots[0]) // S, slice(None), int(slots[0]) % S)
    for now, before in zip(target, kept, strict=True):
        assert torch.equal(now[first], before[first])
    assert_quantized(target, large, slots[1:])


@pytest.mark.parametrize("groups", [2, 5, 20])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_channels(groups: int, symmetric: bool) -> None:
    """Each group of a vector is quantized as a vector of its own; NaN stays in its group."""
    target, slots = Target(), slots_for(7)
    slots[2] = -1
    for name in ("scale",) if symmetric else ("scale", "zero_point"):
        for side in ("key", "value"):
            target.scales[f"{side}_{name}"] = torch.full((K, N, S, groups), math.nan)
    target.before = [x.clone() for x in target]
    inputs = draw(7)
    inputs[0][1, 0, 3] = math.inf
    target.store(*inputs, slots)
    target.assert_only_written(slots)
    for side, x, cache in zip(("key", "value"), inputs, target.caches, strict=True):
        rows = x.reshape(1, 7 * N, groups, 40 // groups).numpy()
        codes, scales, zeros = oracle.quantize(rows, "token_head", symmetric)
        wanted = {"scale": scales.reshape(7, N, groups), "zero_point": zeros.reshape(7, N, groups)}
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            place = (slot // S, slice(None), slot % S)
            np.testing.assert_array_equal(cache[place], codes.reshape(7, N, 40)[token])
            for name in ("scale",) if symmetric else ("scale", "zero_point"):
                stored = target.scales[f"{side}_{name}"][place]
                np.testing.assert_array_equal(stored, wanted[name][token])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_nan_and_infinity_poison_their_own_vector(bad: float, symmetric: bool) -> None:
    target = Target(symmetric=symmetric)
    key, value = draw(3)
    key[1, 0, 5] = bad
    slots = slots_for(3)
    target.store(key, value, slots)
    place = (int(slots[1]) // S, 0, int(slots[1]) % S)
    assert math.isnan(target.scales["key_scale"][place])
    assert not target.caches[0][place].any()
    assert_quantized(target, [key, value], slots)


def test_half_overflows_to_infinity() -> None:
    target = Target(torch.float16)
    key, value = draw(1)
    key[0, 0, :3] = torch.tensor([65504.0, 65520.0, -1e30])
    target.store(key, value, torch.tensor([5]))
    assert target.caches[0][0, 0, 5, :3].tolist() == [65504.0, math.inf, -math.inf]


def test_positions() -> None:
    target = Target()
    inputs, slots = draw(4), slots_for(4)
    slots[2] = -1
    places = torch.full((K, N, S), -7, dtype=torch.int32)
    target.store(*inputs, slots, key_positions=places, positions=torch.tensor([10, 11, 12, 13]))
    wanted = torch.full((K, N, S), -7, dtype=torch.int32)
    for token in (0, 1, 3):
        wanted[int(slots[token]) // S, :, int(slots[token]) % S] = 10 + token
    assert torch.equal(places, wanted)


@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes(symmetric: bool) -> None:
    """One vector of four values in slot 3 (block 1, offset 1), to the byte."""
    caches = [torch.zeros(2, 1, 2, 4, dtype=torch.int8) for _ in range(2)]
    names = ("key_scale", "value_scale")
    names += () if symmetric else ("key_zero_point", "value_zero_point")
    scales = {name: torch.zeros(2, 1, 2) for name in names}
    x = torch.tensor([[[2.0, -1.0, 0.5, 127.0]]])
    if not symmetric:
        x = torch.tensor([[[0.0, 255.0, 1.5, 2.5]]])
    ops.kv_cache_store(x, x, *caches, torch.tensor([3]), **scales)
    if symmetric:  # scale 1.0; 0.5 rounds to even
        codes, scale = bytes.fromhex("02ff007f"), bytes.fromhex("0000803f")
    else:  # scale 1.0, zero point 128; -126.5 and -125.5 round to even
        codes, scale = bytes.fromhex("807f8282"), bytes.fromhex("0000803f")
        assert bytes_of(scales["key_zero_point"]) == bytes(12) + bytes.fromhex("00000043")
    assert bytes_of(caches[0]) == bytes_of(caches[1]) == bytes(12) + codes
    assert bytes_of(scales["key_scale"]) == bytes_of(scales["value_scale"]) == bytes(12) + scale


@pytest.mark.parametrize("granularity", ["token", "token_head"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "float16", "bfloat16", "float32"])
def test_storage_is_what_the_format_says(name: str, granularity: str, symmetric: bool) -> None:
    spec = format_spec(name, granularity, symmetric)
    target = Target(getattr(torch, name), granularity, symmetric, dim=80, block_size=24)
    target.store(*draw(9, 80), slots_for(9, 24))
    assert sum(x.nbytes for x in target) == K * 24 * spec.token_bytes(N, 80)


def test_opcheck(opcheck: Any) -> None:
    slots = torch.tensor([5, -1, 9])
    places = {"key_positions": torch.zeros(K, N, S, dtype=torch.int32), "positions": slots}
    for stored, granularity, symmetric, extra in (
        (torch.int8, "token_head", True, {}),
        (torch.int8, "token", False, places),
        (torch.float16, "token_head", True, {}),
    ):
        target = Target(stored, granularity, symmetric, dim=8)
        opcheck("kv_cache_store", *draw(3, 8), *target.caches, slots, **target.scales, **extra)
    static = {name: torch.ones(1, 1, 1, 1) for name in ("key_scale", "value_scale")}
    target = Target(dim=8)
    opcheck("kv_cache_store", *draw(3, 8), *target.caches, slots, **static, dynamic=False)
    grouped = {name: torch.zeros(K, N, S, 2) for name in ("key_scale", "value_scale")}
    opcheck("kv_cache_store", *draw(3, 8), *target.caches, slots, **grouped)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key", {"key": torch.randn(3, N, 8)}),
        ("key", {"key": torch.randn(3, N + 1, 40)}),
        ("key", {"key": torch.zeros(3, N, 40, dtype=torch.int8)}),
        ("value", {"value": torch.randn(4, N, 40)}),
        ("value", {"value": torch.randn(3, N, 40, dtype=torch.float64)}),
        ("key_cache", {"key_cache": torch.zeros(K, N, S * 40, dtype=torch.int8)}),
        ("value_cache", {"value_cache": torch.zeros(K, N, S, 8, dtype=torch.int8)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([1, 2])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([1.0, 2.0, 3.0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([1, -2, 3])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([1, K * S, 3])}),
        ("key_scale", {"key_scale": None}),
        ("value_scale", {"value_scale": torch.zeros(K, N, S + 1)}),
        ("key_scale", {"key_scale": torch.zeros(K, N, S, dtype=torch.float16)}),
        ("key_zero_point", {"key_zero_point": torch.zeros(K, 1, S)}),
        ("key_scale", {"key_scale": torch.zeros(K, N, S, 3)}),
        ("key_zero_point", {"key_zero_point": torch.zeros(K, N, S, 5)}),
        ("dynamic", {"key_scale": torch.ones(1, 1, 1, 1)}),
        ("positions", {"key_positions": torch.zeros(K, N, S, dtype=torch.int32)}),
        ("key_positions", {"positions": torch.arange(3)}),
        *(
            (
                "positions",
                {
                    "key_positions": torch.zeros(K, N, S, dtype=torch.int32),
                    "positions": torch.ones(3, dtype=dtype),
                },
            )
            for dtype in (torch.float32, torch.bool)
        ),
        (
            "positions",
            {
                "key_positions": torch.zeros(K, N, S, dtype=torch.int32),
                "positions": torch.arange(4),
            },
        ),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    target = Target()
    key, value = draw(3)
    legal = {
        "key": key,
        "value": value,
        "key_cache": target.caches[0],
        "value_cache": target.caches[1],
        "slot_mapping": torch.tensor([1, 2, 3]),
        **target.scales,
    }
    with pytest.raises(UsageError) as error:
        ops.kv_cache_store(**{**legal, **change})
    assert error.value.field == field
    for now, before in zip(target, target.before, strict=True):
        assert bytes_of(now) == bytes_of(before)
