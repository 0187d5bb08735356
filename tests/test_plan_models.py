"""Built-in configurations: weights and KV bytes against figures that others published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import refused
from tiny_models import make_model

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import FORMATS, geometry_from_config
from ascend_kv.plan.builtin_models import BUILTIN_MODELS, find_builtin
from ascend_kv.plan.deepseek_parameters import deepseek_attention, deepseek_kept
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.parameters import Parameters, count_parameters
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS, weight_format

DEEPSEEK = {"deepseek-v3.2": 37e9, "deepseek-v4-flash": 13e9, "deepseek-v4-pro": 49e9}
"""Published active weights."""

# Bytes of a token in 16 bit. Independent: an article's table (dev.to, "KV cache memory calculator":
# 0.5 GB at 4K for Llama 3 8B, Mistral 7B and Mixtral; its 5 GB for Llama 3 70B is 4 times too much:
# it multiplies 64 query heads by half), S. Raschka's gallery of architectures (128 KiB for Llama
# 3 8B), and the field articles' 10 GiB for 70B at 32K. The others are worked out by hand from
# layers x KV heads x head_dim.
KV_BYTES = {
    "llama-3-8b": 128 * 1024,
    "llama-3.1-8b": 2**29 // 4096,
    "mistral-7b": 2**29 // 4096,
    "mixtral-8x7b": 2**29 // 4096,
    "llama-3-70b": 10 * 2**30 // 32768,
    "qwen2.5-0.5b": 24 * 2 * 64 * 4,
    "qwen2.5-7b": 57_344,
    "qwen2.5-14b": 48 * 8 * 128 * 4,
    "qwen2.5-72b": 10 * 2**30 // 32768,
    "qwen3-8b": 36 * 8 * 128 * 4,
    "qwen3-32b": 64 * 8 * 128 * 4,
    "qwen3-30b-a3b": 48 * 4 * 128 * 4,
    "llama-3.2-1b": 16 * 8 * 64 * 4,
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_of_a_token(name: str) -> None:
    geometry = find_planned_model(name).geometry
    assert geometry.token_bytes([FORMATS["bfloat16"]] * geometry.num_layers) == KV_BYTES[name]


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_weights_are_as_many_as_published(name: str) -> None:
    model = find_planned_model(name)
    published = BUILTIN_MODELS[name].published_parameters
    # published with two or three digits
    assert model.parameters.total == pytest.approx(published, rel=0.02)
    assert model.source == f"built in, {BUILTIN_MODELS[name].source}"


def test_active_weights_of_mixtures() -> None:
    for name, published in (("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22e9),
                            ("mixtral-8x7b", 12.9e9)):  # fmt: skip
        parameters = find_planned_model(name).parameters
        # published with the embedding, which a token reads one row of
        active = parameters.active + parameters.embedding
        assert active == pytest.approx(published, rel=0.02), name


@pytest.mark.parametrize("name", DEEPSEEK)
def test_weights_of_deepseek(name: str) -> None:
    model = find_planned_model(name)
    assert model.parameters.attention == deepseek_attention(model.config)
    assert model.parameters.active == pytest.approx(DEEPSEEK[name], rel=0.02)


def test_what_recipes_keep_in_16_bit() -> None:
    """V4 Flash, by hand: hidden 4096, 43 layers of which 21 are CSA and 20 HCA."""
    flash = find_planned_model("deepseek-v4-flash")
    routers, index_heads = 43 * 4096 * 256, 21 * 4096 * 64
    compressors = 21 * 4 * 4096 * (512 + 128) + 20 * 2 * 4096 * 512
    projections = 43 * (4096 * (1024 + 512) + 1024 * 64 * 512)
    half, more = routers + index_heads + compressors, projections
    assert deepseek_kept(flash.config) == [half, more]
    linear = flash.parameters.attention + flash.parameters.dense
    stored = flash.parameters.linear_bytes
    assert stored(WEIGHT_FORMATS["bfloat16"]) == 2 * linear
    assert stored(WEIGHT_FORMATS["w8a8"]) == linear + half + more
    assert stored(WEIGHT_FORMATS["mxfp8-mxfp4"]) == pytest.approx(
        (linear - half) * 33 / 32 + 2 * half
    )
    # V3.2: hidden 7168, 61 layers of which 3 are dense
    latent = find_planned_model("deepseek-v3.2")
    more = 61 * (7168 * (1536 + 512 + 64 + 128) + 512 * 128 * (128 + 128))
    assert deepseek_kept(latent.config) == [58 * 7168 * 256 + 61 * 7168 * 64, more]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("QWEN2.5-7B", "qwen2.5-7b"),
        ("qwen/qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("somebody/Qwen2.5-7B-Instruct", None),  # another owner's may be another model
        ("Qwen/Qwen2.5-7B", None),  # 131,072 positions
        ("Qwen/Qwen3-4B-Instruct-2507", None),  # 262,144 positions
        ("mistralai/Mistral-7B-v0.1", None),  # a window, and another vocabulary
        ("meta-llama/Llama-3.1-8B", None),
        ("Qwen2.5-7B-Instruct", None),
        ("deepseek-v4-flash", "deepseek-v4-flash"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-V4-Flash-Base", None),
        ("Qwen/Qwen2.5-Coder-7B", None),
        ("Qwen/Qwen2.5-7B-Instruct-1M", None),
    ],
)
def test_built_in_names(given: str, found: str | None) -> None:
    assert find_builtin(given) == found


def test_a_directory_comes_before_a_built_in_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2.5-7b").mkdir()
    make_model(tmp_path / "qwen2.5-7b")
    assert find_planned_model("qwen2.5-7b").geometry.num_layers == 3


def test_weights_of_a_model_on_disk_are_counted(tmp_path: Path) -> None:
    """Against the checkpoint's own tensors."""
    safetensors = pytest.importorskip("safetensors")
    make_model(tmp_path)
    stored = 0
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            stored += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
    assert find_planned_model(tmp_path).parameters.total == stored


