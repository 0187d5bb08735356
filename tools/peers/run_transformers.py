"""transformers with its own caches, dense and quantized; see ``protocol.py``."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Engine, Request, Step, serve, versions
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

# quanto and hqq quantize along a token's channels, in groups of a head.
QUANTIZED: dict[str, dict[str, Any]] = {
    "quanto int4": {"backend": "quanto", "nbits": 4, "q_group_size": 64},
    "hqq int4": {"backend": "hqq", "nbits": 4, "q_group_size": 64, "axis_key": 1, "axis_value": 1},
    "hqq int8": {"backend": "hqq", "nbits": 8, "q_group_size": 64, "axis_key": 1, "axis_value": 1},
    "fp8": {"backend": "fp8"},
}
DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_engine(request: Request) -> Engine:
    """A dense variant names the type of weights and cache; quantized ones compute in float32."""
    torch.set_num_threads(request.threads)
    dtype = DENSE.get(request.variant, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        request.model.parent, gguf_file=request.model.name, dtype=dtype, attn_implementation="sdpa"
    ).eval()

    def prefill(token_ids: list[int]) -> Step:
        if request.variant in DENSE:
            cache = DynamicCache(config=model.config)
        else:
            cache = QuantizedCache(config=model.config, **QUANTIZED[request.variant])

        @torch.inference_mode()
        def forward(ids: list[int]) -> None:
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)

        forward(token_ids)
        return lambda: forward(token_ids[:1])

    loaded = f"{request.model.name}, read into {str(dtype).removeprefix('torch.')}"
    packages = ["transformers", "torch"]
    backend = QUANTIZED.get(request.variant, {}).get("backend")
    packages += {"quanto": ["optimum-quanto"], "hqq": ["hqq"]}.get(backend, [])
    return Engine(versions(*packages), loaded, prefill)


if __name__ == "__main__":
    serve(open_engine)
