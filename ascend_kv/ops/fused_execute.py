"""Carries out a plan of the fused attention; the library with the functions is handed in.

``attend`` is the whole of it: plan, calls, and the reference where the plan says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ascend_kv.ops.attention_offset import score_bias_of
from ascend_kv.ops.fused_attention import Call, Finish, Load, Plan, plan
from ascend_kv.ops.fused_request import request_of
from ascend_kv.ops.fused_sources import logical, pack, unpack
from ascend_kv.ops.kv_cache_load import kv_cache_load
from ascend_kv.ops.paged import is_paged
from ascend_kv.ops.registration import REFERENCE_NAMESPACE, operator

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

logger = logging.getLogger(__name__)


@dataclass
class Route:
    """One way that calls of ``paged_attention`` went in this process.

    Attributes:
        reason: the rules that the first of them broke; empty where the paged cache was attended
            to as it lies.
        calls: how many went this way.
    """

    reason: str
    calls: int = 0


# By the words of ``Plan.routes``.
routes_taken: dict[str, Route] = {}


def execute(
    plan: Plan, tensors: Mapping[str, Tensor | None], library: Any
) -> tuple[Tensor, Tensor]:
    """Make the calls of a plan.

    Args:
        plan: one with calls, not one that asks for the reference.
        tensors: by the names of ``paged_attention``'s arguments, the caches as the plan's
            request says they lie; missing or None where not given.
        library: torch_npu, or what stands in for it.

    Returns:
        output ``[T, H, D]`` in the query's type and log-sum-exp ``[T, H]`` float32, as
        ``paged_attention``; NaN as log-sum-exp where the request did not ask for it and the
        device gives none.
    """
    assert not plan.fallbacks, plan.fallbacks
    have = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    query = have["query"]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    log_sum_exp = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    if "sinks" in have:
        log_sum_exp.copy_(have["sinks"].expand_as(log_sum_exp))
    for call in plan.calls:
        _run(call, have, library, output, log_sum_exp)
    return output, log_sum_exp


def _run(call: Call, tensors: Tensors, library: Any, output: Tensor, log_sum_exp: Tensor) -> None:
    have = dict(tensors)
    if call.load is not None:
        have["loaded_key"], have["loaded_value"] = _load(call.load, have)
    if call.bias is not None:
        have["shifted_bias"], have["largest_bias"] = call.bias.tensors(have)
    arguments = {
        name: list(given) if isinstance(given, tuple) else given
        for name, given in call.arguments.items()
    }
    made = {name: x.tensor(have) if hasattr(x, "tensor") else x for name, x in arguments.items()}
    inputs = [made.pop(name) for name in ("query", "key", "value")]
    result, sums = getattr(library, call.function)(*inputs, **made)
    _finish(call.finish, have, result, sums, output, log_sum_exp)


def _load(load: Load, have: Tensors) -> tuple[Tensor, Tensor]:
    """Dense keys and values ``[b, N, longest, D]`` of the sequences, in the query's type."""
    table = load.table.tensor(have)
    parameters = {
        name: have[name]
        for name in ("key_scale", "value_scale", "key_zero_point", "value_zero_point")
        if name in have
    }
    caches = [have["key_cache"], have["value_cache"]]
    if load.layout == "NZ":  # only what is used is put in order
        blocks = table.flatten()
        caches = [cache.index_select(0, blocks) for cache in caches]
        dim = caches[0].shape[2] * caches[0].shape[4]
        parameters = {
            name: x.index_select(0, blocks) if is_paged(x, dim) else x
            for name, x in parameters.items()
        }
        table = torch.arange(len(blocks), device=table.device).view_as(table)
    key, value = (logical(cache, load.layout) for cache in caches)
    return kv_cache_load(key, value, table, load.lengths, dtype=have["query"].dtype, **parameters)


def _finish(
    finish: Finish, have: Tensors, result: Tensor, sums: Tensor, output: Tensor, lse: Tensor
) -> None:
    """Give back what the call was not told, and put the results into their rows."""
    result = result.transpose(1, 2) if finish.heads_first else result
    if finish.value_zero_point:
        result = result.to(torch.float32) + _heads(have["value_zero_point"], finish.group)
    if sums.dim() == 4:
        sums = sums.squeeze(-1).transpose(1, 2)
    else:  # the device gives none
        sums = result.new_full(result.shape[:3], torch.nan, dtype=lse.dtype)
    if finish.key_zero_point:
        asked = pack(have["query"], finish.spans).to(torch.float32) * finish.softmax_scale
        sums = sums + (asked * _heads(have["key_zero_point"], finish.group)).sum(-1)
    if finish.bias:
        sums = sums + have["largest_bias"].squeeze(-1).transpose(1, 2)
    if finish.sinks:
        sinks = have["sinks"].to(torch.float32)
        result = result.to(torch.float32) * torch.sigmoid(sums - sinks)[..., None]
        sums = torch.logaddexp(sums, sinks)
    if finish.bias:  # the device knows no query that sees nothing
        nothing = have["largest_bias"].transpose(1, 2) == -torch.inf
        result = result.masked_fill(nothing, 0.0)
    unpack(result.to(output.dtype), finish.spans, output)
    unpack(sums, finish.spans, lse)


def _heads(parameter: Tensor, group: int) -> Tensor:
    """A static ``[1, N or 1, 1, D or 1]`` for query heads: ``[H or 1, D or 1]``."""
    flat = parameter[0, :, 0]
    return flat if flat.shape[0] == 1 else flat.repeat_interleave(group, 0)


def attend(
    library: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    **optional: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``paged_attention`` through the fused attention of ``library``, or by its reference.

    Arguments and results are the operator's own. That something else than the paged cache itself
    is attended to is logged, once. For a key offset the device's attention gets the bias whole.
    """
    tensors: dict[str, Tensor | None] = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        **optional,
    }
    request = request_of(
        tensors, query_lengths, kv_lengths, softmax_scale, causal=causal, window=window
    )
    chosen = plan(request)
    for words, why in chosen.routes.items():
        if words not in routes_taken:
            routes_taken[words] = Route("; ".join(map(str, why)))
            for reason in why:
                level = logging.WARNING if chosen.fallbacks else logging.INFO
                logger.log(level, "paged_attention: %s", reason)
        routes_taken[words].calls += 1
    if not chosen.fallbacks:
        offset, frequencies = tensors.get("key_offset"), tensors.get("rotary_frequencies")
        if offset is not None and frequencies is not None:
            plain = tensors.get("offset_query")
            asked = (query if plain is None else plain).to(torch.float32) * softmax_scale
            tensors["score_bias"] = score_bias_of(asked, offset, frequencies, max(kv_lengths))
        return execute(chosen, tensors, library)
    reference = operator("paged_attention", REFERENCE_NAMESPACE)
    output, log_sum_exp = reference(
        *(query, key_cache, value_cache, block_tables, query_lengths, kv_lengths, softmax_scale),
        causal=causal,
        window=window,
        **optional,
    )
    return output, log_sum_exp
