"""What an operator is for: attention, KV cache, matmul, communication, copies, or something else.

Decided by names, first match first: those of CANN and of its neighbours (aclnn, vllm-ascend,
sgl-kernel-npu, ATB), of ATen, and of this package, whose kernels have the operators' names.
"""

from __future__ import annotations

import re
from functools import lru_cache

ATTENTION, KV, MATMUL, OTHER = "attention", "KV operators", "matmul", "other operators"
COMMUNICATION, COPIES, GAPS = "communication", "copies", "host gaps"

CATEGORIES = (ATTENTION, KV, MATMUL, OTHER, COMMUNICATION, COPIES)
"""In order of precedence: where several run at once, the time belongs to the first of these.

So communication is what was not hidden behind computing, and a copy what nothing hid.
"""

_COLLECTIVE_CORES = ("COMMUNICATION", "HCCL")
_COPY_CORES = re.compile(r"SDMA|MEMCPY|PCIE_DMA", re.IGNORECASE)
_PATTERNS = (
    (COMMUNICATION, r"^(hcom_|hccl|c10d::|_?allreduce|_?allgather|_?reducescatter|_?alltoall)"),
    (
        KV,
        r"kv_?cache|^(k_?v_?|paged_?)?cache_?(load|store|move)|reshape_?and_?cache|scatter_?pa_?|"
        r"gather_?pa_?|kv_?rms_?norm|quant_?update_?scatter|quant_?scatter|kv_?compress|"
        r"hca_?(de)?compress|indexer_?quant_?cache|^compressor",
    ),
    (
        ATTENTION,
        r"attention|flash_?mla|sparse_?mla|multi_?latent|lightning_?indexer|select_?topk|"
        r"scaled_dot_product|ring_?mla",
    ),
    (
        MATMUL,
        r"mat_?mul|gemm|addmm|baddbmm|(^|::|_)(mm|bmm|linear|grouped_mm|_int_mm)(_|$)|"
        r"^(m|b)m_?v?\d*$",
    ),
    (COPIES, r"memcpy|^sdma|tensor_?move"),
)
_COMPILED = tuple((category, re.compile(text, re.IGNORECASE)) for category, text in _PATTERNS)
_NUMBERED = re.compile(r"_+\d+(_\d+)*$")


@lru_cache(maxsize=1 << 12)
def label_of(name: str, kind: str) -> str:
    """What calls of one kind are counted under: the type, else the name without what numbers it.

    ``aclnnMatmul_MatMulCommon_MatMulV2`` is the kernel MatMulV2, ``hcom_allReduce__428_0_1`` one
    of many hcom_allReduce, and ``ascend_kv::kv_cache_store`` the operator of this package.
    """
    if kind and not name.startswith("hcom_"):
        return kind
    name = name.removeprefix("ascend_kv::")
    if name.startswith(("aclnn", "aclop")):
        name = name.rsplit("_", 1)[-1]
    return _NUMBERED.sub("", name) or name


@lru_cache(maxsize=1 << 12)
def category_of(name: str, kind: str, core: str) -> str:
    """One of ``CATEGORIES``."""
    if core.upper().startswith(_COLLECTIVE_CORES):
        return COMMUNICATION
    if _COPY_CORES.search(core):
        return COPIES
    name = name.removeprefix("ascend_kv::")
    for candidate in (kind, name) if kind else (name,):
        for category, pattern in _COMPILED:
            if pattern.search(candidate):
                return category
    return OTHER
