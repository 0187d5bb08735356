"""Stands in for torch_npu's fused attention on a CPU: refuses what its documents forbid, computes
the rest in float64 from the arguments as they are given, and remembers every call.

It shares no code with the package. The signatures are those of torch_npu 2.13.0. What it refuses
was read in op-plugin's torch_npu-npu_fused_infer_attention_score.md and ..._v2.md (2026-08), in
aclnnFusedInferAttentionScoreV4.md and in the tiling code of ops-transformer, for the Atlas A2.

Known faults of the device are part of it: -inf in pse_shift gives NaN (llama.cpp-omni, pull
request 89), a mask at one query loses the keys from 512 on (vllm-ascend issue 15503). Where the
device leaves rows unwritten (queries past a sequence's length) there is NaN.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)
INT_MAX = 2**31 - 1
SCALES = ("key_antiquant_scale", "value_antiquant_scale")
OFFSETS = ("key_antiquant_offset", "value_antiquant_offset")


class Refused(ValueError):
    """The device would not take these arguments."""


def need(holds: bool, message: str) -> None:
    if not holds:
        raise Refused(message)


class StandIn:
    """``torch_npu``, as far as the plan goes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.npu = SimpleNamespace(is_available=lambda: True)

    def npu_fused_infer_attention_score(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pse_shift: Tensor | None = None,
        atten_mask: Tensor | None = None,
        actual_seq_lengths: list[int] | None = None,
        actual_seq_lengths_kv: list[int] | None = None,
        dequant_scale1: Tensor | None = None,
        quant_scale1: Tensor | None = None,
        dequant_scale2: Tensor | None = None,
        quant_scale2: Tensor | None = None,
        quant_offset2: Tensor | None = None,
        antiquant_scale: Tensor | None = None,
        antiquant_offset: Tensor | None = None,
        key_antiquant_scale: Tensor | None = None,
        key_antiquant_offset: Tensor | None = None,
        value_antiquant_scale: Tensor | None = None,
        value_antiquant_offset: Tensor | None = None,
        block_table: Tensor | None = None,
        query_padding_size: Tensor | None = None,
        kv_padding_size: Tensor | None = None,
        key_shared_prefix: Tensor | None = None,
        value_shared_prefix: Tensor | None = None,
        actual_shared_prefix_len: list[int] | None = None,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        key_rope_antiquant_scale: Tensor | None = None,
        num_heads: int = 1,
        scale: float = 1.0,
        pre_tokens: int = INT_MAX,
        next_tokens: int = INT_MAX,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        inner_precise: int = 0,
        block_size: int = 0,
        antiquant_mode: int = 0,
        key_antiquant_mode: int = 0,
        value_antiquant_mode: int = 0,
        softmax_lse_flag: bool = False,
    ) -> tuple[Tensor, Tensor]:
        arguments = {k: v for k, v in locals().items() if k != "self"}
        need(key.dim() != 5, "the NZ contract is documented for _v2 alone")
        return self._call("npu_fused_infer_attention_score", arguments, arguments)

    def npu_fused_infer_attention_score_v2(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        pse_shift: Tensor | None = None,
        atten_mask: Tensor | None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        block_table: Tensor | None = None,
        dequant_scale_query: Tensor | None = None,
        dequant_scale_key: Tensor | None = None,
        dequant_offset_key: Tensor | None = None,
        dequant_scale_value: Tensor | None = None,
        dequant_offset_value: Tensor | None = None,
        dequant_scale_key_rope: Tensor | None = None,
        quant_scale_out: Tensor | None = None,
        quant_offset_out: Tensor | None = None,
        quant_scale_p: Tensor | None = None,
        learnable_sink: Tensor | None = None,
        num_query_heads: int = 1,
        num_key_value_heads: int = 0,
        softmax_scale: float = 1.0,
        pre_tokens: int = INT_MAX,
        next_tokens: int = INT_MAX,
        input_layout: str = "BSH",
        sparse_mode: int = 0,
        block_size: int = 0,
        query_quant_mode: int = 0,
        key_quant_mode: int = 0,
        value_quant_mode: int = 0,
        inner_precise: int = 0,
        return_softmax_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        given = {k: v for k, v in locals().items() if k != "self"}
        need(learnable_sink is None, "learnable_sink: TND or NTD_TND and unquantized only")
        renamed = {
            "actual_seq_qlen": "actual_seq_lengths",
            "actual_seq_kvlen": "actual_seq_lengths_kv",
            "dequant_scale_key": "key_antiquant_scale",
            "dequant_offset_key": "key_antiquant_offset",
            "dequant_scale_value": "value_antiquant_scale",
            "dequant_offset_value": "value_antiquant_offset",
            "num_query_heads": "num_heads",
            "softmax_scale": "scale",
            "key_quant_mode": "key_antiquant_mode",
            "value_quant_mode": "value_antiquant_mode",
            "return_softmax_lse": "softmax_lse_flag",
        }
        arguments = {renamed.get(k, k): v for k, v in given.items()}
        return self._call("npu_fused_infer_attention_score_v2", given, arguments)

    def _call(
        self, name: str, given: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        defaults = inspect.signature(getattr(self, name)).parameters
        told = {k: v for k, v in given.items() if v is not defaults[k].default}
        self.calls.append((name, told))
        known = (
            *("query", "key", "value", "pse_shift", "atten_mask", "block_table", "scale"),
            *("actual_seq_lengths", "actual_seq_lengths_kv", *SCALES, *OFFSETS),
            *("num_heads", "num_key_value_heads", "pre_tokens", "next_tokens", "input_layout"),
            *("sparse_mode", "inner_precise", "block_size", "softmax_lse_flag"),
            *("key_antiquant_mode", "value_antiquant_mode"),
        )
        for argument, value in arguments.items():
            plain = not isinstance(value, Tensor) and value in (None, 0)
            need(argument in known or plain, f"{argument} is not for this use")
        call = SimpleNamespace(**{k: arguments[k] for k in known})
        read_shapes(call)
        check_common(call)
        (check_nz if call.nz else check_one if call.queries == 1 else check_several)(call)
        check_quantization(call)
        return compute(call)


def read_shapes(c: Any) -> None:
    """Batch, heads and lengths as the layout says them."""
    need(c.input_layout in ("BNSD", "BSND"), f"input_layout {c.input_layout}")
    need(c.query.dim() == 4, "query of 4 dimensions")
    heads_first = c.input_layout == "BNSD"
    c.batch, first, second, c.dim = c.query.shape
    c.heads, c.queries = (first, second) if heads_first else (second, first)
    c.kv_heads = c.num_key_value_heads or c.num_heads
    c.paged, c.nz = c.block_table is not None, c.key.dim() == 5
    c.quantized = c.key.dtype is torch.int8
    if c.paged:
        c.tokens = c.block_table.shape[1] * c.block_size
    else:
        c.tokens = c.key.shape[2 if heads_first else 1]


def check_common(c: Any) -> None:
    for name, x in vars(c).items():
        if isinstance(x, Tensor):
            need(x.is_contiguous(), f"{name} is not contiguous")
    need(c.query.dtype in HALF, f"query {c.query.dtype}")
    need(c.key.dtype in (c.query.dtype, torch.int8), f"key {c.key.dtype}, query {c.query.dtype}")
    need(c.key.shape == c.value.shape and c.key.dtype == c.value.dtype, "key and value differ")
    need(c.num_heads == c.heads, "num_heads is not the query's")
    need(c.heads % c.kv_heads == 0 and c.heads // c.kv_heads <= 64, "group of at most 64")
    need(c.heads <= 256 and c.batch <= 65536, "at most 256 heads, 65536 sequences")
    need(c.dim <= 512 and c.dim % (32 if c.quantized else 16) == 0, f"head_dim {c.dim}")
    need(c.key.numel() <= INT_MAX, "more elements than an int32 counts")
    need(c.batch > 0 and c.queries > 0, "empty query")
    lengths = c.actual_seq_lengths_kv
    need(isinstance(lengths, list), "lengths are a host list")
    need(all(type(n) is int and n >= 0 for n in lengths), "lengths are whole numbers")
    need(len(lengths) == c.batch, "one length a sequence")
    need(max(lengths) <= c.tokens, "a length beyond the keys")
    check_shapes(c)
    if c.pse_shift is not None:
        need(c.pse_shift.dtype == c.query.dtype, "pse_shift has the query's type")
        shape = (c.batch, c.heads, c.queries)
        # one head for all is reported to be taken and computed wrong (vllm-ascend issue 15503);
        # one sequence for all is not used here
        need(c.pse_shift.dim() == 4 and c.pse_shift.shape[:3] == shape, "pse_shift shape")
        need(c.pse_shift.shape[3] >= c.tokens, "pse_shift shorter than the keys")


def check_shapes(c: Any) -> None:
    blocks = c.key.shape[0]
    if not c.paged:
        need(c.key.dim() == 4 and c.key.shape[0] == c.batch, "one key tensor a sequence")
        heads = c.key.shape[1 if c.input_layout == "BNSD" else 2]
        need(heads == c.kv_heads and c.key.shape[3] == c.dim, "key heads or head_dim")
        need(c.block_size == 0, "block_size without block_table")
        return
    need(c.block_table.dtype is torch.int32 and c.block_table.dim() == 2, "block_table int32, 2-D")
    need(c.block_table.shape[0] == c.batch, "block_table has a row for each sequence")
    need(bool(((c.block_table >= 0) & (c.block_table < blocks)).all()), "no such block")
    needed = max(-(-n // c.block_size) for n in c.actual_seq_lengths_kv)
    need(c.block_table.shape[1] >= needed, "block_table too narrow")
    if c.key.dim() == 3:
        need(c.key.shape == (blocks, c.block_size, c.kv_heads * c.dim), "cache of 3 dimensions")
        need(c.kv_heads * c.dim <= 65535, "a row of more than 65535")
    elif c.key.dim() == 4:
        need(c.input_layout == "BNSD", "a cache of 4 dimensions wants a BNSD query")
        need(c.key.shape == (blocks, c.kv_heads, c.block_size, c.dim), "cache of 4 dimensions")
    else:
        shape = (blocks, c.kv_heads, c.dim // 32, c.block_size, 32)
        need(c.key.shape == shape, "NZ cache")


def check_one(c: Any) -> None:
    """One query: IncreFlashAttention."""
    need(c.tokens <= 262_144, "at most 262144 keys at one query")
    need(c.inner_precise in (0, 1), "inner_precise 0 or 1 at one query")
    if c.paged:
        multiple = 32 if c.quantized else 16
        need(c.block_size % multiple == 0 and 0 < c.block_size <= 512, f"block {c.block_size}")
    need(c.sparse_mode == 0, "sparse_mode is ignored at one query")
    if c.atten_mask is not None:
        need(c.atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), "mask type")
        need(c.atten_mask.shape[:3] == (c.batch, 1, 1), "mask of [B, 1, 1, S]")
        need(c.atten_mask.shape[3] >= c.tokens, "mask shorter than the keys")


def check_several(c: Any) -> None:
    """Several queries: PromptFlashAttention."""
    need(c.tokens <= 20_971_520, "at most 20971520 keys")
    need(c.inner_precise in (0, 1, 2, 3), "inner_precise 0 to 3")
    need(not c.quantized, "antiquant at several queries is not used here")
    if c.paged:
        need(c.block_size % 128 == 0 and 128 <= c.block_size <= 512, f"block {c.block_size}")
    lengths = c.actual_seq_lengths
    need(isinstance(lengths, list) and len(lengths) == c.batch, "query lengths are a host list")
    need(all(0 <= n <= c.queries for n in lengths), "a length beyond the queries")
    need(c.sparse_mode in (0, 3, 4), f"sparse_mode {c.sparse_mode}")
    check_triangle(c)
    if c.sparse_mode == 4:
        need(c.pre_tokens >= 0 and c.next_tokens >= 0, "band")


def check_triangle(c: Any) -> None:
    if c.sparse_mode == 0:
        need(c.atten_mask is None, "a full mask is not used here")
        return
    need(c.atten_mask is not None and c.atten_mask.shape == (2048, 2048), "mask of 2048 x 2048")
    expected = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    need(torch.equal(c.atten_mask.bool(), expected), "mask hides above the diagonal")


def check_nz(c: Any) -> None:
    """The contract of the NZ layout."""
    need(c.paged, "NZ is paged")
    need(c.query.dtype is torch.bfloat16 and c.quantized, "NZ: bfloat16 query, int8 cache")
    need(c.dim == 128 and c.block_size in (128, 512), "NZ: head_dim 128, blocks of 128 or 512")
    pair = (c.heads, c.kv_heads)
    need(pair in ((10, 1), (64, 8), (80, 8), (128, 16)), f"NZ: heads {pair}")
    need(c.inner_precise == 1, "NZ: inner_precise 1")
    need(c.pse_shift is None and not c.softmax_lse_flag, "NZ: no pse_shift, no log-sum-exp")
    need(c.actual_seq_lengths is None, "NZ: no query lengths")
    need(1 <= c.queries <= 16, "NZ: 1 to 16 queries")
    need((c.queries == 1) == (c.sparse_mode == 0), "NZ: sparse mode 0 at one query, 3 at several")
    need(c.sparse_mode in (0, 3), "NZ: sparse mode 0 or 3")
    check_triangle(c)
    need(all(getattr(c, name) is None for name in OFFSETS), "NZ: no offsets")
    modes = (c.key_antiquant_mode, c.value_antiquant_mode)
    need(modes in ((0, 0), (1, 1)), f"NZ: modes {modes}")


def check_quantization(c: Any) -> None:
    scales = [getattr(c, name) for name in SCALES]
    offsets = [getattr(c, name) for name in OFFSETS]
    modes = (c.key_antiquant_mode, c.value_antiquant_mode)
    need((scales[0] is None) == (scales[1] is None), "scales of both sides or none")
    need((offsets[0] is None) == (offsets[1] is None), "offsets of both sides or none")
    need(c.quantized == (scales[0] is not None), "scales and an int8 cache go together")
    if not c.quantized:
        need(modes == (0, 0) and offsets[0] is None, "nothing to scale")
        return
    need(modes[0] == modes[1] or modes == (0, 1), f"modes {modes}")
    need(all(0 <= mode <= 5 for mode in modes), f"modes {modes}")
    need(modes != (0, 1) or c.query.dtype is torch.float16, "key 0 / value 1: float16 query")
    if modes[0] == modes[1]:
        need(scales[0].shape == scales[1].shape, "scales of one shape")
    for scale, offset, mode in zip(scales, offsets, modes, strict=True):
        wanted = c.query.dtype if mode in (0, 2) else torch.float32
        need(scale.dtype is wanted, f"mode {mode}: {scale.dtype}")
        check_scale_shape(c, scale, mode)
        if offset is not None:
            need(offset.shape == scale.shape and offset.dtype is wanted, "offset as scale")


def check_scale_shape(c: Any, scale: Tensor, mode: int) -> None:
    shape, blocks = tuple(scale.shape), c.key.shape[0]
    n, d, size = c.kv_heads, c.dim, c.block_size
    if mode == 0:
        legal = {(1, n, 1, d), (1, n, d), (1, n * d), (1,)}
        if c.nz:
            legal = {(n, 1, d) if c.input_layout == "BNSD" else (n, d)}
    elif mode == 2:
        legal = {(n,)}
    elif mode in (1, 3):
        fits = shape[-1] >= c.tokens
        before = {1: (1, c.batch), 3: (c.batch, n)}[mode]
        need(fits and shape[:-1] == ((c.batch,) if c.nz else before), f"mode {mode}: {shape}")
        return
    else:
        need(c.paged, f"mode {mode} needs pages")
        legal = {(blocks, size) if mode == 4 else (blocks, n, size)}
    need(shape in legal, f"mode {mode}: {shape}, legal {legal}")


def dense(c: Any, cache: Tensor, row: int) -> Tensor:
    """The keys or values of one sequence as stored, ``[N, length, D]``, float64."""
    length = c.actual_seq_lengths_kv[row]
    if not c.paged:
        x = cache[row] if c.input_layout == "BNSD" else cache[row].transpose(0, 1)
        return x[:, :length].double()
    blocks = c.block_table[row, : -(-length // c.block_size)].long()
    taken = cache[blocks]
    if cache.dim() == 5:  # [n, N, D / 32, S, 32]
        taken = taken.permute(1, 0, 3, 2, 4).reshape(c.kv_heads, -1, c.dim)
    elif cache.dim() == 4:
        taken = taken.transpose(0, 1).reshape(c.kv_heads, -1, c.dim)
    else:
        taken = taken.reshape(-1, c.kv_heads, c.dim).transpose(0, 1)
    return taken[:, :length].double()


def parameter(c: Any, x: Tensor, mode: int, row: int) -> Tensor:
    """A scale or offset of one sequence, to be broadcast over ``[N, length, D]``."""
    length = c.actual_seq_lengths_kv[row]
    x = x.double()
    if mode == 0:
        return x if x.numel() == 1 else x.reshape(c.kv_heads, 1, c.dim)
    if mode == 2:
        return x[:, None, None]
    if mode == 1:
        return (x[row] if x.dim() == 2 else x[0, row])[None, :length, None]
    if mode == 3:
        return x[row, :, :length, None]
    blocks = c.block_table[row, : -(-length // c.block_size)].long()
    taken = x[blocks]  # [n, S] or [n, N, S]
    if mode == 4:
        return taken.flatten()[None, :length, None]
    return taken.transpose(0, 1).flatten(1)[:, :length, None]


def side(c: Any, name: str, row: int) -> Tensor:
    values = dense(c, getattr(c, name), row)
    if not c.quantized:
        return values
    mode = getattr(c, f"{name}_antiquant_mode")
    offset = getattr(c, f"{name}_antiquant_offset")
    if offset is not None:
        values = values + parameter(c, offset, mode, row)
    return values * parameter(c, getattr(c, f"{name}_antiquant_scale"), mode, row)


def hidden_keys(c: Any, row: int, queries: int) -> Tensor:
    """``[queries, length]``, True where a key is not seen."""
    length = c.actual_seq_lengths_kv[row]
    keys, asked = torch.arange(length), torch.arange(queries)[:, None] + length - queries
    if c.queries == 1:
        hidden = torch.zeros(1, length, dtype=torch.bool)
        if c.atten_mask is not None:
            hidden |= c.atten_mask[row, 0, 0, :length].bool()
            hidden[:, 512:] = True  # the fault
        return hidden
    if c.sparse_mode == 0:
        return torch.zeros(queries, length, dtype=torch.bool)
    if c.sparse_mode == 3:
        return keys > asked
    return (keys > asked + c.next_tokens) | (keys < asked - c.pre_tokens)


def compute(c: Any) -> tuple[Tensor, Tensor]:
    query = c.query if c.input_layout == "BNSD" else c.query.transpose(1, 2)
    output = torch.full(query.shape, math.nan, dtype=torch.float64)
    sums = torch.full((*query.shape[:3], 1), math.inf, dtype=torch.float64)
    group = c.heads // c.kv_heads
    for row in range(c.batch):
        queries = c.queries
        if c.actual_seq_lengths is not None:
            queries = c.actual_seq_lengths[row]
        keys, values = (side(c, name, row).repeat_interleave(group, 0) for name in ("key", "value"))
        scores = c.scale * query[row, :, :queries].double() @ keys.transpose(1, 2)
        if c.pse_shift is not None:
            shift = c.pse_shift[row, :, :queries, : keys.shape[1]].double()
            scores = scores + torch.where(shift == -math.inf, math.nan, shift)
        scores = scores.masked_fill(hidden_keys(c, row, queries), -math.inf)
        output[row, :, :queries] = torch.softmax(scores, -1) @ values
        sums[row, :, :queries, 0] = torch.logsumexp(scores, -1)
    if c.input_layout == "BSND":
        output = output.transpose(1, 2)
    result = output.to(c.query.dtype).contiguous()
    return result, sums.float() if c.softmax_lse_flag else torch.zeros(1)
