"""Paged caches for the tests of operators, poisoned wherever no token lies.

The tests of an operator that has a native implementation run twice, with it and with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from oracle import PagedSide
from oracle_formats import as_numbers

from ascend_kv.formats import FLOAT_DTYPES, VectorFormat, format_of
from ascend_kv.ops.registration import NAMESPACE, REFERENCE_NAMESPACE, has_kernel, operator

Tensor = torch.Tensor
KERNELS = Path(__file__).resolve().parents[2] / "op_kernels"
NATIVE = {path.stem.removesuffix("_cpu") for path in KERNELS.glob("*/*_cpu.cpp")}
GARBAGE = (-1, 2**31 - 1, -(2**31), 12345678)


class Cache(NamedTuple):
    """A paged cache with the tokens of some sequences in it, as operators and oracle want it."""

    tensors: tuple[Tensor, Tensor]  # key_cache, value_cache
    scales: dict[str, Tensor]  # the operators' keywords
    tables: Tensor
    kv_lengths: list[int]

    @property
    def sides(self) -> tuple[PagedSide, PagedSide]:
        """Keys and values for the oracle."""
        sides = []
        for name, cache in zip(("key", "value"), self.tensors, strict=True):
            parameters = [self.scales.get(f"{name}_{x}") for x in ("scale", "zero_point")]
            arrays = (None if x is None else x.numpy() for x in parameters)
            kind = format_of(cache.dtype)
            if kind.quantized:
                numbers = as_numbers(cache.view(torch.uint8).numpy(), kind.name)
            else:
                numbers = cache.to(torch.float32).numpy()
            sides.append(PagedSide(numbers, *arrays))
        return sides[0], sides[1]


def make_tables(kv_lengths: Sequence[int], block_size: int, spare: int = 2) -> tuple[Tensor, int]:
    """Shuffled block tables whose unused entries name no block, and the number of blocks."""
    counts = [-(-length // block_size) for length in kv_lengths]
    num_blocks = sum(counts) + spare
    free = torch.randperm(num_blocks).tolist()
    width = max(counts, default=0) + 1
    tables = torch.empty(len(counts), width, dtype=torch.int32)
    for row, count in enumerate(counts):
        entries = [free.pop() for _ in range(count)]
        entries += [GARBAGE[(row + i) % len(GARBAGE)] for i in range(width - count)]
        tables[row] = torch.tensor(entries, dtype=torch.int32)
    return tables, num_blocks


def used_slots(tables: Tensor, kv_lengths: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of every cached token."""
    slots = [
        (int(tables[row, token // block_size]), token % block_size)
        for row, length in enumerate(kv_lengths)
        for token in range(length)
    ]
    pairs = torch.tensor(slots, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def make_cache(
    kv_lengths: Sequence[int],
    *,
    kv_heads: int = 2,
    block_size: int = 16,
    dim: int = 64,
    dtype: torch.dtype = torch.int8,
    value_dtype: torch.dtype | None = None,
    granularity: str = "token_head",
    symmetric: bool = True,
) -> Cache:
    """Random tokens in a cache that is NaN (codes: garbage) everywhere else.

    ``granularity`` token_head, token and group (of 8 channels) keep scales for each token;
    layer, head and channel are static. FP8 has no zero points, symmetric or not.
    """
    tables, num_blocks = make_tables(kv_lengths, block_size)
    block, offset = used_slots(tables, kv_lengths, block_size)
    shape = (num_blocks, kv_heads, block_size, dim)
    scales: dict[str, Tensor] = {}
    caches = []
    for side, stored in (("key", dtype), ("value", value_dtype or dtype)):
        if stored in FLOAT_DTYPES:
            cache = torch.full(shape, torch.nan, dtype=stored)
            cache[block, :, offset] = torch.randn(len(block), kv_heads, dim).to(stored)
        else:
            kind = format_of(stored)
            cache = _codes(kind, shape, block, offset)
            names = ("scale", "zero_point") if kind.zero_points and not symmetric else ("scale",)
            for name in names:
                parameter = _parameter(name, shape, granularity, block, offset)
                scales[f"{side}_{name}"] = (parameter * _FACTORS[stored]).to(kind.scale_dtype)
        caches.append(cache)
    return Cache((caches[0], caches[1]), scales, tables, list(kv_lengths))


# so that values are of like size, whatever their codes
_FACTORS = {
    torch.int8: 1.0,
    torch.float8_e4m3fn: 0.3,
    torch.float8_e5m2: 0.002,
    torch.uint8: 16.0,
}


def _codes(kind: VectorFormat, shape: tuple[int, ...], block: Tensor, offset: Tensor) -> Tensor:
    """Any bytes, but for FP8's NaN and infinity only where no token is."""
    if kind.dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    *places, dim = shape
    cache = torch.randint(0, 256, (*places, dim // kind.codes_per_element), dtype=torch.uint8)
    used = cache[block, :, offset]
    numbers = kind.codes_as_floats(used.view(kind.dtype))
    if kind.codes_per_element == 1:
        cache[block, :, offset] = used.masked_fill(~numbers.isfinite(), 0x55)
    return cache.view(kind.dtype)


def _parameter(
    name: str, shape: tuple[int, ...], granularity: str, block: Tensor, offset: Tensor
) -> Tensor:
    blocks, heads, block_size, dim = shape

    def draw(*size: int) -> Tensor:
        return torch.rand(*size) * 0.03 + 0.001 if name == "scale" else torch.randn(*size)

    if granularity in ("layer", "head", "channel"):
        return draw(
            1, 1 if granularity == "layer" else heads, 1, 1 if granularity != "channel" else dim
        )
    heads = 1 if granularity == "token" else heads
    groups = (dim // 8,) if granularity == "group" else ()
    paged = torch.full((blocks, heads, block_size, *groups), torch.nan)
    paged[block, :, offset] = draw(len(block), heads, *groups)
    return paged


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if operator_of(metafunc.module) in NATIVE:
        metafunc.parametrize("implementation", ["native", "reference"], indirect=True)


def operator_of(module: ModuleType) -> str:
    """What ``test_<operator>.py`` tests, or a module that says so in ``OPERATOR``."""
    named: str = getattr(module, "OPERATOR", module.__name__.rpartition("test_")[2])
    return named


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What serves the operator that the module tests: its own kernel, or the reference."""
    name = operator_of(request.module)
    which: str = getattr(request, "param", "whatever is there")
    if which == "native" and not has_kernel(name, "cpu"):
        pytest.skip("the native CPU operators are not built here")
    if which == "reference":
        module = sys.modules[f"ascend_kv.ops.{name}"]
        monkeypatch.setattr(module, "_op", operator(name, REFERENCE_NAMESPACE))
    return which


@pytest.fixture
def cache_with() -> Callable[..., Cache]:
    """``make_cache``, for the tests."""
    return make_cache


@pytest.fixture
def tables_for() -> Callable[..., tuple[Tensor, int]]:
    """``make_tables``, for the tests."""
    return make_tables


@pytest.fixture
def opcheck(implementation: str) -> Callable[..., Any]:
    """torch's own check of schema, fake function and dispatch of an operator."""
    namespace = REFERENCE_NAMESPACE if implementation == "reference" else NAMESPACE

    def check(name: str, *args: Any, **kwargs: Any) -> None:
        torch.library.opcheck(operator(name, namespace), args, kwargs)

    return check
