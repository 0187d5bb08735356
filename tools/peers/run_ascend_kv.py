"""ascend_kv itself, a whole step of its engine; see ``protocol.py``."""

from __future__ import annotations

import torch
from protocol import Engine, Request, Step, serve, versions

from ascend_kv import LLMEngine, SamplingParams, __version__
from ascend_kv.integrations.loading import load_model
from ascend_kv.ops.registration import has_kernel


def open_engine(request: Request) -> Engine:
    """The variant is ``kv_cache_dtype``."""
    torch.set_num_threads(request.threads)
    weights = load_model(request.model)

    def prefill(token_ids: list[int]) -> Step:
        # An engine of its own for each sequence: one engine would decode both as a batch.
        engine = LLMEngine(
            request.model,
            weights=weights,
            kv_cache_dtype=request.variant,
            max_model_len=request.most_tokens,
            max_num_seqs=1,
            skip_tokenizer_init=True,
            device="cpu",
        )
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        engine.add_request("only", {"prompt_token_ids": token_ids}, params)
        while not engine.step():
            pass
        return engine.step

    served = "native" if has_kernel("paged_attention", "cpu") else "reference"
    loaded = f"{request.model.name}, read into {weights.dtype}; {served} operators"
    used = {"ascend_kv": __version__} | versions("transformers", "torch")
    return Engine(used, loaded, prefill)


if __name__ == "__main__":
    serve(open_engine)
