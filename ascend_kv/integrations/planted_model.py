"""A small random Qwen2 whose key bias is as large against its keys as in Qwen2.5.

Real models with that trap are too large for a test. This one is made from a seed: a bias of some
hundreds in the slowest rotary pair of some layers (in Qwen2.5 too it lies in slow pairs; in fast
ones it would drown the scores), beside which an INT8 scale leaves the rest of a key one or two
levels. In float32 with an unquantized cache it works like any other model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

PLANTED_LAYERS = (0, 2)
PLANTED_NORM = 480.0
"""‖key bias‖ of each head of a planted layer. Its pair's bias is 90 times three times what varies
in that pair, as in the first layer of Qwen2.5-Coder-0.5B."""
# Lively attention; and sure of its tokens, so that a wrong cache shows.
_DEVIATIONS = {"proj": 0.11, "embed": 0.5, "lm_head": 0.4}


def make_planted_model(
    directory: Path,
    seed: int = 0,
    bias_norm: float = PLANTED_NORM,
    layers: tuple[int, ...] = PLANTED_LAYERS,
) -> Path:
    """Write the model in float32 into ``directory``; returns it. It has no tokenizer.

    Args:
        directory: is made if need be.
        seed: the same seed, the same model; the global random state is left alone.
        bias_norm: of the key bias of each head of a planted layer.
        layers: the planted ones; the others have small biases.
    """
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for part, deviation in _DEVIATIONS.items():
                    if part in name:
                        parameter.normal_(0, deviation)
            for layer in layers:
                _plant(model.model.layers[layer].self_attn, bias_norm)
    model.save_pretrained(directory)
    return directory


def _plant(attention: Any, norm: float) -> None:
    """Give each head's slowest pair a bias, in a direction at random."""
    half = attention.head_dim // 2
    bias = attention.k_proj.bias.view(-1, 2, half)
    angle = torch.rand(len(bias)) * 2 * torch.pi
    bias[..., half - 1] = norm * torch.stack((angle.cos(), angle.sin()), -1)
