"""Static scales in a checkpoint, as llm-compressor writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conditioned_models import (
    load_uneven,
)
from safetensors.torch import save_file
from static_models import Scales, make_llm, static

from ascend_kv.cache.static_scales import load_static_scales
from ascend_kv.errors import UsageError
from ascend_kv.integrations.loading import LoadedModel


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A Llama whose key channels differ in size: heads 6, KV heads 2, head_dim 8."""
    return load_uneven(tmp_path_factory.mktemp("llama"), model_type="llama")


def checkpoint(directory: Path, scheme: dict[str, Any] | None, scales: Scales) -> Path:
    config: dict[str, Any] = {"model_type": "llama"}
    if scheme is not None:
        config["quantization_config"] = {"kv_cache_scheme": scheme}
    (directory / "config.json").write_text(json.dumps(config))
    names = list(scales)
    for number, part in enumerate((names[:3], names[3:])):  # in several files
        tensors = {name: scales[name] for name in part} | {f"other{number}": torch.ones(3)}
        save_file(tensors, directory / f"model-{number}.safetensors")
    return directory


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


STORED = {
    f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.5 + layer], dtype=dtype)
    for layer, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16))
    for side in ("k", "v")
}


@pytest.mark.parametrize(("kind", "factor"), [("float", 448 / 127), ("int", 1.0)])
def test_scales_of_a_checkpoint(
    weights: LoadedModel, tmp_path: Path, kind: str, factor: float
) -> None:
    path = checkpoint(tmp_path, {**SCHEME, "type": kind}, STORED)
    llm = make_llm(
        weights, granularity="layer", scale_type="static", kv_cache_scales=path, pair_scaling=False
    )
    for number, layer in enumerate(llm.cache.layers):
        assert float(layer.key_scale) == pytest.approx((0.5 + number) * factor, rel=1e-6)
        assert float(layer.value_scale) == float(layer.key_scale)
    with pytest.raises(UsageError, match="scales for keys as the model makes them"):
        make_llm(weights, granularity="layer", scale_type="static", kv_cache_scales=path)


@pytest.mark.parametrize(
    ("name", "key_factor", "value_factor"),
    [("fp8", 1.0, 1.0), ("fp8_e5m2", 448 / 57344, 448 / 57344), ("k:fp8+v:int8", 1.0, 448 / 127)],
)
def test_fp8_scales_of_a_checkpoint(
    weights: LoadedModel, tmp_path: Path, name: str, key_factor: float, value_factor: float
) -> None:
    """Taken to the bit for the format that they were written for."""
    path = checkpoint(tmp_path, SCHEME, STORED)
    options = {"granularity": "layer", "scale_type": "static", "pair_scaling": False}
    llm = make_llm(weights, kv_cache_dtype=name, kv_cache_scales=path, **options)
    for number, layer in enumerate(llm.cache.layers):
        for scale, factor in ((layer.key_scale, key_factor), (layer.value_scale, value_factor)):
            wanted = torch.full((1, 1, 1, 1), 0.5 + number) * factor
            torch.testing.assert_close(scale, wanted, rtol=0 if factor == 1 else 1e-6, atol=0)


@pytest.mark.parametrize(
    "scheme",
    [
        None,
        {**SCHEME, "num_bits": 4},
        {**SCHEME, "type": "fp"},
        {**SCHEME, "strategy": "attn_head"},
        {**SCHEME, "symmetric": False},
        {**SCHEME, "dynamic": True},
    ],
)
def test_checkpoints_whose_scales_do_not_suit(
    weights: LoadedModel, tmp_path: Path, scheme: dict[str, Any] | None
) -> None:
    path = checkpoint(tmp_path, scheme, STORED)
    with pytest.raises(UsageError, match="kv_cache_scheme"):
        load_static_scales(path, weights.geometry, [static("layer")] * 3, 8, "")


def test_checkpoints_with_a_layer_missing_or_too_large(
    weights: LoadedModel, tmp_path: Path
) -> None:
    formats = [static("layer")] * 3
    name = "model.layers.1.self_attn.v_scale"
    path = checkpoint(tmp_path, SCHEME, {k: v for k, v in STORED.items() if k != name})
    with pytest.raises(UsageError, match="layers.1.value_scale: got 'missing'"):
        load_static_scales(path, weights.geometry, formats, 8, "")
    path = checkpoint(tmp_path, SCHEME, {**STORED, name: torch.ones(2)})
    with pytest.raises(UsageError, match=f"{name}: got .2.; legal: one number"):
        load_static_scales(path, weights.geometry, formats, 8, "")
