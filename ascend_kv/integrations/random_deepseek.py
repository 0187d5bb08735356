"""A small DeepSeek-V4 with random weights: layers and caches as they are, and no knowledge.

DeepSeek-V4's weights fill many cards. What its caches take, how requests share them and how long
attention takes does not depend on what the weights have learned, so a model of the same kinds of
layers, made from a seed, shows that anywhere. It generates nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_KINDS = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
_SHAPE: dict[str, Any] = {
    # DeepSeek-V4's own head, window, ratios and indexer keys, and fewer of everything else
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
    "index_n_heads": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "num_hash_layers": 1,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_random_deepseek(
    directory: Path, schedule: Sequence[str], seed: int = 0, **changes: Any
) -> Path:
    """Write a float32 model into ``directory``; returns it. It has no tokenizer.

    Args:
        directory: is made if need be.
        schedule: "window", "csa" or "hca" for each layer.
        seed: the same seed, the same model; the global random state is left alone.
        changes: other values of transformers' ``DeepseekV4Config`` than here.
    """
    types = [_KINDS[kind] for kind in schedule]
    given = {**_SHAPE, "num_hidden_layers": len(types), "layer_types": types, **changes}
    config = transformers.DeepseekV4Config(**given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.DeepseekV4ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
            for name, buffer in model.named_buffers():
                if name.endswith("tid2eid"):
                    buffer.random_(0, config.n_routed_experts)
    model.save_pretrained(directory)
    return directory


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Lively attention, where the usual deviation of 0.02 is nearly uniform; logits of order 1."""
    if "norm" in name:
        parameter.uniform_(0.5, 1.5)
    elif name.endswith(("position_bias", "sinks")):
        parameter.normal_(0, 1.0)
    elif "lm_head" in name:
        parameter.normal_(0, 0.06)
    elif "proj" in name or "embed" in name:
        parameter.normal_(0, 1.4 * parameter.shape[-1] ** -0.5)
    elif "hc" not in name:
        parameter.normal_(0, 0.2)
