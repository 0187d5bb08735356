"""What the user decides, as frozen dataclasses; every mistake is refused with the legal values.

``from_mapping`` (``user_values``) makes such classes of what YAML gave; what they come to with a
model on a device is in ``resolved_cache``.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ascend_kv.cache_formats import BY_TOKEN
from ascend_kv.errors import UsageError
from ascend_kv.geometry import (
    FORMAT_NAMES,
    GRANULARITIES,
    SCALE_TYPES,
    LayerFormat,
    layer_format,
)
from ascend_kv.untrained_compression import MEASURED_LOSS, Compression
from ascend_kv.user_values import at_least_one, from_mapping, is_int, one_of

PairScaling = bool | Literal["auto"]
KeyOffsetLayers = Literal["auto", "all", "none"] | tuple[int, ...]
Allocator = Literal["paged", "contiguous"]
ALLOCATORS: tuple[str, ...] = typing.get_args(Allocator)
KVCacheDtype = str | Mapping[str, Any]
"""A name that ``format_spec`` takes, or names for "k" and "v"."""
KVCacheScales = str | Mapping[str, Any]
"""A file of static scales, a checkpoint that has them, or what such a file holds."""
KeyCalibration = str | Mapping[str, Any]
"""A file of key statistics, or what such a file holds."""


@dataclass(frozen=True)
class CacheConfig:
    """How the KV cache is kept.

    Attributes:
        kv_cache_dtype: "auto" (the model's dtype), a name that ``format_spec`` takes, or two for
            keys and values: ``{"k": "int8", "v": "int4"}``, or "k:int8+v:int4".
        granularity: which numbers share a scale when quantized: "token", "token_head" or
            "group"; with static scales also "layer", "head" or "channel", but not "group".
        symmetric: without zero points when quantized.
        scale_type: "dynamic": a token's scales come from its own numbers; "static": from
            ``kv_cache_scales``, and what lies beyond them is clipped.
        group_size: channels of a head that share a scale, with granularity "group".
        kv_cache_scales: static scales: a safetensors file, the directory of a checkpoint that has
            ``k_scale`` and ``v_scale``, or a mapping of what such a file holds; see
            ``cache.static_scales``.
        indexer_cache_dtype: of the keys of DeepSeek-V4's indexer: "auto" (the model's dtype), that
            dtype by name, or "int8". Other models have none.
        kv_cache_dtype_skip_layers: layers kept in the model's dtype; negative numbers count from
            the last layer, -1.
        kv_cache_dtype_layers: other formats for some layers: ``{"0..3": "int8", "-1": "auto"}``,
            ranges with both ends, negative numbers from the last layer.
        block_size: tokens in a block; None is the device's default.
        kv_allocator: "paged", or "contiguous", which reserves max_model_len for every sequence.
        kv_cache_memory_bytes: memory for the cache; None leaves it to the caller.
        prefill_reads: "cache": a prompt attends to what is stored, quantized, so that results do
            not depend on how it was cut into chunks.
        pair_scaling: scale the rotary pairs of key channels to like size, in the weights: "auto"
            in the layers that are quantized, where keys are rotated only if a large bias stays in
            them; true in all.
        key_offset_layers: layers whose keys are stored without the model's key bias: "auto"
            where the format and the size of the bias call for it, "all" that have one, "none",
            or a list; negative numbers count from the last layer.
        key_calibration: what a text has shown of the model's keys: a safetensors file, or a mapping
            of what such a file holds; see ``integrations.key_statistics``. The mean key is the
            key offset then, in place of the key bias.
        compression: old tokens of a dense model become means of 4 and of 128
            (``untrained_compression``); None: every token is kept.
        untrained_compression: that the user wants this in a model that never learned it, which
            costs quality.

    Raises:
        UsageError: names the field, what was given and what is legal.
    """

    kv_cache_dtype: KVCacheDtype = "auto"
    granularity: str = "token_head"
    symmetric: bool = True
    scale_type: str = "dynamic"
    group_size: int | None = None
    kv_cache_scales: KVCacheScales | None = None
    indexer_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    kv_cache_dtype_layers: Mapping[str, Any] | None = None
    block_size: int | None = None
    kv_allocator: str = "paged"
    kv_cache_memory_bytes: int | None = None
    prefill_reads: str = "cache"
    pair_scaling: PairScaling = "auto"
    key_offset_layers: KeyOffsetLayers = "auto"
    key_calibration: KeyCalibration | None = None
    compression: Compression | None = None
    untrained_compression: bool = False

    def __post_init__(self) -> None:
        one_of("indexer_cache_dtype", self.indexer_cache_dtype, ("auto", *FORMAT_NAMES))
        one_of("granularity", self.granularity, GRANULARITIES)
        one_of("symmetric", self.symmetric, (True, False))
        one_of("scale_type", self.scale_type, SCALE_TYPES)
        one_of("kv_allocator", self.kv_allocator, ALLOCATORS)
        if self.prefill_reads != "cache":
            raise UsageError(
                "prefill_reads",
                self.prefill_reads,
                ("cache",),
                "Attention over keys that are not quantized yet is not available: results would "
                "depend on how a prompt is cut into chunks."
                if self.prefill_reads == "fresh"
                else "",
            )
        for name in ("block_size", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))
        layers = self.kv_cache_dtype_skip_layers
        if not _is_layers(layers):
            raise UsageError("kv_cache_dtype_skip_layers", layers, "a list of layer numbers")
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(layers))
        self._check_scales()
        self._check_conditioning()
        self._check_compression()

    def _check_compression(self) -> None:
        one_of("untrained_compression", self.untrained_compression, (True, False))
        if self.compression is None:
            if self.untrained_compression:
                legal = "a mapping, {} for the defaults, beside untrained_compression"
                raise UsageError("compression", None, legal)
            return
        if not isinstance(self.compression, Compression):
            raise UsageError("compression", self.compression, "a mapping with its settings")
        if not self.untrained_compression:
            hint = (
                "The model never learned to read entries of many tokens, and loses quality: "
                f"{MEASURED_LOSS}."
            )
            raise UsageError("untrained_compression", False, "true beside compression", hint)
        for name in ("kv_allocator", "pair_scaling", "key_offset_layers"):
            given, default = getattr(self, name), CacheConfig.__dataclass_fields__[name].default
            if given not in (default, False, "none"):
                hint = (
                    "Blocks come back as tokens are pooled, and keys stay as the model makes them."
                )
                raise UsageError(name, given, f"{default} with compression", hint)

    def _check_scales(self) -> None:
        scales: object = self.kv_cache_scales
        if not isinstance(scales, str | Mapping | None):
            legal = "a file, the directory of a checkpoint, or a mapping"
            raise UsageError("kv_cache_scales", scales, legal)
        layers: object = self.kv_cache_dtype_layers
        if not isinstance(layers, Mapping | None):
            legal = 'a mapping such as {"0..3": "int8"}'
            raise UsageError("kv_cache_dtype_layers", layers, legal)
        given = (self.kv_cache_dtype, *(self.kv_cache_dtype_layers or {}).values())
        for each in given:
            self._check_format(each)
        static = any(each != "auto" and self.spec(each).static for each in given)
        if self.kv_cache_scales is not None and self.scale_type != "static" and not static:
            raise UsageError("scale_type", self.scale_type, "static with kv_cache_scales")

    def _check_format(self, given: KVCacheDtype) -> None:
        if isinstance(given, str) and not set(given) & set("/:"):
            one_of("kv_cache_dtype", given, ("auto", *FORMAT_NAMES))
        elif not isinstance(given, str | Mapping):
            raise UsageError("kv_cache_dtype", given, ("auto", *FORMAT_NAMES))
        if given == "auto":
            return
        layer = self.spec(given)
        for spec in (layer.key, layer.value):
            if not spec.quantized or spec.static or spec.scales_by_token or spec.scales_by_block:
                continue
            raise UsageError(
                "granularity",
                spec.granularity,
                f"{', '.join(BY_TOKEN)} with scale_type dynamic",
                "In the cache, scales of a layer, head or channel have to be known beforehand, "
                "since a later token must not clip against an earlier token's scale: give them as "
                "kv_cache_scales, with scale_type static.",
            )

    def spec(self, kv_cache_dtype: KVCacheDtype) -> LayerFormat:
        """The format of that name with the scales that are chosen here."""
        return layer_format(
            kv_cache_dtype,
            granularity=self.granularity,
            symmetric=self.symmetric,
            scale_type=self.scale_type,
            group_size=self.group_size,
        )

    def _check_conditioning(self) -> None:
        one_of("pair_scaling", self.pair_scaling, ("auto", True, False))
        calibration: object = self.key_calibration
        if not isinstance(calibration, str | Mapping | None):
            raise UsageError("key_calibration", calibration, "a file, or a mapping")
        layers = self.key_offset_layers
        if calibration is not None and layers == "none":
            hint = "It says what the key offset is, and there is none."
            raise UsageError("key_offset_layers", layers, "auto, all, or layers", hint)
        if layers in ("auto", "all", "none"):
            return
        if not _is_layers(layers):
            raise UsageError("key_offset_layers", layers, "auto, all, none, or a list of layers")
        object.__setattr__(self, "key_offset_layers", tuple(layers))


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_model_len: the most tokens of one sequence, prompt and output together.
        max_num_seqs: the most sequences in one step.
        max_num_batched_tokens: the token budget of one step.
        enable_chunked_prefill: whether a prompt may be cut to fit the budget.

    Raises:
        UsageError: names the field that is not a whole number of at least 1, or a
            max_num_batched_tokens that some sequence could starve under.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            at_least_one(name, getattr(self, name))
        one_of("enable_chunked_prefill", self.enable_chunked_prefill, (True, False))
        least, reason = self.max_num_seqs, "max_num_seqs: a step decodes all running sequences"
        if not self.enable_chunked_prefill and self.max_model_len > least:
            least, reason = self.max_model_len, "max_model_len: no prompt may be cut"
        if self.max_num_batched_tokens < least:
            raise UsageError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"{least} or more ({reason})",
            )


def merge_kv_cache_config(config: CacheConfig, mapping: Mapping[str, Any]) -> CacheConfig:
    """``config`` with what the mapping ``kv_cache_config`` of ``LLMEngine`` says.

    Args:
        config: from the separate arguments.
        mapping: fields of ``CacheConfig``, and ``enable_paged_attention``: true for
            ``kv_allocator`` paged, false for contiguous.

    Raises:
        UsageError: an unknown key, a wrong type, or a field that says otherwise than ``config``
            where that is not at its default, or than ``enable_paged_attention``.
    """
    if not isinstance(mapping, Mapping):
        raise UsageError("kv_cache_config", mapping, "a mapping from names to values")
    values = dict(mapping)
    for name in ("kv_cache_scales", "key_calibration"):
        if isinstance(values.get(name), os.PathLike):
            values[name] = os.fspath(values[name])
    if "enable_paged_attention" in values:
        paged = values.pop("enable_paged_attention")
        one_of("kv_cache_config.enable_paged_attention", paged, (True, False))
        allocator = "paged" if paged else "contiguous"
        if values.setdefault("kv_allocator", allocator) != allocator:
            raise UsageError(
                "kv_cache_config.kv_allocator",
                values["kv_allocator"],
                f"{allocator}, as enable_paged_attention says; give one of them",
            )
    given = from_mapping(CacheConfig, values, "kv_cache_config")
    for name in values:
        own, theirs = getattr(config, name), getattr(given, name)
        same = own is theirs or (not isinstance(own, Mapping) and own == theirs)
        if not same and own != CacheConfig.__dataclass_fields__[name].default:
            raise UsageError(
                f"kv_cache_config.{name}",
                values[name],
                f"{own!r}, as the argument of its own says; give one of them",
            )
    return dataclasses.replace(config, **{name: getattr(given, name) for name in values})


def _is_layers(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(is_int(layer) for layer in value)
    )
