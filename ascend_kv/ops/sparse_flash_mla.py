"""Attention to a window and to compressed entries, as CANN's SparseFlashMla takes it on a 910B.

SparseFlashMla of CANN's ops-transformer (``cann_ops_transformer.ops.sparse_flash_mla``, with
``sparse_flash_mla_metadata`` called before it) attends to both in one softmax with sinks, which
is what DeepSeek-V4's layers do. ``plan`` is a pure function from shapes and host lists to the two
calls' arguments, or to the rule that they would break; then our operators serve.

Its cache is addressed by a token's position. So a ring of W tokens is a block of which every
column of the table is the number, and pages that begin in the middle of a sequence lie behind
columns that no query sees.

| rule | legal |
|---|---|
| type | float16 or bfloat16, of queries, window and entries alike |
| entries | not quantized |
| head_dim | 512 |
| heads | 1, 2, 4, 8, 16, 32, 64 or 128 |
| window | 128 tokens |
| block_size | a multiple of 16, at most 1024 |
| ratio | 4 with a list of entries for each query, 128 without |
| list | of 512 or 1024 entries |

Source: ops-transformer, attention/sparse_flash_mla/README.md and its torch extension's
docs/zh/sparse_flash_mla.md, for the Atlas A2. Never run on an NPU here: the tests have a stand-in
that does what these documents say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

FUNCTIONS = ("sparse_flash_mla", "sparse_flash_mla_metadata")
HEAD_DIM = 512
WINDOW_TOKENS = 128
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LIST_RATIO, DENSE_RATIO = 4, 128
LISTS = (512, 1024)
MAX_BLOCK_SIZE = 1024
_BAND, _CAUSAL, _NO_MASK = 4, 3, 0


@dataclass(frozen=True)
class Request:
    """One attention over B sequences, without its tensors.

    Attributes:
        dtype: of queries and of the window.
        entries_dtype: of the entries as they lie.
        num_heads, head_dim: of the queries.
        window: tokens a query sees as they are, itself included.
        window_block_size: tokens of a block of the window's cache.
        entry_block_size: entries of a block.
        ratio: tokens of an entry; 0 where there are no entries.
        listed: entries in the list of each query; 0 where it attends to all that it may see.
        query_lengths: B host ints, queries of each sequence, the last ones of its tokens.
        lengths: B host ints, all tokens of each sequence.
    """

    dtype: torch.dtype
    entries_dtype: torch.dtype
    num_heads: int
    head_dim: int
    window: int
    window_block_size: int
    entry_block_size: int
    ratio: int
    listed: int
    query_lengths: tuple[int, ...]
    lengths: tuple[int, ...]


class Plan(NamedTuple):
    """The arguments of both calls that are no tensors of the cache.

    Attributes:
        metadata: positional and other arguments of ``sparse_flash_mla_metadata``; lists become
            int32 tensors.
        attention: alike for ``sparse_flash_mla``, but for queries, caches, tables and sinks.
    """

    metadata: Mapping[str, Any]
    attention: Mapping[str, Any]


class Unserved(NamedTuple):
    """The rule that a request breaks."""

    rule: str
    given: object
    legal: str

    def __str__(self) -> str:
        return f"{self.rule}: got {self.given}; legal: {self.legal}"


def _block_size_is_legal(size: int) -> bool:
    return size % 16 == 0 and 0 < size <= MAX_BLOCK_SIZE


_Rule = tuple[str, str, Callable[[Request], bool], Callable[[Request], object]]
_RULES: tuple[_Rule, ...] = (
    ("type", "float16 or bfloat16", lambda r: r.dtype in (torch.float16, torch.bfloat16),
     lambda r: r.dtype),
    ("entries", "of the queries' type, not quantized",
     lambda r: not r.ratio or r.entries_dtype == r.dtype, lambda r: r.entries_dtype),
    ("head_dim", f"{HEAD_DIM}", lambda r: r.head_dim == HEAD_DIM, lambda r: r.head_dim),
    ("heads", f"{HEADS}", lambda r: r.num_heads in HEADS, lambda r: r.num_heads),
    ("window", f"{WINDOW_TOKENS}", lambda r: r.window == WINDOW_TOKENS, lambda r: r.window),
    ("block_size", f"a multiple of 16, at most {MAX_BLOCK_SIZE}",
     lambda r: _block_size_is_legal(r.window_block_size)
     and (not r.ratio or _block_size_is_legal(r.entry_block_size)),
     lambda r: (r.window_block_size, r.entry_block_size)),
    ("ratio", f"{LIST_RATIO} with lists, {DENSE_RATIO} without, or no entries",
     lambda r: (r.ratio, bool(r.listed)) in ((0, False), (LIST_RATIO, True), (DENSE_RATIO, False)),
     lambda r: (r.ratio, r.listed)),
    ("list", f"{LISTS} entries", lambda r: not r.listed or r.listed in LISTS,
     lambda r: r.listed),
)  # fmt: skip


def plan(request: Request) -> Plan | Unserved:
    """The calls for a request, or the first rule that it breaks."""
    for rule, legal, holds, given in _RULES:
        if not holds(request):
            return Unserved(rule, given(request), legal)
    ratio, lengths = request.ratio, list(request.lengths)
    entries = [length // ratio for length in lengths] if ratio else []
    has_entries = any(entries)  # a call without any attends to the window alone
    shared: dict[str, Any] = {
        "cu_seqlens_q": [0, *accumulate(request.query_lengths)],
        "seqused_ori_kv": lengths,
        "cmp_ratio": ratio if has_entries else 1,
        "ori_mask_mode": _BAND,
        "cmp_mask_mode": _CAUSAL if has_entries else _NO_MASK,
        "ori_win_left": request.window - 1,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
    }
    if has_entries:
        shared["seqused_cmp_kv"] = entries
        shared["cmp_residual_kv"] = [length % ratio for length in lengths]
    metadata = {
        "num_heads_q": request.num_heads,
        "num_heads_kv": 1,
        "head_dim": request.head_dim,
        "batch_size": len(lengths),
        "max_seqlen_q": max(request.query_lengths),
        "max_seqlen_ori_kv": max(lengths),
        "max_seqlen_cmp_kv": max(entries, default=0),
        "ori_topk": 0,
        "cmp_topk": request.listed if has_entries else 0,
        "has_ori_kv": True,
        "has_cmp_kv": has_entries,
    }
    attention = {"topk_value_mode": 1, "return_softmax_lse": False}
    return Plan({**metadata, **shared}, {**attention, **shared})


class PreparedCall:
    """A plan with its lists as tensors and its metadata computed: once for all layers."""

    def __init__(self, plan: Plan, library: Any, device: torch.device) -> None:
        """Call ``library.sparse_flash_mla_metadata``."""
        self._library = library
        tensors = {
            name: torch.tensor(value, dtype=torch.int32, device=device)
            for name, value in plan.metadata.items()
            if isinstance(value, list)
        }
        self.has_entries = bool(plan.metadata["has_cmp_kv"])
        self.metadata: Tensor = library.sparse_flash_mla_metadata(**{**plan.metadata, **tensors})
        self._attention = {name: tensors.get(name, value) for name, value in plan.attention.items()}

    def attend(
        self,
        query: Tensor,
        window: Tensor,
        window_table: Tensor,
        entries: Tensor | None,
        entry_table: Tensor | None,
        listed: Tensor | None,
        sinks: Tensor,
        softmax_scale: float,
    ) -> Tensor:
        """Call ``library.sparse_flash_mla``.

        Args:
            query: ``[T, H, D]``.
            window: ``[K, 1, S, D]``. window_table: ``[B, M]`` int32, by position // S.
            entries: ``[K, 1, S, D]``. entry_table: ``[B, M]`` int32, alike for entries.
            listed: ``[T, k]`` int32 entries of each query, -1 for none.
            sinks: ``[H]`` float32. softmax_scale: of the scores.

        Returns:
            ``[T, H, D]``.
        """
        options: dict[str, Tensor | None] = {}
        if self.has_entries:
            assert entries is not None and entry_table is not None
            options = {
                "cmp_kv": entries.transpose(1, 2),
                "cmp_block_table": entry_table.clamp(min=0),
                "cmp_sparse_indices": None if listed is None else listed[:, None],
            }
        output: Tensor
        output, _ = self._library.sparse_flash_mla(
            query.contiguous(),
            ori_kv=window.transpose(1, 2),
            ori_block_table=window_table.clamp(min=0),
            sinks=sinks.to(torch.float32),
            metadata=self.metadata,
            softmax_scale=softmax_scale,
            **options,
            **self._attention,
        )
        return output
