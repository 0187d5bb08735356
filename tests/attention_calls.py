"""paged_attention, and its oracle, over what the fixture ``cache_with`` makes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import oracle
import torch
from compare import assert_as_good

from ascend_kv import ops
from ascend_kv.ops import native
from ascend_kv.ops.registration import REFERENCE_NAMESPACE, has_kernel, operator

WORD_BITS = 16
NATIVE = has_kernel("paged_attention", "cpu")
MADE_FOR_WORDS = NATIVE and native.whole_number_bits() == WORD_BITS


def in_words() -> bool:
    """Whether what codes are multiplied with is rounded to so few bits that float32's rounding
    is no yardstick any more."""
    reference = operator("paged_attention", REFERENCE_NAMESPACE)
    return MADE_FOR_WORDS and sys.modules["ascend_kv.ops.paged_attention"]._op is not reference


def tolerance() -> float:
    """For numbers of about 1."""
    return 3e-4 if in_words() else 1e-5


def bits_of(cache: torch.Tensor, scale: torch.Tensor | None) -> int | None:
    """Bits to which the operator rounds what the codes of this side are multiplied with."""
    channels = cache.shape[3] * (2 if cache.dtype == torch.uint8 else 1)
    by_group = scale is not None and scale.dim() == 4 and scale.shape[0] > 1
    served = cache.dtype in (torch.int8, torch.uint8) and channels <= 512 and not by_group
    return WORD_BITS if served and in_words() else None


def run(cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any) -> Any:
    """The operator's outputs and log-sum-exps."""
    return ops.paged_attention(
        query,
        *cache.tensors,
        cache.tables,
        query_lengths,
        cache.kv_lengths,
        query.shape[2] ** -0.5,
        **cache.scales,
        **options,
    )


def truth(
    cache: Any, query: torch.Tensor, query_lengths: list[int], dtype: type, **options: Any
) -> Any:
    """The same by loops in ``dtype``; other than in float64 as good as the operator is to be."""
    visible = oracle.Visible(options.pop("causal", True), options.pop("window", 0))
    scales = (cache.scales.get(f"{side}_scale") for side in ("key", "value"))
    rounded = oracle.Bits(*map(bits_of, cache.tensors, scales))
    bits = rounded if dtype is np.float32 else oracle.EXACT
    arrays = {name: option.double().numpy() for name, option in options.items()}
    return oracle.paged_attention(
        query.double().numpy(),
        *cache.sides,
        cache.tables.numpy(),
        query_lengths,
        cache.kv_lengths,
        query.shape[2] ** -0.5,
        visible=visible,
        dtype=dtype,
        bits=bits,
        **arrays,
    )


def check_as_good(
    cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any
) -> None:
    """As good as the same by loops in float32, or in words where these serve; float32 queries."""
    output, log_sum_exp = run(cache, query, query_lengths, **options)
    exact, exact_sums = truth(cache, query, query_lengths, np.float64, **options)
    naive, naive_sums = truth(cache, query, query_lengths, np.float32, **options)
    assert output.dtype == torch.float32 and log_sum_exp.dtype == torch.float32
    assert_as_good(output, exact, naive)
    assert_as_good(log_sum_exp, exact_sums, naive_sums)
