"""``LLM``: model, cache and engine behind one class with vLLM's argument and result names."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.tables import make_tables
from ascend_kv.config import (
    CacheConfig,
    SchedulerConfig,
    format_bytes,
    plan_blocks,
    resolve_block_size,
    resolve_formats,
)
from ascend_kv.devices import get_device
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.request import CompletionOutput, RequestOutput, SamplingParams
from ascend_kv.errors import UsageError
from ascend_kv.integrations.huggingface import HuggingFaceModel
from ascend_kv.integrations.loading import LoadedModel, eos_token_ids, load_model, load_tokenizer
from ascend_kv.ops import platform

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any]
_DEFAULT_KV_BYTES = 1 << 30


class LLM:
    """A model on a paged, possibly quantized KV cache.

    Example:
        >>> llm = LLM("Qwen/Qwen2.5-7B-Instruct", kv_cache_dtype="int8", max_model_len=4096)
        >>> outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
        >>> outputs[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        granularity: str = "token_head",
        symmetric: bool = True,
        kv_cache_dtype_skip_layers: Sequence[int] = (),
        max_model_len: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        block_size: int | None = None,
        kv_allocator: str = "paged",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_chunked_prefill: bool = True,
        skip_tokenizer_init: bool = False,
        seed: int = 0,
        device: str = "auto",
        weights: LoadedModel | None = None,
    ) -> None:
        """Load the model and allocate its cache.

        Args:
            model: directory with config.json and safetensors, ``.gguf`` file, or hub id.
            dtype: weights and arithmetic: auto (the checkpoint's), float32, float16, bfloat16.
            kv_cache_dtype: auto (the model's), float32, float16, bfloat16, int8.
            granularity: what shares an INT8 scale in the cache: token_head or token.
            symmetric: INT8 without zero points.
            kv_cache_dtype_skip_layers: layers kept in the model's type.
            max_model_len: longest prompt and output together, in tokens; None: the model's.
            kv_cache_memory_bytes: bytes for keys, values and scales; None: on an NPU 90 % of
                the free memory, on a CPU 1 GiB or one longest sequence (said in the log).
            block_size: tokens a block; None: the device's default.
            kv_allocator: paged, or contiguous (max_model_len reserved for every sequence).
            max_num_seqs: most sequences at once.
            max_num_batched_tokens: most tokens a step.
            enable_chunked_prefill: cut long prompts into chunks that fit a step.
            skip_tokenizer_init: take and give token ids only.
            seed: for requests without a seed of their own.
            device: auto, cpu or npu.
            weights: what ``load_model`` returned, to share weights between several ``LLM``.

        Raises:
            UsageError: a value that is not legal, among them a budget too small for one sequence.
            UnsupportedModelError: a model that cannot be served.
        """
        self.device = platform.find_device() if device == "auto" else device
        platform.check_device(self.device)
        self.weights = load_model(model, dtype, self.device) if weights is None else weights
        self.geometry = self.weights.geometry
        cache_config = CacheConfig(
            kv_cache_dtype=kv_cache_dtype,
            granularity=granularity,
            symmetric=symmetric,
            kv_cache_dtype_skip_layers=tuple(kv_cache_dtype_skip_layers),
            block_size=block_size,
            allocator=kv_allocator,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        )
        self.formats = resolve_formats(self.geometry, cache_config, self.weights.dtype)
        self.max_model_len = self._max_model_len(max_model_len)
        device_figures = get_device(platform.device_name(self.device))
        self.block_size = resolve_block_size(cache_config, device_figures, self.formats)
        num_blocks = plan_blocks(
            self.geometry,
            self.formats,
            self.block_size,
            self._memory_bytes(kv_cache_memory_bytes),
            self.max_model_len,
        )
        scheduler = SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.tokenizer = None if skip_tokenizer_init else load_tokenizer(self.weights.path)
        self.tables = make_tables(kv_allocator, num_blocks, self.block_size, self.max_model_len)
        self.cache = PagedKVCache(
            self.geometry, self.formats, self.tables.num_blocks, self.block_size, self.device
        )
        self.model = HuggingFaceModel(self.weights, self.cache)
        self.engine = Engine(
            self.model,
            self.tables,
            scheduler,
            eos_token_ids(self.weights.hf_model),
            self.geometry.vocab_size,
            seed,
        )
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate a continuation of every prompt, batched as the cache allows.

        Args:
            prompts: text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``, or a list.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output a prompt, in order. A prompt that cannot be served (empty, too long) has
            ``error`` set and finish_reason "error"; the others are served all the same.

        Raises:
            UsageError: arguments of the wrong kind; nothing has been generated then.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise UsageError("sampling_params", f"{len(params)} of them", f"1 or {len(items)}")
        texts_and_ids = [self._tokenize(item) for item in items]
        ids = [str(next(self._request_ids)) for _ in items]
        results: dict[str, RequestOutput] = {}
        for request_id, (text, token_ids), one in zip(ids, texts_and_ids, params, strict=True):
            try:
                self.engine.add_request(request_id, token_ids, one, text)
            except UsageError as error:
                logger.warning("request %s refused: %s", request_id, error)
                results[request_id] = _refused(request_id, text, token_ids, error)
        try:
            with tqdm(
                total=len(ids), initial=len(results), unit="request", disable=not use_tqdm
            ) as bar:
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        if output.finished:
                            results[output.request_id] = output
                            bar.update()
        finally:
            for request_id in ids:  # after an interruption the engine must be usable again
                self.engine.abort_request(request_id)
        for output in results.values():
            self._detokenize(output)
        return [results[request_id] for request_id in ids]

    def _tokenize(self, item: Prompt) -> tuple[str | None, list[int]]:
        legal = 'text, {"prompt": text} or {"prompt_token_ids": [integers]}'
        if isinstance(item, Mapping) and "prompt_token_ids" in item:
            token_ids = list(item["prompt_token_ids"])
            if not all(isinstance(token, int) for token in token_ids):
                raise UsageError("prompt_token_ids", token_ids, "integers")
            return item.get("prompt"), token_ids
        text = item.get("prompt") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise UsageError("prompt", item, legal)
        if self.tokenizer is None:
            raise UsageError("prompt", text, "prompt_token_ids when skip_tokenizer_init=True")
        return text, list(self.tokenizer(text)["input_ids"])

    def _detokenize(self, output: RequestOutput) -> None:
        if self.tokenizer is None:
            return
        for completion in output.outputs:
            completion.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)

    def _max_model_len(self, given: int | None) -> int:
        longest = self.geometry.max_position_tokens
        if given is None:
            return longest
        if not 2 <= given <= longest:
            raise UsageError("max_model_len", given, f"2 to {longest} (the model's positions)")
        return given

    def _memory_bytes(self, given: int | None) -> int:
        if given is not None:
            return given
        if self.device == "npu":
            share = int(0.9 * platform.free_memory_bytes(self.device))
        else:
            blocks = -(-self.max_model_len // self.block_size)
            longest = blocks * self.geometry.block_bytes(self.formats, self.block_size)
            share = max(_DEFAULT_KV_BYTES, longest)
        logger.info("kv_cache_memory_bytes not given: using %s", format_bytes(share))
        return share


def _refused(
    request_id: str, prompt: str | None, token_ids: list[int], error: UsageError
) -> RequestOutput:
    completion = CompletionOutput(0, "", [], "error")
    return RequestOutput(request_id, prompt, token_ids, [completion], True, str(error))
