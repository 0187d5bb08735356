"""kv_cache_store with scales that are given: one for all tokens, or read at the slots."""

from __future__ import annotations

import math

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
    draw,
    low_bit_target,
    slots_for,
)

from ascend_kv.errors import UsageError
from ascend_kv.formats import format_of
from ascend_kv.geometry import format_spec

OPERATOR = "kv_cache_store"


@pytest.mark.parametrize("granularity", ["layer", "head", "channel"])
@pytest.mark.parametrize("dtype", LOW_BITS[:2])
def test_static_scales_of_fp8(granularity: str, dtype: torch.dtype) -> None:
    spec = format_spec(format_of(dtype).name, granularity, scale_type="static")
    scale = torch.rand(spec.scale_shape(N, 24, 1)) * 0.01 + 0.001
    target = low_bit_target((dtype, dtype), "token_head", True, 24)
    target.scales = {"key_scale": scale, "value_scale": scale}
    target.before = [x.clone() for x in target]
    inputs, slots = draw(7, 24), slots_for(7)
    inputs[0][3, 0, 5] = 1e9  # saturates
    target.store(*inputs, slots, dynamic=False)
    rows = scale.expand(1, N, 1, 24)[0, :, 0].numpy()
    name = format_of(dtype).name
    for x, cache in zip(inputs, target.caches, strict=True):
        for token, slot in enumerate(slots.tolist()):
            for head in range(N):
                stored = cache.view(torch.uint8)[slot // S, head, slot % S].tolist()
                values = zip(x[token, head].tolist(), rows[head], strict=True)
                assert stored == [oracle_formats.fp8_static([v], s, name)[0] for v, s in values]
    inputs[0][0, 0, 0] = math.nan
    with pytest.raises(UsageError, match="key: got 'NaN or infinity'"):
        target.store(*inputs, slots, dynamic=False)


def test_static_scale_for_each_head_saturates() -> None:
    target = Target()
    scale = torch.tensor([0.01, 0.5]).view(1, N, 1, 1)
    key, value = draw(7)
    slots = slots_for(7)
    for name in ("key_scale", "value_scale"):
        target.scales[name] = scale.clone()
    target.store(key, value, slots, dynamic=False)
    stored = target.caches[0][slots // S, :, slots % S]
    for n, step in enumerate((0.01, 0.5)):
        expected = oracle.quantize_static(key[:, n].ravel().tolist(), np.float32(step), 0, True)
        assert stored[:, n].ravel().tolist() == expected
    assert stored[:, 0].abs().max() == 127
    assert torch.equal(target.scales["key_scale"], scale)


@pytest.mark.parametrize("channel", [False, True])
def test_static_and_asymmetric(channel: bool) -> None:
    target = Target()
    shape = (1, N, 1, 40) if channel else (1, 1, 1, 1)
    scale, zero_point = torch.rand(shape) * 0.05 + 0.01, torch.randn(shape)
    key, value = draw(5)
    slots = slots_for(5)
    target.scales = dict.fromkeys(("key_scale", "value_scale"), scale)
    target.scales |= dict.fromkeys(("key_zero_point", "value_zero_point"), zero_point)
    target.store(key, value, slots, dynamic=False)
    stored = target.caches[1][slots // S, :, slots % S]
    steps, zeros = (np.broadcast_to(x.numpy()[:, :, 0], (5, N, 40)) for x in (scale, zero_point))
    for place in np.ndindex(5, N, 40):
        wanted = oracle.quantize_static([value[place].item()], steps[place], zeros[place], False)
        assert int(stored[place]) == wanted[0]


@pytest.mark.parametrize("granularity", ["token", "token_head"])
def test_static_scales_of_each_slot_are_read(granularity: str) -> None:
    target = Target(granularity=granularity)
    slots = slots_for(5)
    for scale in target.scales.values():
        scale[slots // S, :, slots % S] = torch.rand(5, scale.shape[1]) * 0.1 + 0.01
    given = {name: scale.clone() for name, scale in target.scales.items()}
    key, value = draw(5)
    target.store(key, value, slots, dynamic=False)
    for token, slot in enumerate(slots.tolist()):
        for n in range(N):
            scale = given["key_scale"][slot // S, n % given["key_scale"].shape[1], slot % S]
            wanted = oracle.quantize_static(key[token, n].tolist(), scale.numpy(), 0, True)
            assert target.caches[0][slot // S, n, slot % S].tolist() == wanted
    for name, scale in target.scales.items():
        np.testing.assert_array_equal(scale.numpy(), given[name].numpy())


@pytest.mark.parametrize(
    "granularity", ["layer", "head", "channel", "token", "token_head", "group"]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_static_granularities(granularity: str, symmetric: bool) -> None:
    """Every code is the oracle's for the scale that is given, and what was given stays."""
    target, slots = Target(granularity="token"), slots_for(5)
    key, value = draw(5)
    shape = {
        "layer": (1, 1, 1, 1),
        "head": (1, N, 1, 1),
        "channel": (1, N, 1, 40),
        "token": (K, 1, S),
        "token_head": (K, N, S),
        "group": (K, N, S, 5),
    }[granularity]
    target.scales = {name: torch.rand(shape) * 0.05 + 0.01 for name in ("key_scale", "value_scale")}
    if not symmetric:
        zeros = {f"{side}_zero_point": torch.randn(shape) for side in ("key", "value")}
        target.scales |= zeros
    given = {name: x.clone() for name, x in target.scales.items()}
    target.store(key, value, slots, dynamic=False)

    def at(name: str, slot: int, n: int, c: int) -> np.ndarray:
        x = given[name].numpy()
        place = (
            (0, n, 0) if len(shape) == 4 and granularity != "group" else (slot // S, n, slot % S)
        )
        place = (place[0], min(place[1], x.shape[1] - 1), place[2])
        return x[place] if len(shape) == 3 else x[place][c * x.shape[3] // 40]

    for side, x, cache in zip(("key", "value"), (key, value), target.caches, strict=True):
        for token, n, c in np.ndindex(5, N, 40):
            slot = int(slots[token])
            zero = np.float32(0) if symmetric else at(f"{side}_zero_point", slot, n, c)
            scale = at(f"{side}_scale", slot, n, c)
            wanted = oracle.quantize_static([x[token, n, c].item()], scale, zero, symmetric)
            assert int(cache[slot // S, n, slot % S, c]) == wanted[0]
    for name, x in target.scales.items():
        assert torch.equal(x, given[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_is_refused_where_it_cannot_be_marked(bad: float, side: int) -> None:
    target = Target()
    target.scales = dict.fromkeys(("key_scale", "value_scale"), torch.ones(1, 1, 1, 1))
    inputs = draw(3)
    inputs[side][0, 0, 0] = bad
    with pytest.raises(UsageError) as error:
        target.store(*inputs, slots_for(3), dynamic=False)
    assert error.value.field == ("key", "value")[side]
    for now, before in zip(target.caches, target.before[:2], strict=True):
        assert torch.equal(now, before)
