"""``LLMEngine``: model, cache and engine joined behind vLLM's argument names, step by step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.residual_tables import ResidualTables
from ascend_kv.cache.static_scales import load_static_scales
from ascend_kv.cache.tables import SequenceTables, make_tables
from ascend_kv.cache.untrained import UntrainedKVCache
from ascend_kv.config import (
    CacheConfig,
    KeyCalibration,
    KeyOffsetLayers,
    KVCacheDtype,
    KVCacheScales,
    PairScaling,
    SchedulerConfig,
    merge_kv_cache_config,
)
from ascend_kv.devices import get_device
from ascend_kv.engine.batch import Model
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.engine.params import SamplingParams, check_whole
from ascend_kv.errors import UsageError
from ascend_kv.geometry import LayerFormat, format_spec
from ascend_kv.integrations.deepseek_v4 import make_compressed_cache
from ascend_kv.integrations.huggingface import HuggingFaceModel
from ascend_kv.integrations.key_calibration import read_key_calibration
from ascend_kv.integrations.key_conditioning import UNCONDITIONED, KeyConditioning
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.loading import LoadedModel, eos_token_ids, load_model, load_tokenizer
from ascend_kv.integrations.prompts import Prompt, TokenizedPrompt, tokenize
from ascend_kv.integrations.untrained import make_untrained_cache
from ascend_kv.ops import platform
from ascend_kv.resolved_cache import (
    check_quantization_is_used,
    plan_blocks,
    resolve_block_size,
    resolve_compressed_formats,
    resolve_formats,
    resolve_untrained_format,
)
from ascend_kv.user_values import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 1 << 30
_NPU_MEMORY_UTILIZATION = 0.9
_CLIPPING_TO_WARN_OF = 0.01
"""Share of a layer's numbers beyond its static scales"""


