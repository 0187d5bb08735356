"""``paged_attention`` as calls of CANN's fused attention, ``npu_fused_infer_attention_score``.

``plan`` is a pure function: it maps a ``Request`` onto at most two calls, one for the sequences
with one query (decode) and one for the others (prefill), or onto the reference, with the rules
that the request breaks (``fused_rules`` has the table). ``fused_execute`` carries a plan out.

How an argument of ours is said to the device:

* **one query, int8 cache**: the antiquant mode that its scales ask for (``fused_scales``);
* **several queries**: unquantized keys by their pages; a quantized prefix is gathered and
  dequantized by ``kv_cache_load`` and attended to densely. The queries of shorter sequences are
  padded, and the lengths say so;
* **causality**: sparse mode 3, aligned at the last query and the last key; one query needs none;
* **window**: blocks before it are cut from the table. At several queries sparse mode 4 says the
  window. At one, where the device ignores sparse modes, a mask hides what is left of the first
  block; but over more than 512 keys a score bias hides it, since with a mask the keys from 512 on
  are reported to come out wrong, silently (vllm-ascend issue 15503, torch_npu 2.10.0; the same
  report finds ``pse_shift`` right at all lengths when it has all the heads);
* **score bias**: ``pse_shift``, added after the scale, less each query's largest (``Bias``);
* **sinks**: output * sigmoid(log_sum_exp - sink) afterwards. ``learnable_sink`` of ``_v2`` takes
  no quantized keys and only packed layouts, so it is not used;
* **lengths**: host lists, as they come.

``inner_precise`` is 1 for bfloat16, which knows no other precision and takes its fast path only
then, and 0 (high precision) for float16. Output and log-sum-exp equal the reference's within the
rounding of the query's type; the device rounds more than that, since it splits queries and
probabilities into int8 slices.

What the operator does not reach today (NZ and BSND caches, gathered scales where they may lie in
pages) is planned and tested all the same; ``fused_request`` says which.

The signatures are those of torch_npu 2.13.0 (its wheel's npu_native_functions); the rest was
read where ``fused_rules`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from ascend_kv.ops.fused_request import STATIC, Layout, Part, Request, split
from ascend_kv.ops.fused_rules import Fallback, broken
from ascend_kv.ops.fused_scales import modes, scale_arguments
from ascend_kv.ops.fused_sources import (
    Bias,
    CausalMask,
    Named,
    Packed,
    Rows,
    Source,
    Spans,
    Table,
    WindowMask,
    table_of,
)

FUNCTION = "npu_fused_infer_attention_score"
FUNCTION_V2 = "npu_fused_infer_attention_score_v2"
UNLIMITED = 2**31 - 1
MASK_TOKENS = 512  # a mask at one query is trusted up to here

Argument = str | int | float | bool | tuple[int, ...] | Source

# The second function says the same by other names.
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "key_antiquant_mode": "key_quant_mode",
    "key_antiquant_scale": "dequant_scale_key",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
    "value_antiquant_mode": "value_quant_mode",
    "value_antiquant_scale": "dequant_scale_value",
}


@dataclass(frozen=True)
class Load:
    """Gather and dequantize before the call, by ``kv_cache_load``, in the query's type."""

    table: Table
    lengths: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class Finish:
    """What is done to the results of a call, in this order, before they go to their rows.

    Attributes:
        heads_first: the output is ``[b, H, Q, D]``, else ``[b, Q, H, D]``.
        group: query heads of a KV head.
        key_zero_point: add the scores that a static zero point of the keys is worth.
        value_zero_point: add a static zero point of the values.
        bias: give the largest score bias back; what the bias hides altogether is 0 and -inf.
        sinks: count the sinks in.
    """

    spans: Spans
    heads_first: bool
    group: int
    softmax_scale: float
    key_zero_point: bool
    value_zero_point: bool
    bias: bool
    sinks: bool


