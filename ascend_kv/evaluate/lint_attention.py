"""Asks the rules of CANN's fused attention about a decode that has not happened yet."""

from __future__ import annotations

from typing import cast

import torch

from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry
from ascend_kv.ops.fused_request import Request, Scales, split
from ascend_kv.ops.fused_rules import Fallback, broken


def decode_fallbacks(
    geometry: ModelGeometry, spec: LayerFormat, model_dtype: str, block_size: int, tokens: int
) -> tuple[Fallback, ...]:
    """The rules that a decode of one sequence would break over the paged cache as it lies.

    Only those that nothing else is about: what the device takes in no way need not be told how
    its cache would be read.

    Args:
        geometry: of the model.
        spec: the format of the layer.
        model_dtype: type of the queries.
        block_size: tokens in a block.
        tokens: of the sequence.
    """

    def scales(side: FormatSpec) -> Scales:
        return cast(Scales, side.granularity if side.quantized else "none")

    def dtype(side: FormatSpec) -> torch.dtype:
        return torch.int8 if side.quantized else getattr(torch, side.name)

    keys, values = dtype(spec.key), dtype(spec.value)
    request = Request(
        query_dtype=getattr(torch, model_dtype),
        cache_dtype=keys,
        value_dtype=None if values is keys else values,
        num_heads=geometry.num_heads,
        kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        num_blocks=-(-tokens // block_size),
        block_size=block_size,
        query_lengths=(1,),
        kv_lengths=(tokens,),
        softmax_scale=1.0,
        key=scales(spec.key),
        value=scales(spec.value),
        key_zero_point=spec.key.quantized and not spec.key.symmetric,
        value_zero_point=spec.value.quantized and not spec.value.symmetric,
    )
    (part,) = split(request)
    found = broken(request, part, "paged")
    refused = tuple(fallback for fallback in found if fallback.instead == "reference")
    return refused or found
