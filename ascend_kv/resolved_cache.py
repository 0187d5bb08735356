"""What a cache's configuration comes to with one model on one device.

``resolve_formats`` gives every layer its format, ``resolve_block_size`` asks the device, and
``plan_blocks`` divides memory into blocks; what does not fit is refused with the legal values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ascend_kv.cache_formats import LEAST_BLOCK_SIZE
from ascend_kv.compressed_layers import CompressedFormats
from ascend_kv.config import CacheConfig, KVCacheDtype
from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry, format_spec
from ascend_kv.user_values import format_bytes

_LAYERS = re.compile(r"(-?\d+)(?:\.\.(-?\d+))?")


def resolve_formats(
    geometry: ModelGeometry, cache: CacheConfig, model_dtype: str
) -> tuple[LayerFormat, ...]:
    """The format of every layer.

    Args:
        geometry: of the model.
        cache: the user's choice.
        model_dtype: the type the model runs in, which "auto" and the skipped layers take.

    Raises:
        UsageError: a layer that the model has not got or that is named twice, a format that does
            not fit its heads, or an unknown ``model_dtype``.
    """
    plain = format_spec(model_dtype)

    def resolve(given: KVCacheDtype) -> LayerFormat:
        chosen = plain if given == "auto" else cache.spec(given)
        chosen.check_head_dim(geometry.head_dim)
        return chosen

    layers = geometry.num_layers
    formats = [resolve(cache.kv_cache_dtype)] * layers
    named: set[int] = set()
    for words, given in (cache.kv_cache_dtype_layers or {}).items():
        for layer in _layers_named(words, layers):
            if layer in named:
                raise UsageError("kv_cache_dtype_layers", words, f"layer {layer} named once only")
            named.add(layer)
            formats[layer] = resolve(given)
    skip_layers = cache.kv_cache_dtype_skip_layers
    for skipped in layer_numbers("kv_cache_dtype_skip_layers", skip_layers, layers):
        if skipped in named:
            hint = "It has a format in kv_cache_dtype_layers."
            raise UsageError("kv_cache_dtype_skip_layers", skipped, "another layer", hint)
        formats[skipped] = plain
    if not isinstance(cache.key_offset_layers, str):  # used later, when the weights are there
        layer_numbers("key_offset_layers", cache.key_offset_layers, layers)
    return tuple(formats)


def layer_numbers(field: str, given: Sequence[int], layers: int) -> tuple[int, ...]:
    """Numbers of layers, those below 0 counted from the end.

    Raises:
        UsageError: the model has no such layer.
    """
    for layer in given:
        if not -layers <= layer < layers:
            raise UsageError(field, layer, f"{-layers} to {layers - 1} in this model")
    return tuple(sorted({layer % layers for layer in given}))


def _layers_named(words: object, layers: int) -> range:
    """The layers of "3", "-1" or "0..3"."""
    match = _LAYERS.fullmatch(str(words))
    ends = [int(end) for end in match.groups() if end is not None] if match else []
    if not ends or not all(-layers <= end < layers for end in ends):
        legal = f"a layer from {-layers} to {layers - 1}, or two such as 0..3"
        raise UsageError("kv_cache_dtype_layers", words, legal)
    first, last = ends[0] % layers, ends[-1] % layers
    if last < first:
        raise UsageError("kv_cache_dtype_layers", words, "the first layer before the last")
    return range(first, last + 1)


_OF_EVERY_TOKEN = (
    *("granularity", "symmetric", "scale_type", "group_size", "kv_cache_scales"),
    *("kv_cache_dtype_skip_layers", "kv_cache_dtype_layers", "kv_allocator", "pair_scaling"),
    *("key_offset_layers", "key_calibration", "compression"),
)
"""What says something of caches that keep every token only"""


def resolve_compressed_formats(cache: CacheConfig, model_dtype: str) -> CompressedFormats:
    """The types of a cache of compressed entries (DeepSeek-V4).

    Raises:
        UsageError: a type that entries or indexer keys are not kept in, or a setting that has no
            meaning there and is not at its default.
    """
    for name in _OF_EVERY_TOKEN:
        default = CacheConfig.__dataclass_fields__[name].default
        if getattr(cache, name) != default:
            hint = "Each INT8 entry has a scale of its own; layers come in kinds with blocks each."
            legal = f"{default} for a model with compressed layers"
            raise UsageError(name, getattr(cache, name), legal, hint)

    def resolve(given: KVCacheDtype) -> str:
        if not isinstance(given, str):
            raise UsageError("kv_cache_dtype", given, (model_dtype, "int8"), "A key is the value.")
        if given == "auto":
            return model_dtype
        spec = format_spec(given)
        if spec != format_spec(spec.name):
            hint = "Each INT8 entry has one symmetric scale of its own."
            raise UsageError("kv_cache_dtype", given, (model_dtype, "int8"), hint)
        return spec.name

    entries, keys = resolve(cache.kv_cache_dtype), resolve(cache.indexer_cache_dtype)
    return CompressedFormats(format_spec(model_dtype).name, entries, keys).check()


def resolve_untrained_format(formats: Sequence[LayerFormat]) -> FormatSpec:
    """The one format of a cache that compresses a dense model.

    Raises:
        UsageError: layers are quantized, or differ.
    """
    first = formats[0].key
    for layer in formats:
        if layer.quantized or layer.key != first:
            hint = (
                "Entries are pooled from stored keys, turned back and forth: with quantized ones "
                "every entry would be rounded from rounded numbers, which nobody has measured."
            )
            legal = "one unquantized type for all layers with compression"
            raise UsageError("kv_cache_dtype", str(layer), legal, hint)
    return first


def check_quantization_is_used(cache: CacheConfig, formats: Sequence[LayerFormat]) -> None:
    """Refuse settings of a quantization that does not take place.

    Raises:
        UsageError: no format is quantized, and a setting of scales is not at its default; or
            there is one of an indexer, which such models have not.
    """
    if cache.indexer_cache_dtype != "auto":
        legal = "auto: only DeepSeek-V4's layers have an indexer"
        raise UsageError("indexer_cache_dtype", cache.indexer_cache_dtype, legal)
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


def resolve_block_size(cache: CacheConfig, device: Device, formats: Sequence[LayerFormat]) -> int:
    """Tokens in a block: the user's number, or else the device's default, or what a format needs.

    Raises:
        UsageError: the device does not read blocks of that size, or one of the formats.
    """
    block_size = cache.block_size
    if block_size is None:
        by_block = any(spec.key.scales_by_block for spec in formats)
        block_size = max(device.default_block_size, LEAST_BLOCK_SIZE * by_block)
    check_block_size(device, block_size, formats)
    return block_size


def check_block_size(device: Device, block_size: int, formats: Sequence[LayerFormat]) -> None:
    """Refuse blocks of that many tokens, or a format, that the device does not read.

    Raises:
        UsageError: as ``Device.check_block_size``.
    """
    for name in dict.fromkeys(side.name for spec in formats for side in (spec.key, spec.value)):
        device.check_block_size(block_size, name)
    for spec in formats:
        if spec.key.scales_by_block and block_size < LEAST_BLOCK_SIZE:
            bits = spec.key.scale_bits if spec.key.symmetric else 2 * spec.key.scale_bits
            raise UsageError(
                "block_size",
                block_size,
                f"{LEAST_BLOCK_SIZE} or more with {spec}",
                f"Its keys keep {bits} bits beside every channel of a block: {bits} / {block_size} "
                f"= {bits / block_size:.3g} bits a number here, {bits / LEAST_BLOCK_SIZE:.3g} at "
                f"{LEAST_BLOCK_SIZE}.",
            )


def plan_blocks(
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    block_size: int,
    memory_bytes: int,
    max_model_len: int,
    max_num_seqs: int = 0,
) -> int:
    """How many blocks of ``block_size`` tokens ``memory_bytes`` hold beside what is there once.

    That is static scales, and ``max_num_seqs`` partly filled blocks where a format keeps them.

    Raises:
        UsageError: they do not hold one sequence of ``max_model_len`` tokens.
    """
    block_bytes = geometry.block_bytes(formats, block_size)
    once = geometry.cache_bytes(formats, 0, block_size, max_model_len, max_num_seqs)
    static_bytes = geometry.static_bytes(formats, max_model_len)
    residual = once - static_bytes
    least_blocks = -(-max_model_len // block_size)
    least = once + least_blocks * block_bytes
    if memory_bytes < least:
        raise UsageError(
            "kv_cache_memory_bytes",
            memory_bytes,
            f"{least} ({format_bytes(least)}) or more",
            f"One sequence of max_model_len = {max_model_len} tokens takes {least_blocks} blocks "
            f"of {block_bytes} bytes{f', static scales {static_bytes} bytes' * bool(static_bytes)}"
            f"{f', open blocks of {max_num_seqs} sequences {residual} bytes' * bool(residual)}"
            f": give more memory, or lower max_model_len{' or max_num_seqs' * bool(residual)}.",
        )
    return (memory_bytes - once) // block_bytes
