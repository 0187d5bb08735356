"""Static scales: given beforehand, for a layer, its heads, their channels, or by position.

They come from a safetensors file of float32 tensors, for layer i = 0, 1, ...::

    layers.{i}.key_scale          layers.{i}.value_scale
    layers.{i}.key_zero_point     layers.{i}.value_zero_point     asymmetric only

in the shapes of ``KVCacheQuantize``, with 1 for what shares a scale::

    layer [1, 1, 1, 1]     head [1, N, 1, 1]          channel [1, N, 1, D]
    token [1, 1, P, 1]     token_head [1, N, P, 1]    for positions 0 to P - 1

P is ``max_model_len`` or more; what is beyond is not kept. Layers that are not quantized need no
entries and may have some. Zero points are in units of the values (``formats.int8``).

Keys are what the cache stores: after RoPE, and conditioned (pair scaling, key offset). So the
file's metadata may say ``key_conditioning``, the identity of the conditioning that its scales
were made with, which must be the model's; absent or empty it stands for keys as the model makes
them. Instead of a file a mapping with the same entries may be given, its metadata, if any, under
``__metadata__``; or the directory of a checkpoint (``checkpoint_scales``). To write a file::

    save_file(scales, path, metadata={"key_conditioning": llm.conditioning.identity})

with ``safetensors.torch.save_file`` and the ``LLM`` that the keys came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ascend_kv.cache.checkpoint_scales import read_checkpoint_scales
from ascend_kv.errors import UsageError
from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry

Tensor = torch.Tensor

FIELD = "kv_cache_scales"
METADATA = "__metadata__"
_ENTRY = re.compile(r"layers\.(\d+)\.((?:key|value)_(?:scale|zero_point))")


def load_static_scales(
    source: str | Path | Mapping[str, Any] | None,
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    max_model_len: int,
    key_conditioning: str,
) -> list[dict[str, Tensor]]:
    """What every layer's format needs of a file, a checkpoint or a mapping.

    Args:
        source: see the module; not looked at where no layer has static scales.
        geometry: of the model.
        formats: one for each layer.
        max_model_len: positions that need a scale.
        key_conditioning: identity of what is done to this model's keys, "" for nothing.

    Returns:
        For each layer its tensors by name ("key_scale", ...), in the shape of
        ``FormatSpec.scale_shape``; an empty mapping where the format has no static scales.

    Raises:
        UsageError: no such file, an entry that is missing, unknown, of another shape or type, not
            finite or not positive, or keys that are conditioned otherwise.
    """
    if not any(spec.static for spec in formats):
        return [{} for _ in formats]
    if source is None:
        legal = "a file, a checkpoint or a mapping, with scale_type static"
        raise UsageError(FIELD, None, legal)
    entries, metadata = _read(source, formats)
    _check_names(entries, geometry.num_layers)
    _check_conditioning(metadata.get("key_conditioning", ""), key_conditioning)
    return [
        _read_layer(entries, layer, spec, geometry, max_model_len) if spec.static else {}
        for layer, spec in enumerate(formats)
    ]


def _read(
    source: str | Path | Mapping[str, Any], formats: Sequence[LayerFormat]
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Entries and metadata."""
    if isinstance(source, Mapping):
        entries = {name: value for name, value in source.items() if name != METADATA}
        metadata = source.get(METADATA, {})
        if not isinstance(metadata, Mapping):
            raise UsageError(f"{FIELD}: {METADATA}", metadata, "a mapping from names to text")
        return entries, metadata
    path = Path(source)
    if path.is_dir():
        return read_checkpoint_scales(path, formats), {}
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        legal = "a safetensors file of static scales, or the directory of a checkpoint with some"
        raise UsageError(FIELD, str(source), legal, f"{error}.") from None


def _check_names(entries: Mapping[str, Any], num_layers: int) -> None:
    for name in entries:
        match = _ENTRY.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            legal = "layers.0.key_scale, layers.0.value_scale, layers.0.key_zero_point and so on"
            raise UsageError(FIELD, name, legal)
        if int(match[1]) >= num_layers:
            raise UsageError(FIELD, name, f"layers 0 to {num_layers - 1}, as the model has them")


def _check_conditioning(given: str, wanted: str) -> None:
    if given != wanted:
        raise UsageError(
            FIELD,
            f"scales for {_describe(given)}",
            f"scales for {_describe(wanted)}",
            "Scales fit only keys that are conditioned alike: make them with the same model, "
            "pair_scaling and key_offset_layers, or, for scales of keys as the model makes them, "
            "give pair_scaling false and key_offset_layers none.",
        )


def _describe(identity: str) -> str:
    return f"key conditioning {identity}" if identity else "keys as the model makes them"


def _read_layer(
    entries: Mapping[str, Any],
    layer: int,
    formats: LayerFormat,
    geometry: ModelGeometry,
    max_model_len: int,
) -> dict[str, Tensor]:
    tensors = {}
    for side, spec in (("key", formats.key), ("value", formats.value)):
        if not spec.static:
            continue
        shape = spec.scale_shape(geometry.num_kv_heads, geometry.head_dim, max_model_len)
        names = [f"{side}_scale"]
        zero_point = f"{side}_zero_point"
        if not spec.symmetric:
            names.append(zero_point)
        elif f"layers.{layer}.{zero_point}" in entries:
            hint = "These scales were made for an asymmetric format."
            raise UsageError(
                FIELD, f"layers.{layer}.{zero_point}", "none with symmetric true", hint
            )
        for name in names:
            tensors[name] = _entry(entries, f"layers.{layer}.{name}", shape, spec)
    return tensors


def _entry(
    entries: Mapping[str, Any], name: str, shape: tuple[int, ...], spec: FormatSpec
) -> Tensor:
    """One tensor of the file, checked, and cut to ``shape``."""
    field = f"{FIELD}: {name}"
    tensor = entries.get(name)
    if tensor is None:
        raise UsageError(field, "missing", f"float32 {list(shape)} for {spec}")
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        raise UsageError(field, getattr(tensor, "dtype", type(tensor).__name__), "torch.float32")
    kept = tensor[:, :, : shape[2]] if tensor.dim() == 4 and spec.scales_by_token else tensor
    if kept.shape != shape:
        legal = f"{list(shape)} for {spec}"
        more = ", or more positions: max_model_len of them are needed" * spec.scales_by_token
        raise UsageError(field, list(tensor.shape), legal + more)
    if not torch.isfinite(kept).all():
        raise UsageError(field, "NaN or infinity", "finite numbers")
    if name.endswith("scale") and not (kept > 0).all():
        raise UsageError(field, float(kept.min()), "positive numbers")
    return kept.clone()
