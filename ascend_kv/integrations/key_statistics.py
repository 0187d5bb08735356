"""What a text shows of a model's keys: their mean and spread before the rotary embedding.

Kept in a safetensors file of float32 tensors, for layer i = 0, 1, ...::

    layers.{i}.key_mean         [N, D]    mean of R(n)^-1 k over the tokens of the text
    layers.{i}.key_deviation    [N, D]    standard deviation of the same

with the metadata ``model``, the fingerprint of the weights that made these keys, and ``tokens``,
how many were seen. Letters: geometry.py.

The mean stands in for the key bias as key offset (``key_planning``): it is in every key, and what
every key has costs nothing to know and levels to store. Taking it out is exact whatever it is, so
a text that fits badly costs quality and never correctness. ``key_calibration`` makes these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.key_weights import find_attention
from ascend_kv.whole_files import written_whole

Tensor = torch.Tensor

FIELD = "key_calibration"
METADATA = "__metadata__"
_NAMES = ("key_mean", "key_deviation")


class LayerStatistics(NamedTuple):
    """Of one layer, ``[N, D]`` float32 on the CPU each."""

    mean: Tensor
    deviation: Tensor


class KeyStatistics(NamedTuple):
    """Of all layers that were seen."""

    layers: Mapping[int, LayerStatistics]
    identity: str
    """tells these figures from others"""


def statistics_entries(
    layers: Mapping[int, LayerStatistics], fingerprint: str, tokens: int
) -> dict[str, Any]:
    """What the file holds, as a mapping that may be given in its place."""
    entries: dict[str, Any] = {METADATA: {"model": fingerprint, "tokens": str(tokens)}}
    for layer, seen in layers.items():
        for name, tensor in zip(_NAMES, seen, strict=True):
            entries[f"layers.{layer}.{name}"] = tensor.contiguous()
    return entries


def save_statistics(entries: Mapping[str, Any], path: str | Path) -> None:
    """Write such a mapping as a safetensors file, whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    tensors = {name: value for name, value in entries.items() if name != METADATA}
    with written_whole(Path(path)) as unfinished:
        save_file(tensors, unfinished, metadata=dict(entries[METADATA]))


def load_statistics(
    source: str | Path | Mapping[str, Any], geometry: ModelGeometry, fingerprint: str
) -> KeyStatistics:
    """Read and check them.

    Args:
        source: the file, or a mapping of what it holds, its metadata under ``__metadata__``.
        geometry: of the model.
        fingerprint: of its weights, as ``fingerprint`` gives it.

    Raises:
        UsageError: no such file; an entry that is missing, unknown, of another shape or type, not
            finite or negative; or keys of another model.
    """
    entries, metadata = _read(source)
    made_from = metadata.get("model", "")
    if made_from != fingerprint:
        hint = "The mean of other keys is no use here: calibrate with this model."
        given = f"keys of the model {made_from or '(not said)'}"
        raise UsageError(FIELD, given, f"keys of the model {fingerprint}", hint)
    layers = {}
    known = {f"layers.{i}.{name}" for i in range(geometry.num_layers) for name in _NAMES}
    for name in entries:
        if name not in known:
            legal = f"layers.0.key_mean to layers.{geometry.num_layers - 1}.key_deviation"
            raise UsageError(FIELD, name, legal)
    shape = (geometry.num_kv_heads, geometry.head_dim)
    digest = hashlib.sha256()
    for layer in range(geometry.num_layers):
        tensors = [_entry(entries, f"layers.{layer}.{name}", shape) for name in _NAMES]
        layers[layer] = LayerStatistics(*tensors)
        for tensor in tensors:
            digest.update(tensor.numpy().tobytes())
    return KeyStatistics(layers, digest.hexdigest()[:16])


@torch.no_grad()
def fingerprint(hf_model: nn.Module) -> str:
    """Tells the weights that make keys from others; they must be as they were loaded.

    Of their values as bfloat16, so that a checkpoint has one however it was loaded.
    """
    digest = hashlib.sha256()
    for layer, (attention, norm) in sorted(find_attention(hf_model).items()):
        digest.update(f"layer {layer}".encode())
        parts = (norm, attention.k_proj, getattr(attention, "k_norm", None))
        for part in parts:
            for parameter in () if part is None else part.parameters():
                rounded = parameter.to(device="cpu", dtype=torch.bfloat16).contiguous()
                digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Entries and metadata."""
    if isinstance(source, Mapping):
        metadata = source.get(METADATA, {})
        if not isinstance(metadata, Mapping):
            raise UsageError(f"{FIELD}: {METADATA}", metadata, "a mapping from names to text")
        return {name: value for name, value in source.items() if name != METADATA}, metadata
    try:
        with safe_open(Path(source), framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        legal = "a safetensors file that calibrate_keys has made"
        raise UsageError(FIELD, str(source), legal, f"{error}.") from None


def _entry(entries: Mapping[str, Any], name: str, shape: tuple[int, int]) -> Tensor:
    field = f"{FIELD}: {name}"
    tensor = entries.get(name)
    if tensor is None:
        raise UsageError(field, "missing", f"float32 {list(shape)}")
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        raise UsageError(field, getattr(tensor, "dtype", type(tensor).__name__), "torch.float32")
    if tuple(tensor.shape) != shape:
        raise UsageError(field, list(tensor.shape), list(shape))
    if not torch.isfinite(tensor).all():
        raise UsageError(field, "NaN or infinity", "finite numbers")
    if name.endswith("deviation") and (tensor < 0).any():
        raise UsageError(field, float(tensor.min()), "0 or more")
    return tensor.cpu().contiguous()
