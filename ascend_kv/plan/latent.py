"""DeepSeek-V3.2's cache: a latent of every token and its indexer key, in every layer.

The latent stands for the keys and values of all heads: ``kv_lora_rank`` numbers and the
``qk_rope_head_dim`` that RoPE turns (multi-head latent attention; 512 + 64). Beside it lies an
indexer key of 128. A query attends to the ``index_topk`` latents that the indexer chooses. So it is
a cache of "csa" entries of one token each, without a window and without state.

This package does not serve the model; its cache is planned. INT8 is the layout of CANN's
``kv_quant_sparse_flash_attention``: 512 codes with a float32 scale for each 128, the part with RoPE
in 16 bit, and an INT8 indexer key with a float32 scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_kv.compressed_layers import CompressedFormats, CompressedLayers
from ascend_kv.geometry import ModelGeometry
from ascend_kv.model_config import need_count

LATENT_MODEL_TYPE = "deepseek_v32"
_TILE, _FLOAT32_BYTES = 128, 4


@dataclass(frozen=True)
class LatentLayers(CompressedLayers):
    """Layers whose entries hold one token each."""

    def state_tokens(self, kind: str) -> int:
        return 0

    def entry_bytes(self, kind: str, formats: CompressedFormats) -> int:
        if formats.entries != "int8":
            return super().entry_bytes(kind, formats)
        more_tiles = -(-(self.head_dim - self.rotary_dim) // _TILE) - 1
        return super().entry_bytes(kind, formats) + more_tiles * _FLOAT32_BYTES


def latent_geometry(config: Mapping[str, Any]) -> ModelGeometry:
    """The geometry of a DeepSeek-V3.2 ``config.json``.

    Raises:
        UnsupportedModelError: names the field that is missing.
    """
    layers = need_count(config, "num_hidden_layers")
    rotary = need_count(config, "qk_rope_head_dim")
    width = need_count(config, "kv_lora_rank") + rotary
    return ModelGeometry(
        model_type=LATENT_MODEL_TYPE,
        num_layers=layers,
        num_heads=need_count(config, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=width,
        hidden_size=need_count(config, "hidden_size"),
        vocab_size=need_count(config, "vocab_size"),
        max_position_tokens=need_count(config, "max_position_embeddings"),
        dtype="bfloat16",
        layer_windows=(None,) * layers,
        compressed=LatentLayers(
            kinds=("csa",) * layers,
            head_dim=width,
            rotary_dim=rotary,
            index_dim=need_count(config, "index_head_dim"),
            index_topk=need_count(config, "index_topk"),
            window_tokens=0,
            csa_ratio=1,
        ),
    )
