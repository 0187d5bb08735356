"""paged_attention, and its oracle, over what the fixture ``cache_with`` makes."""

from __future__ import annotations

from typing import Any

import oracle
import torch

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
