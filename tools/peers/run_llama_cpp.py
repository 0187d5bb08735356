"""llama.cpp through llama-cpp-python; see ``protocol.py``."""

from __future__ import annotations

from typing import Any

import llama_cpp
from protocol import Engine, Request, Step, serve, versions

TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}


def open_engine(request: Request) -> Engine:
    """Keys and values have the same type; quantized values need flash attention, so all get it."""
    kind = TYPES[request.variant]
    _leave_weights_as_they_are()

    def prefill(token_ids: list[int]) -> Step:
        # A context of its own for each sequence: in a shared one a step scans the others' cells.
        llama = llama_cpp.Llama(
            str(request.model),
            n_ctx=request.most_tokens,
            n_threads=request.threads,
            n_threads_batch=request.threads,
            flash_attn=True,
            type_k=kind,
            type_v=kind,
            verbose=False,
        )
        llama.eval(token_ids)
        return lambda: llama.eval(token_ids[:1])

    loaded = f"{request.model.name}, in the file's types, not repacked"
    return Engine(versions("llama-cpp-python"), loaded, prefill)


def _leave_weights_as_they_are() -> None:
    """Repacked weights are multiplied in AMX tiles, which some virtual machines only announce.

    Attention does not use them. ``Llama`` has no argument for it: it asks for the defaults.
    """
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = without_repacking


if __name__ == "__main__":
    serve(open_engine)
