"""How many weights DeepSeek's attention has, and which of them no recipe for Ascend quantizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_kv.compressed_layers import layers_from_config
from ascend_kv.model_config import count_or_zero, need_count


def deepseek_attention(config: Mapping[str, Any]) -> int:
    """Weights of DeepSeek's attention in all layers: low-rank query, latent, indexer, output.

    V3.2: multi-head latent attention. V4: one key that is the value too, a gate and, where four
    tokens are compressed into one, both twice; a grouped output projection. Widths as in
    ``transformers``' ``deepseek_v32`` and ``deepseek_v4``.
    """
    hidden, rank = need_count(config, "hidden_size"), need_count(config, "q_lora_rank")
    heads = need_count(config, "num_attention_heads")
    layers = need_count(config, "num_hidden_layers")
    index_dim = need_count(config, "index_head_dim")
    indexer = need_count(config, "index_n_heads") * (rank * index_dim + hidden) + hidden * index_dim
    if config["model_type"] != "deepseek_v4":
        latent, rope = need_count(config, "kv_lora_rank"), need_count(config, "qk_rope_head_dim")
        nope, value = need_count(config, "qk_nope_head_dim"), need_count(config, "v_head_dim")
        query = rank * (hidden + heads * (nope + rope))
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return layers * (query + keys + heads * value * hidden + indexer)
    dim, out_rank = need_count(config, "head_dim"), need_count(config, "o_lora_rank")
    query = rank * (hidden + heads * dim)
    output = out_rank * (heads * dim + need_count(config, "o_groups") * hidden)
    sparse = layers_from_config(config).count("csa")
    indexer -= hidden * index_dim  # keys come from a compressor
    return layers * (query + output + hidden * dim) + sparse * indexer + _compressors(config)


def _compressors(config: Mapping[str, Any]) -> int:
    """Weights that make DeepSeek-V4's entries and indexer keys, in all layers."""
    layers, hidden = layers_from_config(config), need_count(config, "hidden_size")
    heavy = 2 * hidden * layers.head_dim  # key and gate
    sparse = 2 * heavy + 2 * 2 * hidden * layers.index_dim
    return layers.count("hca") * heavy + layers.count("csa") * sparse


def deepseek_kept(config: Mapping[str, Any]) -> list[int]:
    """``Parameters.half`` and ``half_with_int8``: what recipes for Ascend do not quantize.

    V3.2's recipe says the same of its projections: INT8 for ``q_b``, ``o`` and the indexer's query
    only. Source: cann-recipes-infer, the quantization chapters of both inference guides.
    """
    hidden, rank = need_count(config, "hidden_size"), need_count(config, "q_lora_rank")
    heads = need_count(config, "num_attention_heads")
    layers = need_count(config, "num_hidden_layers")
    routers = hidden * need_count(config, "n_routed_experts")
    index_heads = hidden * need_count(config, "index_n_heads")
    if config["model_type"] == "deepseek_v4":
        dim = need_count(config, "head_dim")
        half = layers * routers + layers_from_config(config).count("csa") * index_heads
        more = hidden * (rank + dim) + need_count(config, "o_lora_rank") * heads * dim
        return [half + _compressors(config), layers * more]
    latent, rope = need_count(config, "kv_lora_rank"), need_count(config, "qk_rope_head_dim")
    nope, value = need_count(config, "qk_nope_head_dim"), need_count(config, "v_head_dim")
    sparse = layers - count_or_zero(config, "first_k_dense_replace")
    more = hidden * (rank + latent + rope + need_count(config, "index_head_dim"))
    more += latent * heads * (nope + value)
    return [sparse * routers + layers * index_heads, layers * more]
