"""paged_attention, and its oracle, over what the fixture ``cache_with`` makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import torch
from compare import assert_as_good

from ascend_kv import ops


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
    """The same by loops in ``dtype``."""
    visible = oracle.Visible(options.pop("causal", True), options.pop("window", 0))
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
        **arrays,
    )


def check_as_good(
    cache: Any, query: torch.Tensor, query_lengths: list[int], **options: Any
) -> None:
    """As good as the same in float32 by loops, for float32 queries."""
    output, log_sum_exp = run(cache, query, query_lengths, **options)
    exact, exact_sums = truth(cache, query, query_lengths, np.float64, **options)
    naive, naive_sums = truth(cache, query, query_lengths, np.float32, **options)
    assert output.dtype == torch.float32 and log_sum_exp.dtype == torch.float32
    assert_as_good(output, exact, naive)
    assert_as_good(log_sum_exp, exact_sums, naive_sums)
