"""What the user decides, as frozen dataclasses; every mistake is refused with the legal values.

``from_mapping`` turns what YAML gives into such classes (the recipes' own included),
``resolve_formats`` gives every layer its format, ``resolve_block_size`` asks the device, and
``plan_blocks`` divides memory into blocks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeVar

from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import (
    FORMAT_NAMES,
    GRANULARITIES,
    SCALE_TYPES,
    FormatSpec,
    ModelGeometry,
    format_spec,
)
from ascend_kv.registry import did_you_mean

C = TypeVar("C")

PairScaling = bool | Literal["auto"]
KeyOffsetLayers = Literal["auto", "all", "none"] | tuple[int, ...]
ALLOCATORS = ("paged", "contiguous")
KVCacheScales = str | Mapping[str, Any]
"""A file of static scales, a checkpoint that has them, or what such a file holds."""
_DYNAMIC_GRANULARITIES = ("token", "token_head", "group")


@dataclass(frozen=True)
class CacheConfig:
    """How the KV cache is kept.

    Attributes:
        kv_cache_dtype: "auto" (the model's dtype) or a name that ``format_spec`` takes.
        granularity: which numbers share a scale when quantized: "token", "token_head" or
            "group"; with static scales also "layer", "head" or "channel", but not "group".
        symmetric: without zero points when quantized.
        scale_type: "dynamic": a token's scales come from its own numbers; "static": from
            ``kv_cache_scales``, and what lies beyond them is clipped.
        group_size: channels of a head that share a scale, with granularity "group".
        kv_cache_scales: static scales: a safetensors file, the directory of a checkpoint that has
            ``k_scale`` and ``v_scale``, or a mapping of what such a file holds; see
            ``cache.static_scales``.
        kv_cache_dtype_skip_layers: layers kept in the model's dtype; negative numbers count from
            the last layer, -1.
        block_size: tokens in a block; None is the device's default.
        kv_allocator: "paged", or "contiguous", which reserves max_model_len for every sequence.
        kv_cache_memory_bytes: memory for the cache; None leaves it to the caller.
        prefill_reads: "cache": a prompt attends to what is stored, quantized, so that results do
            not depend on how it was cut into chunks.
        pair_scaling: scale the rotary pairs of key channels to like size, in the weights: "auto"
            in the layers that are quantized, true in all.
        key_offset_layers: layers whose keys are stored without the model's key bias: "auto"
            where the format and the size of the bias call for it, "all" that have one, "none",
            or a list; negative numbers count from the last layer.

    Raises:
        UsageError: names the field, what was given and what is legal.
    """

    kv_cache_dtype: str = "auto"
    granularity: str = "token_head"
    symmetric: bool = True
    scale_type: str = "dynamic"
    group_size: int | None = None
    kv_cache_scales: KVCacheScales | None = None
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    block_size: int | None = None
    kv_allocator: str = "paged"
    kv_cache_memory_bytes: int | None = None
    prefill_reads: str = "cache"
    pair_scaling: PairScaling = "auto"
    key_offset_layers: KeyOffsetLayers = "auto"

    def __post_init__(self) -> None:
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *FORMAT_NAMES))
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("symmetric", self.symmetric, (True, False))
        _one_of("scale_type", self.scale_type, SCALE_TYPES)
        _one_of("kv_allocator", self.kv_allocator, ALLOCATORS)
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
                _at_least_one(name, getattr(self, name))
        layers = self.kv_cache_dtype_skip_layers
        if not _is_layers(layers):
            raise UsageError("kv_cache_dtype_skip_layers", layers, "a list of layer numbers")
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(layers))
        self._check_scales()
        self._check_conditioning()

    def _check_scales(self) -> None:
        scales: object = self.kv_cache_scales
        if not isinstance(scales, str | Mapping | None):
            legal = "a file, the directory of a checkpoint, or a mapping"
            raise UsageError("kv_cache_scales", scales, legal)
        if self.scale_type != "static" and self.kv_cache_scales is not None:
            raise UsageError("scale_type", self.scale_type, "static with kv_cache_scales")
        if self.kv_cache_dtype == "auto":
            return
        spec = self.spec(self.kv_cache_dtype)
        if spec.quantized and not spec.static and self.granularity not in _DYNAMIC_GRANULARITIES:
            raise UsageError(
                "granularity",
                self.granularity,
                f"{', '.join(_DYNAMIC_GRANULARITIES)} with scale_type dynamic",
                "In the cache, scales of a layer, head or channel have to be known beforehand, "
                "since a later token must not clip against an earlier token's scale: give them as "
                "kv_cache_scales, with scale_type static.",
            )

    def spec(self, kv_cache_dtype: str) -> FormatSpec:
        """The format of that name with the scales that are chosen here."""
        return format_spec(
            kv_cache_dtype, self.granularity, self.symmetric, self.scale_type, self.group_size
        )

    def _check_conditioning(self) -> None:
        _one_of("pair_scaling", self.pair_scaling, ("auto", True, False))
        layers = self.key_offset_layers
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
            _at_least_one(name, getattr(self, name))
        _one_of("enable_chunked_prefill", self.enable_chunked_prefill, (True, False))
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
    if isinstance(values.get("kv_cache_scales"), os.PathLike):
        values["kv_cache_scales"] = os.fspath(values["kv_cache_scales"])
    if "enable_paged_attention" in values:
        paged = values.pop("enable_paged_attention")
        _one_of("kv_cache_config.enable_paged_attention", paged, (True, False))
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


def resolve_formats(
    geometry: ModelGeometry, cache: CacheConfig, model_dtype: str
) -> tuple[FormatSpec, ...]:
    """The format of every layer.

    Args:
        geometry: of the model.
        cache: the user's choice.
        model_dtype: the type the model runs in, which "auto" and the skipped layers take.

    Raises:
        UsageError: a skipped layer that the model has not got, a group_size that does not divide
            its heads, or an unknown ``model_dtype``.
    """
    plain = format_spec(model_dtype)
    chosen = plain
    if cache.kv_cache_dtype != "auto":
        chosen = cache.spec(cache.kv_cache_dtype)
        chosen.check_head_dim(geometry.head_dim)
    layers = geometry.num_layers
    for layer in cache.kv_cache_dtype_skip_layers:
        if not -layers <= layer < layers:
            raise UsageError(
                "kv_cache_dtype_skip_layers", layer, f"{-layers} to {layers - 1} in this model"
            )
    skipped = {layer % layers for layer in cache.kv_cache_dtype_skip_layers}
    return tuple(plain if layer in skipped else chosen for layer in range(layers))


def check_quantization_is_used(cache: CacheConfig, formats: Sequence[FormatSpec]) -> None:
    """Refuse settings of a quantization that does not take place.

    Raises:
        UsageError: no format is quantized, and a setting of scales is not at its default.
    """
    if any(spec.quantized for spec in formats):
        return
    for name in ("scale_type", "kv_cache_scales", "group_size", "granularity", "symmetric"):
        default = CacheConfig.__dataclass_fields__[name].default
        if getattr(cache, name) != default:
            raise UsageError(
                name,
                getattr(cache, name),
                f"{default} where no layer is quantized",
                "It would change nothing: give kv_cache_dtype int8, or leave it out.",
            )


def resolve_block_size(cache: CacheConfig, device: Device, formats: Sequence[FormatSpec]) -> int:
    """Tokens in a block: the user's number, or else the device's default.

    Raises:
        UsageError: the device does not read blocks of that size, or one of the formats.
    """
    block_size = device.default_block_size if cache.block_size is None else cache.block_size
    for name in dict.fromkeys(spec.name for spec in formats):
        device.check_block_size(block_size, name)
    return block_size


def plan_blocks(
    geometry: ModelGeometry,
    formats: Sequence[FormatSpec],
    block_size: int,
    memory_bytes: int,
    max_model_len: int,
) -> int:
    """How many blocks of ``block_size`` tokens ``memory_bytes`` hold beside static scales.

    Raises:
        UsageError: they do not hold one sequence of ``max_model_len`` tokens.
    """
    block_bytes = geometry.block_bytes(formats, block_size)
    static_bytes = geometry.static_bytes(formats, max_model_len)
    least_blocks = -(-max_model_len // block_size)
    least = geometry.cache_bytes(formats, least_blocks, block_size, max_model_len)
    if memory_bytes < least:
        raise UsageError(
            "kv_cache_memory_bytes",
            memory_bytes,
            f"{least} ({format_bytes(least)}) or more",
            f"One sequence of max_model_len = {max_model_len} tokens takes {least_blocks} blocks "
            f"of {block_bytes} bytes{f', static scales {static_bytes} bytes' * bool(static_bytes)}"
            ": give more memory, or lower max_model_len.",
        )
    return (memory_bytes - static_bytes) // block_bytes


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(value: str | int, field: str = "kv_cache_memory_bytes") -> int:
    """A number of bytes from "1.5GiB" (1024**3), "90MB" (1000**2), "4096" or a whole number.

    Raises:
        UsageError: under the name ``field``; also for anything below one byte.
    """
    legal = "a whole number of bytes, or text such as 90MB or 1.5GiB, of at least 1 byte"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, (bool, float)) or not match or match[2] not in _UNITS:
        raise UsageError(field, value, legal)
    number = int(Decimal(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise UsageError(field, value, legal)
    return number


def format_bytes(number: int) -> str:
    """Bytes for people, in the largest binary unit that gives at least 1: "90.00 MiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"


def from_mapping(cls: type[C], mapping: Mapping[str, Any], where: str) -> C:
    """A dataclass from what YAML gave: every key must be a field, every value of its type.

    Lists become tuples, nested mappings nested dataclasses, whole numbers floats where a float is
    wanted; fields whose names end in ``_bytes`` take ``parse_bytes``' text.

    Args:
        cls: a dataclass whose fields are int, float, str, bool, ``Literal``, ``tuple[X, ...]``,
            ``Mapping[str, Any]`` (taken as it is), dataclasses, or any of these ``| None``.
        mapping: the values by name.
        where: what the error messages put before the field, such as the file's name.

    Raises:
        UsageError: an unknown key (with those nearest to it), a missing one, or a wrong type.
    """
    return _build(cls, mapping, f"{where}: ")


def _build(cls: type[C], mapping: Any, prefix: str) -> C:
    assert dataclasses.is_dataclass(cls)
    if not isinstance(mapping, Mapping):
        raise UsageError(prefix.rstrip(": ."), mapping, "a mapping from names to values")
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in mapping:
        if key not in fields:
            raise UsageError(
                f"{prefix}{key}", mapping[key], fields, did_you_mean(key, tuple(fields))
            )
    for name, field in fields.items():
        defaults = (field.default, field.default_factory)
        if name not in mapping and all(value is dataclasses.MISSING for value in defaults):
            raise UsageError(f"{prefix}{name}", None, _describe(kinds[name]), "It is required.")
    values = {key: _convert(value, kinds[key], f"{prefix}{key}") for key, value in mapping.items()}
    return typing.cast(C, cls(**values))


def _convert(value: Any, kind: Any, field: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, kind, field)
    if origin is typing.Literal:
        return _one_of(field, value, args)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(item, args[0], f"{field}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, f"{field}.")
    if origin is Mapping and isinstance(value, Mapping):
        return value
    if kind is int and field.endswith("_bytes"):
        return parse_bytes(value, field)
    if kind is float and _is_int(value):
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise UsageError(field, value, _describe(kind))


def _convert_union(value: Any, kind: Any, field: str) -> Any:
    alternatives = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    if value is None and len(alternatives) < len(typing.get_args(kind)):
        return None
    if len(alternatives) == 1:  # so that a wrong value inside it is named
        return _convert(value, alternatives[0], field)
    for alternative in alternatives:
        try:
            return _convert(value, alternative, field)
        except UsageError:
            continue
    raise UsageError(field, value, _describe(kind))


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return ", or ".join("null" if arg is type(None) else _describe(arg) for arg in args)
    if origin is tuple:
        return f"a list, each of it {_describe(args[0])}"
    if origin is typing.Literal:
        return ", ".join(map(str, args))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "a mapping from names to values")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_layers(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(_is_int(layer) for layer in value)
    )


def _at_least_one(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(field, value, "a whole number of at least 1")


def _one_of(field: str, value: Any, legal: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(item) and value == item for item in legal):
        raise UsageError(field, value, legal, did_you_mean(value, tuple(map(str, legal))))
    return value
