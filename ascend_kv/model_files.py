"""A model's files: find them, read its geometry from them, and check that the weights agree.

Only configurations and headers are read here, never weights: ``config.json``, the headers of
safetensors files, and the header of a GGUF file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import ModelGeometry, geometry_from_config
from ascend_kv.gguf_header import GGUFHeader, read_gguf_header

_LEGAL_MODELS = "a directory with config.json, a .gguf file, or a Hugging Face id"
_SNAPSHOT_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF's names that are Hugging Face's model types too; the header says all that is needed."""

_KEY_PROJECTION = re.compile(
    r"(?:layers|blk)\.(\d+)\.(?:self_attn\.k_proj|attn_k|attn\.wkv)\.weight$"
)
"""Hugging Face's name, GGUF's, and DeepSeek-V4's, whose keys are the values too."""


def find_model(model: str | os.PathLike[str]) -> Path:
    """The directory or ``.gguf`` file of a model; a Hugging Face id is downloaded if need be.

    Of a hub model the configuration, the tokenizer and the safetensors are fetched, into the hub
    library's cache; what is there already is not fetched again.

    Raises:
        UsageError: there is no such model, or no network to fetch it; says what to do.
    """
    path = _given(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path

    def download(repository: str) -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(repository, allow_patterns=_SNAPSHOT_PATTERNS)

    return _from_hub(model, download)


def _given(model: str | os.PathLike[str]) -> Path:
    # Empty text, as a path, would mean the working directory.
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise UsageError("model", model, _LEGAL_MODELS)
    return Path(model).expanduser()


def _what_lies_there(directory: Path) -> str:
    found = sorted(directory.glob("*.gguf"))
    instead = f", but {found[0].name} is: give that file" if found else ""
    return f"config.json is not in that directory{instead}."


def load_geometry(model: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry of a model on disk or on the Hugging Face hub.

    Where weights lie beside the configuration, their key projections must confirm it. Of a hub
    model only ``config.json`` is fetched, so there the weights are not looked at.

    Args:
        model: a directory, a ``config.json``, a ``.gguf`` file or a Hugging Face id.

    Raises:
        UsageError: there is no such model, or no network to fetch it; says what to do.
        UnsupportedModelError: as ``geometry_from_config``, or the weights do not confirm it.
    """
    return load_config(model)[1]


def load_config(model: str | os.PathLike[str]) -> tuple[dict[str, Any], ModelGeometry]:
    """A model's configuration under Hugging Face's field names, and the geometry it gives.

    Args:
        model: as for ``load_geometry``.

    Raises:
        UsageError, UnsupportedModelError: as ``load_geometry``.
    """
    path = _given(model)
    if path.suffix == ".gguf":
        header = _read_whole_gguf(path)
        return _gguf_config(header), _confirmed_gguf(header)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UsageError("model", str(model), _LEGAL_MODELS, _what_lies_there(path))
        config = read_json(path / "config.json")
        geometry = geometry_from_config(config)
        if (path / _INDEX).exists() or any(path.glob("*.safetensors")):
            confirm_key_shapes(geometry, read_key_shapes(path))
        return config, geometry
    if not path.is_file():

        def download(repository: str) -> str:
            from huggingface_hub import hf_hub_download

            return hf_hub_download(repository, "config.json")

        path = _from_hub(model, download)
    config = read_json(path)
    return config, geometry_from_config(config)


def geometry_from_gguf(path: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry in a GGUF file's header, which its key projections must confirm.

    Its ``dtype`` is float32, to which quantized weights are dequantized on loading.

    Raises:
        UsageError: not a GGUF file, or a damaged one.
        UnsupportedModelError: an unknown architecture, a missing key, or weights that disagree.
    """
    return _confirmed_gguf(_read_whole_gguf(path))


def _confirmed_gguf(header: GGUFHeader) -> ModelGeometry:
    geometry = geometry_from_config(_gguf_config(header))
    confirm_key_shapes(geometry, header.tensors)
    return geometry


def _read_whole_gguf(path: str | os.PathLike[str]) -> GGUFHeader:
    header = read_gguf_header(path)
    missing = header.file_bytes - os.path.getsize(path)
    if missing > 0:
        hint = f"{missing} bytes are missing."
        raise UsageError("model", str(path), "a whole GGUF file", hint)
    return header


def read_key_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shapes ``[N*D, hidden]`` of the key projections' weights, by their names in the files.

    Args:
        path: a directory with ``*.safetensors``, or a ``.gguf`` file.

    Raises:
        UsageError: no such file, or a damaged one.
        UnsupportedModelError: no safetensors there, or a shard that the index names is missing.
    """
    path = Path(path)
    shapes: dict[str, tuple[int, ...]] = {}
    if path.suffix == ".gguf":
        shapes = _read_whole_gguf(path).tensors
    else:
        for shard in safetensors_files(path):
            shapes.update(_read_safetensors_shapes(shard))
    return {name: shape for name, shape in shapes.items() if _KEY_PROJECTION.search(name)}


def confirm_key_shapes(geometry: ModelGeometry, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every layer has a key projection of ``[N*D, hidden]``.

    Args:
        geometry: what the configuration says.
        shapes: weight shapes by name, such as ``model.layers.0.self_attn.k_proj.weight`` or
            ``blk.0.attn_k.weight``; other names are passed over.

    Raises:
        UnsupportedModelError: names the first layer that is missing, surplus or of another shape.
    """
    found: dict[int, str] = {}
    for name in shapes:
        match = _KEY_PROJECTION.search(name)
        if match:
            found[int(match[1])] = name
    expected = (geometry.num_kv_heads * geometry.head_dim, geometry.hidden_size)
    for layer in range(geometry.num_layers):
        name = found.pop(layer, "")
        if not name or tuple(shapes[name]) != expected:
            raise UnsupportedModelError(
                name or f"layers.{layer}.self_attn.k_proj.weight",
                list(shapes[name]) if name else "missing",
                f"{list(expected)}: num_key_value_heads * head_dim, hidden_size",
                "The weights must confirm the configuration, and be stored unpacked.",
            )
    if found:
        raise UnsupportedModelError(
            found[min(found)],
            f"layer {min(found)}",
            f"layers 0 to {geometry.num_layers - 1}, as num_hidden_layers says",
        )


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """GGUF's metadata under Hugging Face's field names.

    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs".
    """
    architecture = header.values.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise UnsupportedModelError("general.architecture", architecture, _GGUF_ARCHITECTURES)

    def number(key: str) -> int:
        value = header.values.get(f"{architecture}.{key}")
        if isinstance(value, tuple) and len(set(value)) == 1:  # one for each layer, all equal
            value = value[0]
        if not isinstance(value, int):
            given = "missing" if value is None else value
            legal = "one whole number in the GGUF header"
            raise UnsupportedModelError(f"{architecture}.{key}", given, legal)
        return value

    head_dim = None
    if f"{architecture}.attention.key_length" in header.values:
        head_dim = number("attention.key_length")
        if number("attention.value_length") != head_dim:
            raise UnsupportedModelError(
                f"{architecture}.attention.value_length",
                number("attention.value_length"),
                f"attention.key_length = {head_dim}",
            )
    rope_type = header.values.get(f"{architecture}.rope.scaling.type")
    embedding = header.tensors.get("token_embd.weight")
    tokens = header.array_lengths.get("tokenizer.ggml.tokens")
    return {
        "model_type": architecture,
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_size": number("embedding_length"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": embedding[0] if embedding else tokens,
        "intermediate_size": header.values.get(f"{architecture}.feed_forward_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_scaling": {"rope_type": rope_type} if rope_type else None,
    }


def check_gguf_rotation(path: Path) -> None:
    """Refuse a GGUF file whose rotary scaling would be lost when its weights are loaded.

    transformers (5.24) reads the base frequency out of a Llama or Qwen GGUF file and nothing more
    about the rotation, so such a model would compute something else without a word.

    Raises:
        UnsupportedModelError: the file scales the rotation, or holds factors for it.
    """
    header = read_gguf_header(path)
    key = f"{header.values.get('general.architecture')}.rope.scaling.type"
    kind = header.values.get(key, "none")
    hint = "transformers drops it when it reads GGUF. Take the checkpoint in safetensors."
    if kind != "none":
        raise UnsupportedModelError(key, kind, "none in a GGUF file", hint)
    if "rope_freqs.weight" in header.tensors:
        legal = "a GGUF file without factors of the rotary frequencies"
        raise UnsupportedModelError("rope_freqs.weight", "present", legal, hint)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        UsageError: a file that is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("model", str(path), "a JSON file that can be read", f"{error}.") from None
    if not isinstance(content, dict):
        raise UsageError("model", str(path), "a JSON object")
    return content


def is_hub_id(name: str) -> bool:
    """Whether something that is not on this machine may be on the hub."""
    return Path(name).suffix not in (".json", ".gguf") and bool(_HUB_ID.fullmatch(name))


def _from_hub(model: str | os.PathLike[str], download: Callable[[str], str]) -> Path:
    name = str(model)
    if not is_hub_id(name):
        raise UsageError("model", name, _LEGAL_MODELS, "There is no such file or directory.")
    try:
        return Path(download(name))
    except Exception as error:  # the hub library lets errors of its network library through
        reason = (str(error).strip().splitlines() or [repr(error)])[0].rstrip(".")
        raise UsageError(
            "model",
            name,
            _LEGAL_MODELS,
            "It is neither a directory here nor in the local hub cache, and could not be fetched "
            f"({type(error).__name__}: {reason}). Without a network, download it elsewhere "
            f"(hf download {name}) and give its directory, or give a .gguf file.",
        ) from error


def safetensors_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors, those that its index names if it has one.

    Raises:
        UnsupportedModelError: none there, or one that is missing.
    """
    index = directory / _INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            hint = "No weights were found there."
            if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
                hint = "Pickled weights are not read: save them again with safe_serialization=True."
            raise UnsupportedModelError("model", str(directory), "*.safetensors or a .gguf", hint)
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UsageError("weight_map", weight_map, f"an object in {index}")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UnsupportedModelError(
            "model",
            str(directory),
            f"all {len(files)} files that {_INDEX} names",
            f"Missing: {', '.join(missing)}.",
        )
    return files


def _read_safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes from a safetensors header: 8 bytes of length, then JSON.

    Source: https://github.com/huggingface/safetensors#format.
    """
    legal = "a whole safetensors file"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if 8 + length > size:
            raise UsageError("model", str(path), legal, "The file is cut short or of another kind.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError("model", str(path), legal, "Its header cannot be read.") from None
    if 8 + length + end > size:
        raise UsageError("model", str(path), legal, f"{8 + length + end - size} bytes are missing.")
    return shapes
