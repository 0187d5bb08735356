"""The model that a plan is about: configuration, geometry and weights, and where they are from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import ModelGeometry, geometry_from_config
from ascend_kv.model_files import load_config
from ascend_kv.plan.builtin_models import BUILTIN_MODELS, find_builtin
from ascend_kv.plan.parameters import Parameters, count_parameters


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
        geometry = geometry_from_config(config)
        source = f"built in, {builtin.source}"
    elif isinstance(name, str) and "/" not in name and not Path(name).exists():
        legal = "a directory with config.json, a .gguf file, a Hugging Face id with its owner"
        near = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, 1)
        hint = f"Did you mean {near[0]}? " * bool(near) + f"Built in: {', '.join(BUILTIN_MODELS)}."
        raise UsageError("model", name, legal, hint)
    else:
        try:
            config, geometry = load_config(name)
        except UsageError as error:
            if error.field != "model":
                raise
            hint = f"{error.hint} Built in: {', '.join(BUILTIN_MODELS)}."
            raise type(error)("model", error.given, error.legal, hint.strip()) from error
        source = str(name)
    if geometry.compressed is not None:
        hint = "Its layers are compressed: recipes/deepseek_v4.md has their bytes."
        legal = "a model that keeps every token"
        raise UnsupportedModelError("model", name, legal, hint)
    return PlannedModel(str(name), source, geometry, count_parameters(config, geometry), config)
