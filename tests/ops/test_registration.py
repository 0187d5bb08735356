"""The dispatcher: a kernel that registers later serves instead of the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ascend_kv import ops
from ascend_kv.ops.registration import NAMESPACE, REFERENCE_NAMESPACE, has_kernel

OVERRIDE = """
import torch
from ascend_kv import ops
from ascend_kv.ops import platform
from ascend_kv.ops.registration import has_kernel

def store(key, value, key_cache, value_cache, slot_mapping, **others):
    key_cache.fill_({marker})

def dequantize(codes, scale, zero_point=None, group_size=0, dtype=None):
    return torch.full(codes.shape, {marker}, dtype=dtype)

def attention(query, *others, **more):
    return query * {marker}, query[..., 0]

library = torch.library.Library("ascend_kv", "IMPL")
kernels = {{"kv_cache_store": store, "kv_cache_dequantize": dequantize}}
kernels["paged_attention"] = attention
cache = torch.zeros(2, 1, 4, 8)
key = torch.ones(1, 1, 8)
codes = torch.zeros(1, 1, 1, 8, dtype=torch.int8)
tables = torch.zeros(1, 1, dtype=torch.int32)
before = platform.implementations("{device}")
for name, kernel in kernels.items():
    library.impl(name, kernel, "{key}")
"""

ON_CPU = """
ops.kv_cache_store(key, key, cache, cache.clone(), torch.tensor([0]))
assert (cache == 7).all(), "store"
back = ops.kv_cache_dequantize(codes, torch.ones(1, 1, 1, 1), dtype=torch.float16)
assert (back == 7).all() and back.dtype == torch.float16, "dequantize"
output, _ = ops.paged_attention(key, cache, cache, tables, [1], [1], 1.0)
assert (output == 7).all(), "attention"
"""

# There is no such device here, so the dispatcher is told to take it.
ON_PRIVATE_USE = """
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
ours = torch.ops.ascend_kv
ours.kv_cache_store.default.redispatch(keys, key, key, cache, cache.clone(), torch.tensor([0]))
assert (cache == 7).all(), "store"
back = ours.kv_cache_dequantize.default.redispatch(keys, codes, torch.ones(1, 1, 1, 1))
output, _ = ours.paged_attention.default.redispatch(
    keys, key, cache, cache, tables, [1], [1], 1.0
)
assert (output == 7).all(), "attention"
output, _ = ops.paged_attention(key, cache, cache, tables, [1], [1], 1.0)
assert (output == 7).all(), "the reference still serves the CPU: values of 7 average to 7"
ops.kv_cache_store(key, key, cache, cache.clone(), torch.tensor([0]))
assert (cache[0, 0, 0] == 1).all() and (cache[1] == 7).all(), "store on the CPU"
"""

AFTER = """
assert set(before.values()) == {"reference"}, before
after = platform.implementations(%r)
served = {"native", "CANN's fused attention"}
assert {name for name, what in after.items() if what in served} == set(kernels), after
"""


@pytest.mark.parametrize(
    ("device", "key", "use"), [("cpu", "CPU", ON_CPU), ("npu", "PrivateUse1", ON_PRIVATE_USE)]
)
def test_a_later_kernel_overrides_the_reference(device: str, key: str, use: str) -> None:
    """In a process of its own, since a registration is for good."""
    script = OVERRIDE.format(marker=7, device=device, key=key) + use + AFTER % device
    environment = os.environ | {"ASCEND_KV_OPERATORS": "reference"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_every_operator_has_its_reference() -> None:
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    for name in ops.__all__:
        assert not has_kernel(name, "npu")
        for namespace in (NAMESPACE, REFERENCE_NAMESPACE):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)
            assert has, (namespace, name)


def test_no_gradient_flows() -> None:
    """Weights may ask for gradients; the cache must not remember every step that wrote to it."""
    key = torch.randn(1, 1, 8, requires_grad=True)
    cache = torch.zeros(1, 1, 4, 8)
    ops.kv_cache_store(key, key, cache, cache.clone(), torch.tensor([2]))
    assert not cache.requires_grad and torch.equal(cache[0, :, 2], key[0])


def test_operators_can_be_traced() -> None:
    """Fake tensors stand for real ones, in wrapper and operator alike."""
    with torch._subclasses.FakeTensorMode():
        query = torch.empty(3, 4, 8, dtype=torch.float16)
        cache = torch.empty(5, 2, 4, 8)
        tables = torch.empty(2, 2, dtype=torch.int32)
        output, sums = ops.paged_attention(query, cache, cache, tables, [1, 2], [5, 8], 1.0)
        assert (output.shape, output.dtype) == (query.shape, torch.float16)
        assert (sums.shape, sums.dtype) == ((3, 4), torch.float32)
        codes, scale, _ = ops.kv_cache_quantize(torch.empty(2, 3, 5, 8), "token")
        assert codes.dtype == torch.int8 and scale.shape == (2, 1, 5, 1)