def test_deepseek_configurations_on_disk(tmp_path: Path) -> None:
    for name in DEEPSEEK:
        (tmp_path / "config.json").write_text(json.dumps(dict(BUILTIN_MODELS[name].config)))
        for given in (tmp_path, tmp_path / "config.json"):
            model = find_planned_model(given)
            assert model.geometry == find_planned_model(name).geometry
            assert model.parameters == find_planned_model(name).parameters


def test_older_checkpoints_give_ratios(tmp_path: Path) -> None:
    """One a layer, and one more for the layer that drafts."""
    flash = find_planned_model("deepseek-v4-flash")
    config = dict(flash.config)
    kinds = config.pop("layer_types")
    del config["compress_rates"]
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    config["compress_ratios"] = [*(ratios.get(kind, 128) for kind in kinds), 0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    older = find_planned_model(tmp_path)
    assert older.geometry == flash.geometry and older.parameters == flash.parameters


def test_models_that_cannot_be_planned() -> None:
    error = refused(UsageError, find_planned_model, "qwen2.5-7x.json")
    assert error.field == "model" and "Built in: qwen2.5-0.5b" in error.hint
    config = dict(BUILTIN_MODELS["qwen3-8b"].config)
    geometry = geometry_from_config(config)
    del config["intermediate_size"]
    error = refused(UnsupportedModelError, count_parameters, config, geometry)
    assert error.field == "intermediate_size"
    mixture = dict(BUILTIN_MODELS["qwen3-30b-a3b"].config) | {"num_experts_per_tok": True}
    error = refused(UnsupportedModelError, count_parameters, mixture, geometry_from_config(mixture))
    assert error.field == "num_experts_per_tok"


def test_weight_formats() -> None:
    assert weight_format("auto", "bfloat16").linear_bytes == 2
    assert weight_format("w4a16", "bfloat16").linear_bytes == pytest.approx(0.515625)
    # a checkpoint of V4 Flash in its published format is about 146 GiB (hub, as GGUF)
    flash, form = find_planned_model("deepseek-v4-flash").parameters, WEIGHT_FORMATS["fp8-mxfp4"]
    stored = flash.linear_bytes(form) + flash.experts * form.expert_bytes
    stored += (flash.embedding + flash.output) * form.other_bytes
    assert stored / 2**30 == pytest.approx(146, rel=0.01)
    error = refused(UsageError, weight_format, "w2", "bfloat16")
    assert error.field == "--weights" and "w8a8" in error.legal


def test_experts_that_a_step_reaches() -> None:
    parameters = Parameters(1, 1, 1, 1, experts=1000, num_experts=8, experts_per_token=2)
    assert parameters.reached_experts(1) == 250
    assert parameters.reached_experts(2) == pytest.approx(1000 * (1 - 0.75**2))
    assert parameters.active == 3 + 250
    assert Parameters(1, 1, 1, 1).reached_experts(9) == 0
