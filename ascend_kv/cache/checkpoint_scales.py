"""Per-layer key and value scales out of a checkpoint, as llm-compressor writes and vLLM reads them.

``config.json`` says ``quantization_config.kv_cache_scheme`` (num_bits, type, strategy), and each
layer has a ``...layers.{i}.self_attn.k_scale`` and ``v_scale`` of one number. An FP8 scale is
absmax / 448, e4m3's largest number, so for INT8 it is multiplied by 448 / 127; an INT8 one is
taken as it is. Such scales are of keys as the model makes them.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open

from ascend_kv.errors import UsageError
from ascend_kv.formats.int8 import SYMMETRIC_LIMIT
from ascend_kv.model_files import read_json, safetensors_files

_E4M3_LARGEST = 448
_FACTORS = {"float": _E4M3_LARGEST / SYMMETRIC_LIMIT, "int": 1.0}
_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.([kv])_scale$")
_SIDES = {"k": "key", "v": "value"}


def read_checkpoint_scales(directory: Path) -> dict[str, torch.Tensor]:
    """The scales by the names of ``static_scales``, ``[1, 1, 1, 1]`` float32, those that are there.

    Raises:
        UsageError: a checkpoint without such scales, or with some that do not suit INT8.
    """
    config = read_json(directory / "config.json")
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    kind = tuple(scheme.get(key) for key in ("num_bits", "type", "strategy"))
    legal = [(8, number, "tensor") for number in _FACTORS]
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
                entry = f"layers.{match[1]}.{_SIDES[match[2]]}_scale"
                scales[entry] = scale.reshape(1, 1, 1, 1) * _FACTORS[scheme["type"]]
    return scales
