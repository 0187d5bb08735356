"""Small random checkpoints on disk, made with transformers, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def make_model(directory: Path, model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 model with lively attention into ``directory``; returns it."""
    config_class, model_class = _CLASSES[model_type]
    torch.manual_seed(seed)
    model = model_class(config_class(**(_SHAPE | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "embed" in name or "lm_head" in name:
                # The usual 0.02 leaves attention nearly uniform: errors in it would not show.
                parameter.normal_(0, 0.15)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "q_norm" in name or "k_norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory
