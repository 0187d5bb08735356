"""The model that a plan is about: configuration, geometry and weights, and where they are from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry, geometry_from_config
from ascend_kv.model_files import load_config, read_json
from ascend_kv.plan.builtin_models import BUILTIN_MODELS, find_builtin
from ascend_kv.plan.latent import LATENT_MODEL_TYPE, latent_geometry
from ascend_kv.plan.parameters import Parameters, count_parameters
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS, WeightFormat, weight_format


class PlannedModel(NamedTuple):
    """A model before it is loaded.

    Attributes:
        name: what the user called it.
        source: where the configuration was read.
        geometry: of its cache.
        parameters: of its weights.
        config: what was read.
    """

    name: str
    source: str
    geometry: ModelGeometry
    parameters: Parameters
    config: Mapping[str, Any]

    def describe(self, weights: str) -> str:
        """What of a model its speed depends on, whatever it is called and wherever it lies.

        Args:
            weights: name of the format that its weights are kept in.
        """
        geometry = self.geometry
        return (
            f"{geometry.model_type}, {geometry.num_layers} layers of {geometry.hidden_size}, "
            f"{geometry.num_heads} query and {geometry.num_kv_heads} KV heads of "
            f"{geometry.head_dim}, {self.parameters.total:,} weights in {weights}"
        )


def planned_weights(name: str, model: PlannedModel, device: Device) -> WeightFormat:
    """The format of that name.

    "auto" is the model's own type; where a DeepSeek was published in FP8, that, and INT8 for a
    card that has no FP8.

    Raises:
        UsageError: an unknown name, or one that the device cannot multiply.
    """
    quantization = model.config.get("quantization_config") or {}
    default, card = model.geometry.dtype, device.name != "cpu"
    if model.geometry.compressed is not None and card and quantization:
        experts = quantization.get("expert_dtype", model.config.get("expert_dtype"))
        published = "fp8-mxfp4" if experts == "fp4" else "fp8"
        default = published if has_fp8(device) else "w8a8"
    chosen = weight_format(name, default)
    if chosen.floats and not has_fp8(device):
        legal = [one.name for one in WEIGHT_FORMATS.values() if not one.floats]
        raise UsageError("--weights", name, legal, f"A {device.name} multiplies no FP8.")
    return chosen


def has_fp8(device: Device) -> bool:
    """Whether it multiplies FP8: an Ascend 950 does."""
    return device.name.startswith("950")


def find_planned_model(model: str | os.PathLike[str]) -> PlannedModel:
    """A built-in configuration, or one on disk or on the hub.

    A file or directory of that name comes first, then the built-in models by short name or hub id,
    then the hub.

    Raises:
        UsageError: there is no such model; lists the built-in ones where there is no network.
        UnsupportedModelError: its configuration has something that cannot be planned.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else model
    short = find_builtin(name) if isinstance(name, str) and not Path(name).exists() else None
    if short is not None:
        builtin = BUILTIN_MODELS[short]
        config: Mapping[str, Any] = builtin.config
        geometry = _geometry(config)
        source = f"built in, {builtin.source}"
    elif isinstance(name, str) and "/" not in name and not Path(name).exists():
        legal = "a directory with config.json, a .gguf file, a Hugging Face id with its owner"
        near = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, 1)
        hint = f"Did you mean {near[0]}? " * bool(near) + f"Built in: {', '.join(BUILTIN_MODELS)}."
        raise UsageError("model", name, legal, hint)
    else:
        try:
            config, geometry = _read(name)
        except UsageError as error:
            if error.field != "model":
                raise
            hint = f"{error.hint} Built in: {', '.join(BUILTIN_MODELS)}."
            raise type(error)("model", error.given, error.legal, hint.strip()) from error
        source = str(name)
    return PlannedModel(str(name), source, geometry, count_parameters(config, geometry), config)


def _geometry(config: Mapping[str, Any]) -> ModelGeometry:
    if config["model_type"] == LATENT_MODEL_TYPE:
        return latent_geometry(config)
    return geometry_from_config(config)


def _read(name: str | os.PathLike[str]) -> tuple[Mapping[str, Any], ModelGeometry]:
    """A configuration on disk or on the hub; DeepSeek-V3.2's, which is not served, on disk only."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        config = read_json(path)
        if config.get("model_type") == LATENT_MODEL_TYPE:
            return config, latent_geometry(config)
    return load_config(name)
