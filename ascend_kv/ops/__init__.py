"""The operators, one file each; importing this registers them as ``torch.ops.ascend_kv.*``.

Compiled operators serve where they were built (``native``, ``platform``), else the references.
"""

from __future__ import annotations

from ascend_kv.ops.attention_scores import attention_scores
from ascend_kv.ops.hca_compress import hca_compress
from ascend_kv.ops.hca_decompress import hca_decompress
from ascend_kv.ops.kv_cache_dequantize import kv_cache_dequantize
from ascend_kv.ops.kv_cache_load import kv_cache_load
from ascend_kv.ops.kv_cache_move import kv_cache_move
from ascend_kv.ops.kv_cache_quantize import kv_cache_quantize
from ascend_kv.ops.kv_cache_store import kv_cache_store
from ascend_kv.ops.merge_attention import merge_attention
from ascend_kv.ops.native import load_cpu_operators
from ascend_kv.ops.paged_attention import paged_attention
from ascend_kv.ops.platform import register_npu_operators
from ascend_kv.ops.select_topk import select_topk

__all__ = [
    "attention_scores",
    "hca_compress",
    "hca_decompress",
    "kv_cache_dequantize",
    "kv_cache_load",
    "kv_cache_move",
    "kv_cache_quantize",
    "kv_cache_store",
    "merge_attention",
    "paged_attention",
    "select_topk",
]

load_cpu_operators()
register_npu_operators()
