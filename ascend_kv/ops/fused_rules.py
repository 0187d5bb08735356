"""What the NPU's fused attention accepts, and what serves instead where it does not.

On the Atlas A2 (910B). A call over the paged cache that breaks a rule is made over *loaded* keys
and values, which ``kv_cache_load`` gathers and dequantizes; where that does not help either, the
*reference* serves the whole batch. The report counts both. ``RULES`` says the same to ``plan``.

| rule | holds for | legal | instead | source |
|---|---|---|---|---|
| query type | every call | float16 or bfloat16 | reference | V4 |
| positions | every call | none given: order tells what a query sees | reference | V4 |
| entries | every call | no lists of what a query attends to | reference | V4 |
| heads | every call | at most 256 | reference | V4 |
| group | every call | at most 64 query heads a KV head | reference | V4 |
| head_dim | every call | a multiple of 16, at most 512 | reference | V4 |
| batch | every call | at most 65536 sequences | reference | V4 |
| decode length | every decode | at most 262144 tokens | reference | V4 |
| prefill length | every prefill | at most 20971520 tokens | reference | V4 |
| loaded elements | loaded | at most 2147483647 in the loaded keys | reference | V4 |
| cache type | paged | int8, or the query's own type, keys and values alike | loaded | V4 |
| cache elements | paged | at most 2147483647 in a cache | loaded | op-plugin |
| cache row | paged BSND | kv_heads * head_dim at most 65535 | loaded | V4 |
| int8 head_dim | paged int8 | a multiple of 32 | loaded | op-plugin |
| scales | paged int8 | a pair that an antiquant mode has | loaded | V4 |
| mode 0/1 query | paged int8 | key 0 / value 1 with a float16 query only | loaded | V4 |
| decode block_size | paged decode | int8: a multiple of 32; else of 16; at most 512 | loaded | V4 |
| table capacity | paged decode | at most 262144 tokens in a row's blocks | loaded | V4 |
| prefill block_size | paged prefill | a multiple of 128, at most 512 | loaded | op-plugin |
| prefill cache | paged prefill | unquantized: antiquant excludes paging | loaded | op-plugin |
| NZ types | paged NZ | int8 cache and bfloat16 query | loaded | V4 |
| NZ head_dim | paged NZ | 128 | loaded | V4 |
| NZ block_size | paged NZ | 128 or 512 | loaded | V4 |
| NZ heads | paged NZ | 10/1, 64/8, 80/8 or 128/16 | loaded | V4 |
| NZ scales | paged NZ | modes 0 and 1: static, or a token's own | loaded | V4 |
| NZ offsets | paged NZ | no zero points of tokens | loaded | V4 |
| NZ score bias | paged NZ | none | loaded | tiling |
| NZ log-sum-exp | paged NZ | not asked for, and no sinks, which need it | loaded | tiling |
| NZ window | paged NZ | none: no mask but the causal one | loaded | V4 |
| NZ queries | paged NZ | 1 to 16, as many for each sequence; causal if several | loaded | tiling |

Sources: V4, aclnnFusedInferAttentionScoreV4.md of ops-transformer; op-plugin, its
torch_npu-npu_fused_infer_attention_score(_v2).md of 2026-08; tiling, the operators' host code in
ops-transformer (incre_flash_attention, prompt_flash_attention). The NZ contract is documented
for ``_v2`` alone in the last of these documents, so NZ calls use that.

The rules of NZ and of BSND wait for a cache that lies so: none does today (``fused_request``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ascend_kv.ops.fused_request import STATIC, Part, Request
from ascend_kv.ops.fused_scales import modes

INT32_MAX = 2**31 - 1
MAX_DECODE_TOKENS = 262_144
MAX_PREFILL_TOKENS = 20_971_520
NZ_HEADS = ((10, 1), (64, 8), (80, 8), (128, 16))
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rule:
    """One row of the table, with the test of it.

    ``holds`` says whether a part of a batch keeps the rule, ``given`` what it has instead.
    """

    name: str
    legal: str
    source: str
    holds: Callable[[Request, Part], bool]
    given: Callable[[Request, Part], object]


@dataclass(frozen=True)
class Fallback:
    """A rule that a part of a batch breaks: what it has, and what serves instead."""

    rule: str
    part: str
    given: str
    legal: str
    instead: str

    def __str__(self) -> str:
        told = f"{self.part}, {self.rule}: got {self.given}; legal: {self.legal}"
        return f"{told}; served by: {self.instead}"


def _decode_blocks(r: Request, p: Part) -> bool:
    return r.block_size % (32 if r.quantized else 16) == 0 and r.block_size <= 512


def _no_token_offsets(r: Request, p: Part) -> bool:
    key = r.key_zero_point and r.key not in STATIC
    return not (key or (r.value_zero_point and r.value not in STATIC))


def _nz_queries(r: Request, p: Part) -> bool:
    same = len({count for _, count in p.spans}) == 1
    return same and p.queries <= 16 and (p.queries == 1 or r.causal)


def _loaded_elements(r: Request, p: Part) -> int:
    return len(p.rows) * r.kv_heads * p.longest * r.head_dim


def _cache_types(r: Request, p: Part) -> object:
    return f"{r.cache_dtype}, {r.value_dtype}" if r.value_dtype else r.cache_dtype


def _pair(r: Request, p: Part) -> str:
    return f"key {r.key}, value {r.value}"


RULES: Mapping[str, tuple[Rule, ...]] = {
    "every call": (
        Rule(
            *("query type", "float16 or bfloat16", "V4"),
            lambda r, p: r.query_dtype in HALF,
            lambda r, p: r.query_dtype,
        ),
        Rule(
            *("positions", "none given: order tells what a query sees", "V4"),
            lambda r, p: not r.positions,
            lambda r, p: "positions",
        ),
        Rule(
            *("entries", "no lists of what a query attends to", "V4"),
            lambda r, p: not r.entries,
            lambda r, p: "entries",
        ),
        Rule(
            *("heads", "at most 256", "V4"),
            lambda r, p: r.num_heads <= 256,
            lambda r, p: r.num_heads,
        ),
        Rule(
            *("group", "at most 64 query heads a KV head", "V4"),
            lambda r, p: r.group <= 64,
            lambda r, p: r.group,
        ),
        Rule(
            *("head_dim", "a multiple of 16, at most 512", "V4"),
            lambda r, p: r.head_dim % 16 == 0 and r.head_dim <= 512,
            lambda r, p: r.head_dim,
        ),
        Rule(
            *("batch", "at most 65536 sequences", "V4"),
            lambda r, p: len(p.rows) <= 65536,
            lambda r, p: len(p.rows),
        ),
    ),
    "every decode": (
        Rule(
            *("decode length", f"at most {MAX_DECODE_TOKENS} tokens", "V4"),
            lambda r, p: p.longest <= MAX_DECODE_TOKENS,
            lambda r, p: p.longest,
        ),
    ),
    "every prefill": (
        Rule(
            *("prefill length", f"at most {MAX_PREFILL_TOKENS} tokens", "V4"),
            lambda r, p: p.longest <= MAX_PREFILL_TOKENS,
            lambda r, p: p.longest,
        ),
    ),
    "loaded": (
        Rule(
            *("loaded elements", f"at most {INT32_MAX} in the loaded keys", "V4"),
            lambda r, p: _loaded_elements(r, p) <= INT32_MAX,
            _loaded_elements,
        ),
    ),
    "paged": (
        Rule(
            *("cache type", "int8, or the query's own type, keys and values alike", "V4"),
            lambda r, p: r.cache_dtype in (torch.int8, r.query_dtype) and not r.value_dtype,
            _cache_types,
        ),
        Rule(
            *("cache elements", f"at most {INT32_MAX} in a cache", "op-plugin"),
            lambda r, p: r.cache_elements <= INT32_MAX,
            lambda r, p: r.cache_elements,
        ),
    ),
    "paged BSND": (
        Rule(
            *("cache row", "kv_heads * head_dim at most 65535", "V4"),
            lambda r, p: r.kv_heads * r.head_dim <= 65535,
            lambda r, p: r.kv_heads * r.head_dim,
        ),
    ),
    "paged int8": (
        Rule(
            *("int8 head_dim", "a multiple of 32", "op-plugin"),
            lambda r, p: r.head_dim % 32 == 0,
            lambda r, p: r.head_dim,
        ),
        Rule(
            *("scales", "a pair that an antiquant mode has", "V4"),
            lambda r, p: modes(r) is not None,
            _pair,
        ),
        Rule(
            *("mode 0/1 query", "key 0 / value 1 with a float16 query only", "V4"),
            lambda r, p: modes(r) != (0, 1) or r.query_dtype is torch.float16,
            lambda r, p: r.query_dtype,
        ),
    ),
    "paged decode": (
        Rule(
            *("decode block_size", "int8: a multiple of 32; else of 16; at most 512", "V4"),
            _decode_blocks,
            lambda r, p: r.block_size,
        ),
        Rule(
            *("table capacity", f"at most {MAX_DECODE_TOKENS} tokens in a row's blocks", "V4"),
            lambda r, p: p.width * r.block_size <= MAX_DECODE_TOKENS,
            lambda r, p: p.width * r.block_size,
        ),
    ),
    "paged prefill": (
        Rule(
            *("prefill block_size", "a multiple of 128, at most 512", "op-plugin"),
            lambda r, p: r.quantized or (r.block_size % 128 == 0 and r.block_size <= 512),
            lambda r, p: r.block_size,
        ),
        Rule(
            *("prefill cache", "unquantized: antiquant excludes paging", "op-plugin"),
            lambda r, p: not r.quantized,
            lambda r, p: r.cache_dtype,
        ),
    ),
    "paged NZ": (
        Rule(
            *("NZ types", "int8 cache and bfloat16 query", "V4"),
            lambda r, p: r.quantized and r.query_dtype is torch.bfloat16,
            lambda r, p: f"{r.cache_dtype}, {r.query_dtype}",
        ),
        Rule(
            *("NZ head_dim", "128", "V4"),
            lambda r, p: r.head_dim == 128,
            lambda r, p: r.head_dim,
        ),
        Rule(
            *("NZ block_size", "128 or 512", "V4"),
            lambda r, p: r.block_size in (128, 512),
            lambda r, p: r.block_size,
        ),
        Rule(
            *("NZ heads", "10/1, 64/8, 80/8 or 128/16", "V4"),
            lambda r, p: (r.num_heads, r.kv_heads) in NZ_HEADS,
            lambda r, p: f"{r.num_heads}/{r.kv_heads}",
        ),
        Rule(
            *("NZ scales", "modes 0 and 1: static, or a token's own", "V4"),
            lambda r, p: modes(r) in ((0, 0), (1, 1)),
            _pair,
        ),
        Rule(
            *("NZ offsets", "no zero points of tokens", "V4"),
            _no_token_offsets,
            lambda r, p: "zero points",
        ),
        Rule(
            *("NZ score bias", "none", "tiling"),
            lambda r, p: not r.score_bias,
            lambda r, p: "score_bias",
        ),
        Rule(
            *("NZ log-sum-exp", "not asked for, and no sinks, which need it", "tiling"),
            lambda r, p: not (r.log_sum_exp or r.sinks),
            lambda r, p: "log_sum_exp or sinks",
        ),
        Rule(
            *("NZ window", "none: no mask but the causal one", "V4"),
            lambda r, p: not r.window,
            lambda r, p: r.window,
        ),
        Rule(
            *("NZ queries", "1 to 16, as many for each sequence; causal if several", "tiling"),
            _nz_queries,
            lambda r, p: [count for _, count in p.spans],
        ),
    ),
}


def instead_of(group: str) -> str:
    """What serves a call that breaks a rule of a group of ``RULES``."""
    return "loaded" if group.startswith("paged") else "reference"


def broken(request: Request, part: Part, route: str) -> tuple[Fallback, ...]:
    """The rules that a part breaks when it goes the route ``paged`` or ``loaded``."""
    layout, nz = request.cache_layout, request.cache_layout == "NZ"
    groups = ["every call", f"every {part.name}"]
    if route == "loaded":
        groups.append("loaded")
    else:
        groups += ["paged", *(["paged int8"] if request.quantized else [])]
        groups += [f"paged {layout}", *([] if nz else [f"paged {part.name}"])]
    return tuple(
        Fallback(
            rule.name, part.name, str(rule.given(request, part)), rule.legal, instead_of(group)
        )
        for group in groups
        for rule in RULES.get(group, ())
        if not rule.holds(request, part)
    )
