"""Small random DeepSeek-V4 checkpoints, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
FLASH_SCHEDULE = ("window", "window", "csa", "hca", "csa")
PRO_SCHEDULE = ("hca", "hca", "csa", "hca")
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 512,
    "sliding_window": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "num_hash_layers": 1,
    "max_position_embeddings": 1024,
    "rope_parameters": YARN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_config(schedule: tuple[str, ...] = FLASH_SCHEDULE, **changes: Any) -> Any:
    """A small configuration with layers of these kinds."""
    types = [KINDS[kind] for kind in schedule]
    given = {**_SHAPE, "num_hidden_layers": len(types), "layer_types": types, **changes}
    return transformers.DeepseekV4Config(**given)


def make_deepseek(directory: Path, *schedule: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 model with lively attention into ``directory``; returns it."""
    torch.manual_seed(seed)
    config = make_config(schedule or FLASH_SCHEDULE, **changes)
    model = transformers.DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("position_bias", "sinks")):
                parameter.normal_(0, 1.0)
            elif "lm_head" in name:
                parameter.normal_(0, 0.06)  # logits of order 1
            elif "proj" in name or "embed" in name:
                # The usual 0.02 leaves attention nearly uniform: errors in it would not show.
                parameter.normal_(0, 0.25)
            elif "hc" not in name:
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(0, config.n_routed_experts)
    model.save_pretrained(directory)
    return directory


def load_theirs(directory: Path) -> Any:
    """The model as transformers runs it."""
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def their_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """``[T, vocab]`` of one sequence in one call, without a cache."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
