"""Configurations of the usual models, so that a plan needs neither a download nor a network.

Each is what its ``config.json`` on the Hugging Face hub says, as far as memory and speed depend on
it. ``sources`` name the repository; a test holds the parameters that follow from these figures
against the counts that the models' authors publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class BuiltinModel(NamedTuple):
    """One configuration.

    Attributes:
        config: the fields of ``config.json`` that a plan reads.
        source: the hub repository that has it.
        published_parameters: by its authors, in total.
    """

    config: Mapping[str, Any]
    source: str
    published_parameters: float


Shape = tuple[int, int, int, int, int]
"""Layers, hidden size, query heads, KV heads, intermediate size."""


def _model(
    source: str, published: float, model_type: str, tied: bool, fields: Mapping[str, Any]
) -> BuiltinModel:
    config = {
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **fields,
    }
    return BuiltinModel(MappingProxyType(config), f"config.json of {source}", published)


def _dense(
    source: str,
    published: float,
    model_type: str,
    shape: Shape,
    vocabulary: int,
    longest: int,
    head_dim: int | None = None,
    tied: bool = False,
    more: Mapping[str, Any] | None = None,
) -> BuiltinModel:
    layers, hidden, heads, kv_heads, intermediate = shape
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        **(more or {}),
    }
    return _model(source, published, model_type, tied, fields)


def _qwen2(size: str, published: float, shape: Shape, vocabulary: int, tied: bool) -> BuiltinModel:
    source = f"Qwen/Qwen2.5-{size}-Instruct"
    return _dense(source, published, "qwen2", shape, vocabulary, 32768, tied=tied)


def _qwen3(size: str, published: float, shape: Shape, tied: bool = False) -> BuiltinModel:
    return _dense(f"Qwen/Qwen3-{size}", published, "qwen3", shape, 151936, 40960, 128, tied)


def _qwen3_moe(size: str, published: float, shape: Shape, expert_width: int) -> BuiltinModel:
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_width,
    }
    source = f"Qwen/Qwen3-{size}"
    return _dense(source, published, "qwen3_moe", shape, 151936, 40960, 128, more=experts)


def _llama(
    name: str, published: float, shape: Shape, longest: int = 131072, tied: bool = False
) -> BuiltinModel:
    source = f"meta-llama/{name}-Instruct"
    return _dense(source, published, "llama", shape, 128256, longest, tied=tied)


def _mistral(
    name: str, published: float, shape: Shape, vocabulary: int, more: Mapping[str, Any]
) -> BuiltinModel:
    kind = "mixtral" if "num_local_experts" in more else "mistral"
    fields = {"sliding_window": None, **more}
    return _dense(f"mistralai/{name}", published, kind, shape, vocabulary, 32768, 128, more=fields)


def _deepseek(source: str, published: float, model_type: str, **fields: Any) -> BuiltinModel:
    common = {"vocab_size": 129280, "n_shared_experts": 1, "moe_intermediate_size": 2048}
    return _model(f"deepseek-ai/{source}", published, model_type, False, common | fields)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": (128, 128)}
_CSA, _HCA, _WINDOW = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)


def _deepseek_v4(
    source: str, published: float, first: str, layers: int, **fields: Any
) -> BuiltinModel:
    # After the first two, Flash goes on with CSA at even layers, Pro likewise.
    kinds = [first] * 2 + [_CSA if layer % 2 == 0 else _HCA for layer in range(2, layers)]
    return _deepseek(
        source, published, "deepseek_v4",
        num_hidden_layers=layers, layer_types=tuple(kinds), num_key_value_heads=1, head_dim=512,
        qk_rope_head_dim=64, num_experts_per_tok=6, sliding_window=128, index_n_heads=64,
        index_head_dim=128, max_position_embeddings=1048576, compress_rates={_CSA: 4, _HCA: 128},
        hc_mult=4, quantization_config=_FP8, expert_dtype="fp4",
        **fields,
    )  # fmt: skip


BUILTIN_MODELS: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "qwen2.5-0.5b": _qwen2("0.5B", 0.49e9, (24, 896, 14, 2, 4864), 151936, True),
        "qwen2.5-1.5b": _qwen2("1.5B", 1.54e9, (28, 1536, 12, 2, 8960), 151936, True),
        "qwen2.5-3b": _qwen2("3B", 3.09e9, (36, 2048, 16, 2, 11008), 151936, True),
        "qwen2.5-7b": _qwen2("7B", 7.61e9, (28, 3584, 28, 4, 18944), 152064, False),
        "qwen2.5-14b": _qwen2("14B", 14.7e9, (48, 5120, 40, 8, 13824), 152064, False),
        "qwen2.5-32b": _qwen2("32B", 32.5e9, (64, 5120, 40, 8, 27648), 152064, False),
        "qwen2.5-72b": _qwen2("72B", 72.7e9, (80, 8192, 64, 8, 29568), 152064, False),
        "qwen3-0.6b": _qwen3("0.6B", 0.6e9, (28, 1024, 16, 8, 3072), tied=True),
        "qwen3-1.7b": _qwen3("1.7B", 1.7e9, (28, 2048, 16, 8, 6144), tied=True),
        "qwen3-4b": _qwen3("4B", 4.0e9, (36, 2560, 32, 8, 9728), tied=True),
        "qwen3-8b": _qwen3("8B", 8.2e9, (36, 4096, 32, 8, 12288)),
        "qwen3-14b": _qwen3("14B", 14.8e9, (40, 5120, 40, 8, 17408)),
        "qwen3-32b": _qwen3("32B", 32.8e9, (64, 5120, 64, 8, 25600)),
        "qwen3-30b-a3b": _qwen3_moe("30B-A3B", 30.5e9, (48, 2048, 32, 4, 6144), 768),
        "qwen3-235b-a22b": _qwen3_moe("235B-A22B", 235e9, (94, 4096, 64, 4, 12288), 1536),
        "llama-3-8b": _llama("Meta-Llama-3-8B", 8.03e9, (32, 4096, 32, 8, 14336), 8192),
        "llama-3-70b": _llama("Meta-Llama-3-70B", 70.6e9, (80, 8192, 64, 8, 28672), 8192),
        "llama-3.1-8b": _llama("Llama-3.1-8B", 8.03e9, (32, 4096, 32, 8, 14336)),
        "llama-3.1-70b": _llama("Llama-3.1-70B", 70.6e9, (80, 8192, 64, 8, 28672)),
        "llama-3.1-405b": _llama("Llama-3.1-405B", 405.9e9, (126, 16384, 128, 8, 53248)),
        "llama-3.2-1b": _llama("Llama-3.2-1B", 1.24e9, (16, 2048, 32, 8, 8192), tied=True),
        "llama-3.2-3b": _llama("Llama-3.2-3B", 3.21e9, (28, 3072, 24, 8, 8192), tied=True),
        "llama-3.3-70b": _llama("Llama-3.3-70B", 70.6e9, (80, 8192, 64, 8, 28672)),
        "mistral-7b": _mistral(
            "Mistral-7B-Instruct-v0.3", 7.25e9, (32, 4096, 32, 8, 14336), 32768, {}
        ),
        "mistral-small-24b": _mistral(
            "Mistral-Small-24B-Instruct-2501", 23.6e9, (40, 5120, 32, 8, 32768), 131072, {}
        ),
        "mixtral-8x7b": _mistral(
            "Mixtral-8x7B-Instruct-v0.1", 46.7e9, (32, 4096, 32, 8, 14336), 32000,
            {"num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        "deepseek-v3.2": _deepseek(
            "DeepSeek-V3.2-Exp", 671e9, "deepseek_v32",
            num_hidden_layers=61, hidden_size=7168, intermediate_size=18432,
            num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512, q_lora_rank=1536,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256,
            num_experts_per_tok=8, first_k_dense_replace=3, index_n_heads=64, index_head_dim=128,
            index_topk=2048, quantization_config=_FP8,
            max_position_embeddings=163840,
        ),
        "deepseek-v4-flash": _deepseek_v4(
            "DeepSeek-V4-Flash", 284e9, _WINDOW, 43,
            hidden_size=4096, num_attention_heads=64, n_routed_experts=256, q_lora_rank=1024,
            o_groups=8, o_lora_rank=1024, index_topk=512,
        ),
        "deepseek-v4-pro": _deepseek_v4(
            "DeepSeek-V4-Pro", 1.6e12, _HCA, 61,
            hidden_size=7168, num_attention_heads=128, n_routed_experts=384,
            moe_intermediate_size=3072, q_lora_rank=1536, o_groups=16, o_lora_rank=1024,
            index_topk=1024,
        ),
    }
)  # fmt: skip
"""By short name, such as "qwen2.5-7b"."""

_REPOSITORIES = {
    builtin.source.removeprefix("config.json of ").lower(): name
    for name, builtin in BUILTIN_MODELS.items()
}


def find_builtin(model: str) -> str | None:
    """The short name of a built-in model, from that name or its own hub id; None for others.

    Only the repository that a configuration was read from: its siblings (base models, other
    versions) may have other positions or windows.
    """
    return model.lower() if model.lower() in BUILTIN_MODELS else _REPOSITORIES.get(model.lower())