@dataclass(frozen=True)
class Call:
    """One call of the fused attention.

    Attributes:
        part: ``decode`` or ``prefill``.
        route: ``paged``, or ``loaded`` for keys and values made dense first.
        function: its name in torch_npu.
        arguments: by its own names, ``query``, ``key`` and ``value`` among them.
        load, bias: what is made first, if it is, for arguments named ``loaded_key``,
            ``loaded_value`` and ``shifted_bias``.
        finish: what is done to the results.
        fallbacks: the rules for which it is not ``paged``; none if it is.
        slow: what keeps a decode off the device's fast path; empty where nothing does.
    """

    part: str
    route: str
    function: str
    arguments: Mapping[str, Argument]
    load: Load | None
    bias: Bias | None
    finish: Finish
    fallbacks: tuple[Fallback, ...]
    slow: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Calls whose results together are those of the batch; or none and the reasons why."""

    calls: tuple[Call, ...]
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def routes(self) -> dict[str, tuple[Fallback, ...]]:
        """What serves each part, in as few different words as there are, and the rules for it.

        A part that only the reference can serve takes the whole batch along.
        """
        if self.fallbacks:
            return {_route(self.fallbacks[0].part, "reference", self.fallbacks): self.fallbacks}
        return {_route(x.part, x.route, x.fallbacks): x.fallbacks for x in self.calls}


def _route(part: str, served_by: str, why: tuple[Fallback, ...]) -> str:
    rules = ", ".join(fallback.rule for fallback in why)
    return f"{part}: {served_by} ({rules})" if why else f"{part}: {served_by}"


@lru_cache(maxsize=8)  # every layer of a step asks the same
def plan(request: Request) -> Plan:
    """The calls for a request, or the rules for which the reference serves it."""
    calls = []
    for part in split(request):
        unpaged = broken(request, part, "paged")
        if unpaged:
            unloaded = broken(request, part, "loaded")
            if unloaded:
                return Plan((), unloaded)
        calls.append(_call(request, part, "loaded" if unpaged else "paged", unpaged))
    return Plan(tuple(calls))


def slow_reasons(request: Request, part: Part) -> tuple[str, ...]:
    """What keeps a paged decode off CUBE_VIEW_MM, the device's fast path outside NZ.

    Read in incre_flash_attention_tiling_check.cpp of ops-transformer, EnableCubeViewMM.
    """
    pair = modes(request) if request.quantized else None
    pieces = len(part.rows) * request.kv_heads * -(-part.longest // 2048)
    conditions = {
        "a BNSD cache": request.cache_layout == "BNSD",
        "scales of mode 0 or 2": pair in (None, (0, 0), (2, 2)),
        "head_dim 128": request.head_dim == 128,
        "at most 16 query heads a KV head": request.group <= 16,
        "inner_precise 1, which is for bfloat16": request.query_dtype is torch.bfloat16,
        "sequences * KV heads * (tokens / 2048, rounded up) above 128": pieces > 128,
    }
    return tuple(name for name, met in conditions.items() if not met)


def _call(request: Request, part: Part, route: str, unpaged: tuple[Fallback, ...]) -> Call:
    paged, decode = route == "paged", part.name == "decode"
    nz = paged and request.cache_layout == "NZ"
    layout = "BSND" if paged and request.cache_layout == "BSND" else "BNSD"
    table = table_of(request, part)
    tokens = part.width * part.block_size if paged else part.longest
    arguments: dict[str, Argument] = {
        "query": Packed("query", part.spans, layout == "BNSD"),
        "num_heads": request.num_heads,
        "num_key_value_heads": request.kv_heads,
        "scale": request.softmax_scale,
        "input_layout": layout,
        "actual_seq_lengths_kv": part.lengths,
        "inner_precise": int(nz or request.query_dtype is torch.bfloat16),
        "softmax_lse_flag": not nz,
    }
    for side in ("key", "value"):
        arguments[side] = Named(f"loaded_{side}")
        if paged:
            arguments[side] = (Rows if layout == "BSND" else Named)(f"{side}_cache")
    if paged:
        arguments |= {"block_table": table, "block_size": part.block_size}
        if request.quantized:
            arguments |= scale_arguments(request, part)
    bias = _bias(request, part, tokens)
    if bias is not None:
        arguments["pse_shift"] = Named("shifted_bias")
    if not decode and not nz:  # in NZ there are as many queries for each sequence
        arguments["actual_seq_lengths"] = tuple(count for _, count in part.spans)
    arguments |= _visibility(request, part, tokens)
    slow: tuple[str, ...] = ()
    if decode and not nz:
        slow = slow_reasons(request, part) if paged else ("a paged cache",)
    return Call(
        part=part.name,
        route=route,
        function=FUNCTION_V2 if nz else FUNCTION,
        arguments=MappingProxyType(
            {V2_NAMES.get(k, k): v for k, v in arguments.items()} if nz else arguments
        ),
        load=None if paged else Load(table, part.lengths, request.cache_layout),
        bias=bias,
        finish=_finish(request, part, layout == "BNSD", paged),
        fallbacks=unpaged,
        slow=slow,
    )


def _visibility(request: Request, part: Part, tokens: int) -> dict[str, Argument]:
    """Sparse mode and mask: which of a sequence's tokens a query sees."""
    if part.name == "decode":
        if not any(part.hidden) or _hides(request, part, tokens):
            return {}
        return {"atten_mask": WindowMask(part.hidden, tokens)}
    if request.window:
        return {
            "sparse_mode": 4,
            "atten_mask": CausalMask(),
            "pre_tokens": request.window - 1,
            "next_tokens": 0 if request.causal else UNLIMITED,
        }
    return {"sparse_mode": 3, "atten_mask": CausalMask()} if request.causal else {}


def _hides(request: Request, part: Part, tokens: int) -> bool:
    """Whether a score bias says what a window hides, for there is one or a mask will not do."""
    return request.score_bias or (part.name == "decode" and tokens > MASK_TOKENS)


def _bias(request: Request, part: Part, tokens: int) -> Bias | None:
    if not request.score_bias and not (any(part.hidden) and _hides(request, part, tokens)):
        return None
    return Bias(
        spans=part.spans,
        first_tokens=tuple(block * part.block_size for block in part.first_blocks),
        lengths=part.lengths,
        tokens=tokens,
        causal=request.causal,
        window=request.window,
    )


def _finish(request: Request, part: Part, heads_first: bool, paged: bool) -> Finish:
    return Finish(
        spans=part.spans,
        heads_first=heads_first,
        group=request.group,
        softmax_scale=request.softmax_scale,
        key_zero_point=paged and request.key_zero_point and request.key in STATIC,
        value_zero_point=paged and request.value_zero_point and request.value in STATIC,
        bias=request.score_bias,
        sinks=request.sinks,
    )
