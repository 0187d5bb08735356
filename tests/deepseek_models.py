"""Small random DeepSeek-V4 checkpoints, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from ascend_kv.integrations.random_deepseek import make_random_deepseek

FLASH_SCHEDULE = ("window", "window", "csa", "hca", "csa")
PRO_SCHEDULE = ("hca", "hca", "csa", "hca")
_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def make_deepseek(directory: Path, *schedule: str, seed: int = 0, **changes: Any) -> Path:
    """Write a model with small heads and windows into ``directory``; returns it."""
    shape = {**_SHAPE, **changes}
    return make_random_deepseek(directory, schedule or FLASH_SCHEDULE, seed, **shape)


def load_theirs(directory: Path) -> Any:
    """The model as transformers runs it."""
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def their_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """``[T, vocab]`` of one sequence in one call, without a cache."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
