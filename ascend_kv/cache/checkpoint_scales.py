"""Per-layer key and value scales out of a checkpoint, as llm-compressor writes and vLLM reads them.

``config.json`` says ``quantization_config.kv_cache_scheme`` (num_bits, type, strategy), and each
layer has a ``...layers.{i}.self_attn.k_scale`` and ``v_scale`` of one number: absmax over the
largest code, 448 where they are for FP8 (E4M3), 127 for INT8. For a cache in another format they
are multiplied by theirs and divided by its largest code; for the same one they are taken as they
are. Such scales are of keys as the model makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ascend_kv.errors import UsageError
from ascend_kv.formats import FP8_E4M3, FP8_E5M2
from ascend_kv.formats.int8 import SYMMETRIC_LIMIT
from ascend_kv.geometry import FormatSpec, LayerFormat
from ascend_kv.model_files import read_json, safetensors_files

_LARGEST: dict[str, float] = {
    "int8": SYMMETRIC_LIMIT,
    "fp8_e4m3": FP8_E4M3.largest,
    "fp8_e5m2": FP8_E5M2.largest,
}
_WRITTEN_FOR = {"float": "fp8_e4m3", "int": "int8"}
_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.([kv])_scale$")
_SIDES = {"k": "key", "v": "value"}


def read_checkpoint_scales(
    directory: Path, formats: Sequence[LayerFormat]
) -> dict[str, torch.Tensor]:
    """The scales by the names of ``static_scales``, ``[1, 1, 1, 1]`` float32, those that are there.

    Args:
        directory: of the checkpoint.
        formats: one for each layer; what is not static gets no scales.

    Raises:
        UsageError: a checkpoint without such scales, or with some of another kind.
    """
    config = read_json(directory / "config.json")
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    kind = tuple(scheme.get(key) for key in ("num_bits", "type", "strategy"))
    legal = [(8, number, "tensor") for number in _WRITTEN_FOR]
    if kind not in legal or scheme.get("symmetric") is False or scheme.get("dynamic") is True:
        raise UsageError(
            "kv_cache_scales",
            f"kv_cache_scheme {scheme or 'missing'} in {directory / 'config.json'}",
            "num_bits 8, type float or int, strategy tensor, symmetric, not dynamic",
        )
    scales = {}
    for shard in safetensors_files(directory):
        with safe_open(shard, framework="pt") as file:
            names = file.keys()
            for name in names:
                match = _SCALE.search(name)
                if match is None:
                    continue
                scale = file.get_tensor(name).to(torch.float32)
                if scale.numel() != 1:
                    raise UsageError(f"kv_cache_scales: {name}", list(scale.shape), "one number")
                side, layer = _SIDES[match[2]], int(match[1])
                if layer < len(formats):
                    spec: FormatSpec = getattr(formats[layer], side)
                    if not spec.static:
                        continue
                    scale = scale * (_LARGEST[_WRITTEN_FOR[scheme["type"]]] / _LARGEST[spec.name])
                scales[f"layers.{layer}.{side}_scale"] = scale.reshape(1, 1, 1, 1)
    return scales
