"""Geometry out of files: safetensors and GGUF headers, and what is damaged, missing or at odds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import save_file

import ascend_kv.gguf_header
from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import ModelGeometry, geometry_from_config
from ascend_kv.gguf_header import read_gguf_header
from ascend_kv.integrations.loading import load_model
from ascend_kv.model_files import (
    check_gguf_rotation,
    confirm_key_shapes,
    find_model,
    geometry_from_gguf,
    load_geometry,
    read_key_shapes,
)

# 3 layers, 6 query heads and 2 KV heads of 4; no two numbers are the same.
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 20, "vocab_size": 11,
    "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip
GEOMETRY = ModelGeometry("llama", 3, 6, 2, 4, 20, 11, 64, "float32", (None, None, None))


def key_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.k_proj.weight"


def write_directory(path: Path, layers: int = 3, rows: int = 8, shards: bool = False) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {key_name(layer): np.zeros((rows, 20), np.float16) for layer in range(layers)}
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((24, 20), np.float16)
    if not shards:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, path / weight_map[name])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_gguf(
    path: Path, arch: str = "llama", rows: int = 8, factors: bool = False, **changes: Any
) -> Path:
    values: dict[str, Any] = {
        "block_count": 3, "context_length": 64, "embedding_length": 20, "attention.head_count": 6,
        "attention.head_count_kv": 2, "attention.key_length": 4, "attention.value_length": 4,
    }  # fmt: skip
    values.update({name.replace("__", "."): value for name, value in changes.items()})
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i} \N{SNOWMAN}" for i in range(11)])
    writer.add_array("tokenizer.ggml.scores", [0.5 * i for i in range(11)])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32(f"{arch}.rope.freq_base", 1e4)
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((11, 20), np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.attn_k.weight", np.zeros((rows, 20), np.float32))
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(20, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("shards", [False, True])
def test_a_directory_with_weights(tmp_path: Path, shards: bool) -> None:
    write_directory(tmp_path, shards=shards)
    assert load_geometry(tmp_path) == load_geometry(str(tmp_path)) == GEOMETRY
    assert read_key_shapes(tmp_path) == {key_name(layer): (8, 20) for layer in range(3)}
    assert find_model(str(tmp_path)) == tmp_path


def test_a_config_alone_is_enough_to_plan(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert load_geometry(file) == load_geometry(tmp_path) == GEOMETRY
    error = refused(UnsupportedModelError, read_key_shapes, tmp_path)
    assert "safetensors" in error.legal


@pytest.mark.parametrize(
    ("weights", "field", "said"),
    [
        ({"layers": 2}, "layers.2.self_attn.k_proj.weight", "got 'missing'"),
        ({"layers": 4}, key_name(3), "layers 0 to 2"),
        ({"rows": 24}, key_name(0), "got [24, 20]; legal: [8, 20]"),
    ],
)
def test_weights_that_do_not_confirm_the_config(
    tmp_path: Path, weights: dict[str, int], field: str, said: str
) -> None:
    write_directory(tmp_path, **weights)
    error = refused(UnsupportedModelError, load_geometry, tmp_path)
    assert error.field == field
    assert said in str(error)


def test_key_shapes_must_fit_in_both_dimensions() -> None:
    names = [f"layers.{layer}.self_attn.k_proj.weight" for layer in range(3)]
    confirm_key_shapes(GEOMETRY, dict.fromkeys(names, (8, 20)))
    for shape in ((8, 24), (6, 20), (20, 8)):
        shapes = {**dict.fromkeys(names, (8, 20)), names[1]: shape}
        assert (
            refused(UnsupportedModelError, confirm_key_shapes, GEOMETRY, shapes).field == (names[1])
        )


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_directory(tmp_path, shards=True)
    (tmp_path / "model-1.safetensors").unlink()
    error = refused(UnsupportedModelError, load_geometry, tmp_path)
    assert "Missing: model-1.safetensors." in error.hint


def test_safetensors_cut_short_are_refused(tmp_path: Path) -> None:
    file = write_directory(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for length, said in ((len(whole) - 1, "1 bytes are missing"), (100, "cut short"), (0, "")):
        file.write_bytes(whole[:length])
        error = refused(UsageError, load_geometry, tmp_path)
        assert error.given == str(file)
        assert said in error.hint
    file.write_bytes((4).to_bytes(8, "little") + b"[{}]" + whole)
    assert "header" in refused(UsageError, load_geometry, tmp_path).hint


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    for content in ("{", "[]", "\udcff"):
        (tmp_path / "config.json").write_text(content, errors="surrogateescape")
        error = refused(UsageError, load_geometry, tmp_path)
        assert error.given == str(tmp_path / "config.json")


def test_a_gguf_header_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    ours, theirs = read_gguf_header(file), gguf.GGUFReader(file)
    expected = {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    lists = {name: value for name, value in expected.items() if isinstance(value, list)}
    strings = lists.pop("tokenizer.ggml.tokens")
    assert ours.array_lengths == {"tokenizer.ggml.tokens": len(strings), **{
        name: len(value) for name, value in lists.items()}}  # fmt: skip
    del expected["tokenizer.ggml.tokens"]
    assert ours.values == {
        name: tuple(value) if isinstance(value, list) else value for name, value in expected.items()
    }
    assert ours.tensors == {
        tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in theirs.tensors
    }
    assert ours.tensors["token_embd.weight"] == (11, 20)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_geometry_of_a_gguf_file(tmp_path: Path, arch: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", arch)
    assert geometry_from_gguf(file) == geometry_from_config({**CONFIG, "model_type": arch})
    assert load_geometry(str(file)) == geometry_from_gguf(file)
    assert read_key_shapes(file) == {f"blk.{layer}.attn_k.weight": (8, 20) for layer in range(3)}
    assert find_model(file) == file


def test_gguf_may_leave_head_dim_out_and_count_heads_by_layer(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "tiny.gguf", attention__key_length=None, attention__value_length=None,
        attention__head_count=5, attention__head_count_kv=[1, 1, 1], rows=4,
    )  # fmt: skip
    geometry = geometry_from_gguf(file)
    assert (geometry.head_dim, geometry.num_kv_heads) == (4, 1)


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"arch": "mamba"}, "general.architecture", "llama, qwen2"),
        ({"attention__head_count_kv": None}, "llama.attention.head_count_kv", "missing"),
        ({"attention__head_count_kv": [1, 2, 1]}, "llama.attention.head_count_kv", "(1, 2, 1)"),
        ({"attention__value_length": 8}, "llama.attention.value_length", "key_length = 4"),
        ({"attention__head_count_kv": 4}, "num_key_value_heads", "divisor"),
        ({"attention__head_count_kv": 3}, "blk.0.attn_k.weight", "[12, 20]"),
        ({"rope__scaling__type": "longrope"}, "rope_type", "rotation must stay"),
        ({"block_count": 4}, "layers.3.self_attn.k_proj.weight", "missing"),
        ({"rows": 4}, "blk.0.attn_k.weight", "got [4, 20]"),
    ],
)
def test_gguf_files_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], field: str, said: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", **changes)
    error = refused(UnsupportedModelError, load_geometry, file)
    assert error.field == field
    assert said in str(error)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope__scaling__type": "linear"}, "llama.rope.scaling.type"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
        ({"factors": True}, "rope_freqs.weight"),
    ],
)
def test_gguf_files_that_lose_their_rotation_are_planned_but_not_loaded(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", **changes)
    assert load_geometry(file).num_layers == 3
    error = refused(UnsupportedModelError, load_model, file)
    assert error.field == field and "safetensors" in error.hint


@pytest.mark.parametrize("kind", [None, "none"])
def test_gguf_files_that_scale_nothing_keep_their_rotation(
    tmp_path: Path, kind: str | None
) -> None:
    check_gguf_rotation(write_gguf(tmp_path / "tiny.gguf", rope__scaling__type=kind))


def test_gguf_headers_cut_anywhere_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    end = whole.index(b"blk.2.attn_norm.weight") + len("blk.2.attn_norm.weight") + 4 + 8 + 4 + 8
    for length in (*range(0, end, 7), end - 12, end - 1):
        file.write_bytes(whole[:length])
        assert refused(UsageError, read_gguf_header, file).given == str(file)
    file.write_bytes(whole[:end])
    assert read_gguf_header(file).tensors["blk.2.attn_norm.weight"] == (20,)
    for start, said in ((b"GGML", "does not begin"), (b"GGUF\x01\0\0\0", "version reads 1")):
        file.write_bytes(start + whole[len(start) :])
        assert said in str(refused(UsageError, read_gguf_header, file))


@pytest.mark.parametrize("alignment", [None, 64])
@pytest.mark.parametrize("quantized", [False, True])
def test_gguf_files_cut_in_their_data_are_refused(
    tmp_path: Path, alignment: int | None, quantized: bool
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    numbers = np.ones((3, 64), np.float32)
    if quantized:  # 34 bytes for 32 numbers
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("q", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("last", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    last = gguf.GGUFReader(tmp_path / "small.gguf").tensors[-1]
    end = int(last.data_offset) + 3 * 64 * 4
    assert read_gguf_header(tmp_path / "small.gguf").file_bytes == end

    file = write_gguf(tmp_path / "tiny.gguf")
    needed = read_gguf_header(file).file_bytes
    whole = file.read_bytes()
    file.write_bytes(whole[:needed])
    assert load_geometry(file).num_layers == 3
    for missing in (1, 100):
        file.write_bytes(whole[: needed - missing])
        for read in (load_geometry, read_key_shapes):
            error = refused(UsageError, read, file)
            assert error.given == str(file) and error.hint == f"{missing} bytes are missing."


@pytest.mark.parametrize("read", [load_geometry, find_model])
def test_no_name_at_all_is_not_the_working_directory(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_directory(tmp_path))
    assert refused(UsageError, read, "").field == "model"
    assert read(".")


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    error = refused(UsageError, load_geometry, tmp_path)
    assert error.given == str(tmp_path) and "config.json is not in" in error.hint
    write_gguf(tmp_path / "tiny.gguf")
    assert "tiny.gguf" in refused(UsageError, load_geometry, tmp_path).hint


def test_a_directory_without_weights_is_not_called_pickled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "No weights" in refused(UnsupportedModelError, read_key_shapes, tmp_path).hint
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    assert "Pickled" in refused(UnsupportedModelError, read_key_shapes, tmp_path).hint


def test_a_large_vocabulary_is_only_stepped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    decoded: list[str] = []
    string = ascend_kv.gguf_header._Cursor.string

    def recorded(cursor: ascend_kv.gguf_header._Cursor) -> str:
        decoded.append(string(cursor))
        return decoded[-1]

    monkeypatch.setattr(ascend_kv.gguf_header._Cursor, "string", recorded)
    assert read_gguf_header(file).array_lengths["tokenizer.ggml.tokens"] == 11
    assert "tokenizer.ggml.tokens" in decoded
    assert not any(text.startswith("token 1") for text in decoded)


@pytest.mark.parametrize("read", [load_geometry, find_model])
@pytest.mark.parametrize("model", ["./nowhere", "/no/where/at/all", "a/b/c", "no.gguf", "no.json"])
def test_paths_that_lead_nowhere_are_not_sought_on_the_hub(read: Any, model: str) -> None:
    error = refused(UsageError, read, model)
    assert error.field == "model"
    assert error.given == model
    assert "o such file" in error.hint


@pytest.mark.parametrize("read", [load_geometry, find_model])
def test_without_a_network_the_error_says_what_to_do(
    read: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = refused(UsageError, read, "somebody/some-model")
    assert error.given == "somebody/some-model"
    assert "hf download somebody/some-model" in error.hint


def test_of_a_hub_model_only_the_config_is_needed_to_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_directory(tmp_path)
    asked: list[tuple[Any, ...]] = []

    def download(*arguments: Any, **options: Any) -> str:
        asked.append(arguments)
        return str(tmp_path.joinpath(*arguments[1:]))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_geometry("somebody/some-model") == GEOMETRY
    assert asked == [("somebody/some-model", "config.json")]
    assert find_model("somebody/some-model") == tmp_path
    assert asked[1:] == [("somebody/some-model",)]
