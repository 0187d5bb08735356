"""Load a Hugging Face causal LM, or refuse it by name before its weights are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ascend_kv.errors import RunError, UnsupportedModelError, UsageError
from ascend_kv.geometry import ModelGeometry, format_spec
from ascend_kv.integrations.attention import ATTENTION_NAME, probe_attention
from ascend_kv.integrations.deepseek_v4_attention import install
from ascend_kv.integrations.key_folding import WeightFolding
from ascend_kv.model_files import (
    check_gguf_rotation,
    confirm_key_shapes,
    find_model,
    load_geometry,
    read_key_shapes,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class LoadedModel(NamedTuple):
    """Weights in memory, ready to serve any number of caches one after another."""

    hf_model: Any
    geometry: ModelGeometry
    dtype: str
    """Type of the weights and of the arithmetic: float32, float16 or bfloat16."""
    path: Path
    """Directory or GGUF file the weights came from."""
    folding: WeightFolding
    """Brings the weights into the state that a cache wants; as loaded until then."""


def load_model(
    model: str | Path, dtype: str = "auto", device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load the weights of a causal LM whose attention goes through the paged cache.

    Args:
        model: a directory with ``config.json`` and safetensors, a ``.gguf`` file, or a hub id.
        dtype: ``float32``, ``float16``, ``bfloat16``, or ``auto``: what the checkpoint has.
        device: where the weights go.

    Raises:
        UsageError: no such model, or an unknown dtype.
        UnsupportedModelError: a model type, a shape or an attention that cannot be served.
        RunError: the checkpoint lacks tensors or cannot be read.
    """
    weights_dtype(dtype, "float32")  # refused before anything is read
    path = find_model(model)
    geometry = load_geometry(path)
    confirm_key_shapes(geometry, read_key_shapes(path))
    if path.suffix == ".gguf":
        check_gguf_rotation(path)
    name = weights_dtype(dtype, geometry.dtype)
    hf_model = _read_weights(path, getattr(torch, name)).to(device).eval().requires_grad_(False)
    if geometry.compressed is not None:
        install(hf_model, geometry.compressed)
    else:
        probe_attention(hf_model, geometry)
    return LoadedModel(hf_model, geometry, name, path, WeightFolding(hf_model))


def weights_dtype(dtype: str, own: str) -> str:
    """The full name of the type that ``dtype`` asks for; ``auto`` is ``own``.

    Raises:
        UsageError: an unknown type, or a quantized one.
    """
    if dtype == "auto":
        return own
    try:
        spec = format_spec(dtype)
    except (UsageError, TypeError):
        spec = None
    if spec is None or spec.quantized:
        raise UsageError("dtype", dtype, "auto, float32, float16, bfloat16")
    return spec.name


def load_tokenizer(path: Path) -> Any:
    """The tokenizer that lies beside the weights.

    Raises:
        UsageError: there is none; prompts can still be given as token ids.
    """
    directory, options = _source(path)
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "tokenizer",
            str(path),
            "a model with a tokenizer, or skip_tokenizer_init=True and prompts as token ids",
            _tokenizer_fault(path, error),
        ) from error


def _tokenizer_fault(path: Path, error: Exception) -> str:
    if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return f"None of {', '.join(_TOKENIZER_FILES)} is there."
    return f"It cannot be read: {' '.join(str(error).split())}"


def eos_token_ids(hf_model: Any) -> frozenset[int]:
    """Tokens that end a sequence, from the generation config, else from the model's config."""
    for config in (hf_model.generation_config, hf_model.config):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset([tokens] if isinstance(tokens, int) else tokens)
    return frozenset()


def _source(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_dir():
        return path, {}
    return path.parent, {"gguf_file": path.name}


def _read_weights(path: Path, dtype: torch.dtype) -> Any:
    directory, options = _source(path)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with _without_alarm():
            hf_model, info = auto.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **options,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"model: {path} cannot be read: {error}") from error
    for name, given, expected in sorted(info.get("mismatched_keys", ())):
        legal = f"{list(expected)}, as the configuration says"
        raise UnsupportedModelError(name, list(given), legal, f"In {path}.")
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise UnsupportedModelError(
            "checkpoint", str(path), "one that holds every tensor of its model", f"Missing: {shown}"
        )
    return hf_model


@contextmanager
def _without_alarm() -> Iterator[None]:
    """Keep back transformers' report that missing tensors were drawn at random: we refuse them."""

    def passes(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        refused = "MISSING" in said or "MISMATCH" in said
        return not ("LOAD REPORT" in said and refused and "CONVERSION" not in said)

    source = logging.getLogger("transformers.modeling_utils")
    source.addFilter(passes)
    try:
        yield
    finally:
        source.removeFilter(passes)
