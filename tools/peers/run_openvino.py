"""OpenVINO GenAI, its paged attention driven step by step; see ``protocol.py``."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from protocol import Engine, Request, Step, serve, versions

CACHE_GIB = 1


def open_engine(request: Request) -> Engine:
    """The variant is OpenVINO's KV_CACHE_PRECISION: f16, u8 or u4."""

    def prefill(token_ids: list[int]) -> Step:
        # A pipeline of its own for each sequence: one pipeline would decode both as a batch.
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(request.model),
            _scheduling(),
            "CPU",
            {"KV_CACHE_PRECISION": request.variant, "INFERENCE_NUM_THREADS": request.threads},
        )
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = request.most_tokens - len(token_ids)
        generation.ignore_eos = True
        generation.do_sample = False
        tensor = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        handle = pipeline.add_request(0, tensor, generation)

        def step() -> None:
            pipeline.step()
            if not handle.can_read():
                raise RuntimeError("a step gave no token: the pipeline stopped early")
            handle.read()

        while not handle.can_read():
            pipeline.step()
        handle.read()
        return step

    loaded = f"{request.model.name}, by OpenVINO's own reader of GGUF"
    return Engine(versions("openvino-genai", "openvino"), loaded, prefill)


def _scheduling() -> openvino_genai.SchedulerConfig:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIB
    scheduling.max_num_seqs = 1
    scheduling.enable_prefix_caching = False
    return scheduling


if __name__ == "__main__":
    serve(open_engine)
