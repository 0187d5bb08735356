"""What tests of static scales share: a format, and an engine that runs on one."""

from __future__ import annotations

from typing import Any

import torch

from ascend_kv.geometry import FormatSpec, format_spec
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM

MAX_MODEL_LEN = 64
Scales = dict[str, torch.Tensor]


def static(granularity: str, symmetric: bool = True) -> FormatSpec:
    return format_spec("int8", granularity, symmetric, "static")


def make_llm(weights: LoadedModel, **options: Any) -> LLM:
    given = {
        "kv_cache_dtype": "int8",
        "pair_scaling": True,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": 1 << 20,
    } | options
    return LLM(weights.path, weights=weights, skip_tokenizer_init=True, **given)