class LLMEngine:
    """A model on a paged, possibly quantized KV cache, driven step by step.

    Example:
        >>> engine = LLMEngine("Qwen/Qwen2.5-7B-Instruct", kv_cache_config={"block_size": 128})
        >>> engine.add_request("a", "Hello", SamplingParams(max_tokens=32))
        >>> while engine.has_unfinished_requests():
        ...     for output in engine.step():
        ...         print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        granularity: str = "token_head",
        symmetric: bool = True,
        scale_type: str = "dynamic",
        group_size: int | None = None,
        kv_cache_scales: KVCacheScales | Path | None = None,
        indexer_cache_dtype: str = "auto",
        kv_cache_dtype_skip_layers: Sequence[int] = (),
        kv_cache_dtype_layers: Mapping[str, Any] | None = None,
        pair_scaling: PairScaling = "auto",
        key_offset_layers: KeyOffsetLayers | Sequence[int] = "auto",
        key_calibration: KeyCalibration | Path | None = None,
        max_model_len: int | None = None,
        kv_cache_memory_bytes: int | str | None = None,
        gpu_memory_utilization: float | None = None,
        block_size: int | None = None,
        kv_allocator: str = "paged",
        kv_cache_config: Mapping[str, Any] | None = None,
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
            kv_cache_dtype: auto (the model's), float32, float16, bfloat16, int8, fp8 (fp8_e4m3),
                fp8_e5m2 or int4, perhaps with words after it as in "int4/asymmetric/hadamard"
                (``ascend_kv.format_names``); or two for keys and values, {"k": "int8", "v": "int4"}
                or "k:int8+v:int4"; or "int4/kivi" (``cache.residual``). A device refuses
                what it cannot read.
            granularity: what shares a scale in the cache: token_head, token or group; with static
                scales also layer, head or channel, but not group.
            symmetric: INT8 and INT4 without zero points; FP8 has none.
            scale_type: dynamic: every token's scales come from its own keys and values; static:
                from ``kv_cache_scales``, and what lies beyond them is clipped, which
                ``cache.clipped_shares()`` counts and ``generate`` warns of.
            group_size: channels of a head that share a scale, with granularity group.
            kv_cache_scales: static scales: a safetensors file, the directory of a checkpoint with
                ``k_scale`` and ``v_scale``, or a mapping; ``ascend_kv.cache.static_scales`` says
                what is in them. They must have been made from keys conditioned as here.
            indexer_cache_dtype: DeepSeek-V4 only, the keys of its indexer: auto (the model's
                type) or int8. ``kv_cache_dtype`` is that of its compressed entries.
            kv_cache_dtype_skip_layers: layers kept in the model's type.
            kv_cache_dtype_layers: other formats for some layers, {"0..3": "int8", "-1": "auto"}.
            pair_scaling: scale key channels to like size, in the weights; auto: where keys are
                quantized, True: everywhere, False: nowhere.
            key_offset_layers: layers whose keys are stored without the model's key bias: auto,
                all, none, or a list. ``conditioning`` says what was done and why.
            key_calibration: the file that ``evaluate.calibration.calibrate_keys`` made of this
                model and a text: stored keys lack their mean then in place of the key bias, in
                models without one too.
            max_model_len: longest prompt and output together, in tokens; None: the model's.
            kv_cache_memory_bytes: bytes for keys, values and scales: a number, or text such as
                "1.5GiB"; not more than are free.
            gpu_memory_utilization: where no bytes are given: on an NPU the share of its memory
                that weights and cache may take together (0.9), on a CPU the share of the memory
                still available after the weights; None there: 1 GiB or one longest sequence.
                What came of it is said in the log.
            block_size: tokens a block; None: the device's default.
            kv_allocator: paged, or contiguous (max_model_len reserved for every sequence).
            kv_cache_config: any of the above about the cache in one mapping, with
                ``enable_paged_attention`` for ``kv_allocator``; and, there only, ``compression``
                with ``untrained_compression: true`` (``ascend_kv.untrained_compression``).
            max_num_seqs: most sequences at once.
            max_num_batched_tokens: most tokens a step.
            enable_chunked_prefill: cut long prompts into chunks that fit a step.
            skip_tokenizer_init: take and give token ids only.
            seed: for requests without a seed of their own.
            device: auto, cpu or npu.
            weights: what ``load_model`` returned, to share weights between several engines;
                ``dtype`` is auto or theirs then.

        Raises:
            UsageError: a value that is not legal, among them a budget too small for one sequence,
                and settings of scales where no layer is quantized.
            UnsupportedModelError: a model that cannot be served.
        """
        _check_utilization(gpu_memory_utilization)
        if not isinstance(skip_tokenizer_init, bool):
            raise UsageError("skip_tokenizer_init", skip_tokenizer_init, "True, False")
        cache_config = merge_kv_cache_config(
            CacheConfig(
                kv_cache_dtype=kv_cache_dtype,
                granularity=granularity,
                symmetric=symmetric,
                scale_type=scale_type,
                group_size=group_size,
                kv_cache_scales=str(kv_cache_scales)
                if isinstance(kv_cache_scales, Path)
                else kv_cache_scales,
                indexer_cache_dtype=indexer_cache_dtype,
                kv_cache_dtype_skip_layers=kv_cache_dtype_skip_layers,  # type: ignore[arg-type]
                kv_cache_dtype_layers=kv_cache_dtype_layers,
                block_size=block_size,
                kv_allocator=kv_allocator,
                kv_cache_memory_bytes=None
                if kv_cache_memory_bytes is None
                else parse_bytes(kv_cache_memory_bytes),
                pair_scaling=pair_scaling,
                key_offset_layers=key_offset_layers,  # type: ignore[arg-type]
                key_calibration=str(key_calibration)
                if isinstance(key_calibration, Path)
                else key_calibration,
            ),
            {} if kv_cache_config is None else kv_cache_config,
        )
        limits = partial(
            SchedulerConfig,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        # before weights are loaded; what depends on the model is looked at afterwards
        check_whole("seed", seed, 0)
        limits(_least_model_len(max_model_len))
        self.device = platform.find_device() if device == "auto" else device
        platform.check_device(self.device)
        self.weights = load_model(model, dtype, self.device) if weights is None else weights
        if weights is not None and dtype not in ("auto", weights.dtype):
            raise UsageError("dtype", dtype, f"auto or {weights.dtype}, as the weights are")
        self.geometry = self.weights.geometry
        self.max_model_len = _max_model_len(max_model_len, self.geometry.max_position_tokens)
        scheduler = limits(self.max_model_len)
        self._warned_of_clipping = False
        self.formats: tuple[LayerFormat, ...] = ()
        self.tables: SequenceTables
        self.cache: PagedKVCache | CompressedKVCache | UntrainedKVCache
        self.model: Model
        self.conditioning: KeyConditioning
        if self.geometry.compressed is not None:
            self._make_compressed_cache(cache_config, gpu_memory_utilization, max_num_seqs)
        elif cache_config.compression is not None:
            self._make_untrained_cache(cache_config, gpu_memory_utilization, scheduler)
        else:
            self._make_paged_cache(cache_config, gpu_memory_utilization, max_num_seqs)
        self.tokenizer = None if skip_tokenizer_init else load_tokenizer(self.weights.path)
        self.engine = Engine(
            self.model,
            self.tables,
            scheduler,
            eos_token_ids(self.weights.hf_model),
            self.geometry.vocab_size,
            seed,
            self.tokenizer,
        )

    def _make_paged_cache(
        self, config: CacheConfig, utilization: float | None, max_num_seqs: int
    ) -> None:
        """Tables, cache and model of layers that keep every token."""
        self.formats = resolve_formats(self.geometry, config, self.weights.dtype)
        check_quantization_is_used(config, self.formats)
        device = get_device(platform.device_name(self.device))
        self.block_size = resolve_block_size(config, device, self.formats)
        blocks = -(-self.max_model_len // self.block_size)
        longest = self.geometry.cache_bytes(
            self.formats, blocks, self.block_size, self.max_model_len, max_num_seqs
        )
        memory_bytes = self._memory_bytes(config, utilization, longest)
        num_blocks = plan_blocks(
            self.geometry,
            self.formats,
            self.block_size,
            memory_bytes,
            self.max_model_len,
            max_num_seqs,
        )
        self.tables = make_tables(
            config.kv_allocator, num_blocks, self.block_size, self.max_model_len
        )
        if self.geometry.residual_bytes(self.formats, self.block_size):
            self.tables = ResidualTables(self.tables, max_num_seqs)
        keys = condition_keys(
            self.weights,
            self.formats,
            config.pair_scaling,
            config.key_offset_layers,
            read_key_calibration(self.weights, config.key_calibration),
        )
        self.conditioning = keys.conditioning
        static_scales = load_static_scales(
            config.kv_cache_scales,
            self.geometry,
            self.formats,
            self.max_model_len,
            self.conditioning.identity,
        )
        self.cache = PagedKVCache(
            self.geometry,
            self.formats,
            self.tables.num_blocks,
            self.block_size,
            self.device,
            static_scales,
            max_num_seqs,
            self.weights.dtype,
        )
        self.model = HuggingFaceModel(self.weights, self.cache, keys, self.max_model_len)

    def _make_compressed_cache(
        self, config: CacheConfig, utilization: float | None, max_num_seqs: int
    ) -> None:
        """Tables, cache and model of layers that keep entries of many tokens."""
        formats = resolve_compressed_formats(config, self.weights.dtype)
        device = get_device(platform.device_name(self.device))
        kept = [format_spec(name) for name in formats]
        self.block_size = resolve_block_size(config, device, kept)
        self.tables, self.cache, self.model = make_compressed_cache(
            self.weights,
            formats,
            self.block_size,
            self.max_model_len,
            max_num_seqs,
            lambda longest: self._memory_bytes(config, utilization, longest),
        )
        self.conditioning = UNCONDITIONED

    def _make_untrained_cache(
        self, config: CacheConfig, utilization: float | None, scheduler: SchedulerConfig
    ) -> None:
        """Tables, cache and model of dense layers that compress."""
        assert config.compression is not None
        self.formats = resolve_formats(self.geometry, config, self.weights.dtype)
        check_quantization_is_used(config, self.formats)
        spec = resolve_untrained_format(self.formats)
        device = get_device(platform.device_name(self.device))
        self.block_size = resolve_block_size(config, device, [spec])
        self.tables, self.cache, self.model = make_untrained_cache(
            self.weights,
            config.compression,
            spec,
            self.block_size,
            self.max_model_len,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            lambda longest: self._memory_bytes(config, utilization, longest),
        )
        self.conditioning = UNCONDITIONED

    def _memory_bytes(self, config: CacheConfig, utilization: float | None, longest: int) -> int:
        """What the user gives the cache, or a share of what is free, for ``longest`` at least."""
        given = config.kv_cache_memory_bytes
        if given is None:
            return self._share_of_memory(utilization, longest)
        _check_is_free(given, platform.free_memory_bytes(self.device))
        return given

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None
    ) -> None:
        """Queue a request.

        Args:
            request_id: any text that no unfinished request has.
            prompt: text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.
            params: how to choose tokens; None: ``SamplingParams()``.

        Raises:
            UsageError: a prompt that cannot be served; nothing has changed then.
        """
        params = SamplingParams() if params is None else params
        self._queue(request_id, tokenize(self.tokenizer, prompt), params)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request; returns what it has so far, None for an unknown or finished id."""
        return self.engine.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return self.engine.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run one batch; returns every request that got a token, finished ones among them.

        Raises:
            Exception: what the model raised; that batch's requests are given up, no others.
        """
        return self.engine.step()

    def _queue(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        """``add_request`` for a prompt that is tokenized already; raises the same."""
        if prompt.refusal is not None:
            raise prompt.refusal
        self.engine.add_request(request_id, prompt.token_ids, params, prompt.text)

    def _share_of_memory(self, utilization: float | None, longest: int) -> int:
        free = platform.free_memory_bytes(self.device)
        if self.device == "npu":
            total = platform.total_memory_bytes(self.device)
            share = int((utilization or _NPU_MEMORY_UTILIZATION) * total) - (total - free)
        elif utilization is not None:
            share = int(utilization * free)
        else:
            share = max(_DEFAULT_KV_BYTES, longest)
            _check_is_free(share, free)
        if share <= 0:
            raise UsageError(
                "gpu_memory_utilization",
                utilization or _NPU_MEMORY_UTILIZATION,
                f"a larger share: weights and others take {format_bytes(total - free)} of "
                f"{format_bytes(total)} and leave nothing for the cache",
            )
        logger.info(
            "KV cache: %s of the %s available after the weights",
            format_bytes(share),
            format_bytes(free),
        )
        return share

    def warn_of_clipping(self) -> None:
        """Say once in the log that static scales clip more than they should."""
        shares = self.cache.clipped_shares()
        if self._warned_of_clipping or not shares:
            return
        worst = max(shares, key=lambda layer: max(shares[layer]))
        if max(shares[worst]) > _CLIPPING_TO_WARN_OF:
            self._warned_of_clipping = True
            logger.warning(
                "static scales clip %.1f %% of the keys' and %.1f %% of the values' numbers in "
                "layer %d, the most of all layers: they were made from other text, or another "
                "model (cache.clipped_shares() has every layer)",
                *(100 * share for share in shares[worst]),
                worst,
            )


def _check_is_free(memory_bytes: int, free: int) -> None:
    if memory_bytes > free:  # a system that lends more than it has would kill us later
        legal = f"at most {free} ({format_bytes(free)}), which are free"
        raise UsageError("kv_cache_memory_bytes", memory_bytes, legal)


def _check_utilization(given: object) -> None:
    fits = isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= 1
    if given is not None and not fits:
        raise UsageError("gpu_memory_utilization", given, "above 0 and up to 1")


def _least_model_len(given: int | None) -> int:
    """The longest sequence, or the least that it can be, before the model is known."""
    if given is None:
        return 2
    if not isinstance(given, int) or isinstance(given, bool) or given < 2:
        raise UsageError("max_model_len", given, "2 or more, at most the model's positions")
    return given


def _max_model_len(given: int | None, longest: int) -> int:
    if given is None:
        return longest
    if not isinstance(given, int) or isinstance(given, bool) or not 2 <= given <= longest:
        raise UsageError("max_model_len", given, f"2 to {longest} (the model's positions)")
    return given
