"""Statistics of a text's keys: what is observed, what it changes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conditioned_models import MODELS, formats_of, load_uneven, random_tokens, run_in_chunks
from full_disk import fill_disk
from safetensors.torch import load_file

from ascend_kv.config import CacheConfig
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.calibration import calibrate_keys, calibrate_scales, calibration_text
from ascend_kv.integrations.key_calibration import PIECE_TOKENS, read_key_calibration
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.key_statistics import METADATA, fingerprint, save_statistics
from ascend_kv.integrations.loading import LoadedModel

TEXT = random_tokens(PIECE_TOKENS + 37, seed=11)  # more than one piece, the last one short
TOKENS = random_tokens(41)


def conditioned(weights: LoadedModel, statistics: Any, layers: Any = "all") -> Any:
    """Keys in the model's own type without their mean."""
    seen = read_key_calibration(weights, statistics)
    return condition_keys(weights, formats_of(weights), False, layers, seen)


SERVED = [name for name in MODELS if name != "gemma3"]


@pytest.fixture(scope="module", params=SERVED)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_uneven(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return load_uneven(tmp_path, **MODELS["llama"])


def test_a_mean_key_is_taken_out_and_given_back(weights: LoadedModel) -> None:
    """Also in models with a bias, behind a key norm, and with scaled rotary frequencies."""
    plain = run_in_chunks(weights, None, TOKENS)
    keys = conditioned(weights, calibrate_keys(weights, TEXT))
    assert keys.conditioning.calibrated
    assert len(keys.conditioning.offset_layers) == weights.geometry.num_layers
    for chunks in (None, [1, 20, 5, 15]):
        torch.testing.assert_close(
            run_in_chunks(weights, keys, TOKENS, chunks), plain, atol=2e-4, rtol=1e-3
        )
    torch.testing.assert_close(run_in_chunks(weights, None, TOKENS), plain)  # nothing stays


def test_as_many_tokens_as_heads_do_not_turn_the_axes_of_a_key_norm_round(tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, **MODELS["qwen3"])
    keys = conditioned(weights, calibrate_keys(weights, TEXT))
    tokens = TOKENS[: weights.geometry.num_kv_heads]
    assert len(tokens) > 1 and not torch.equal(*keys.offsets[0][:2])
    plain = run_in_chunks(weights, None, tokens)
    torch.testing.assert_close(run_in_chunks(weights, keys, tokens), plain, atol=1e-4, rtol=1e-3)


def test_auto_asks_the_format_and_the_size_of_the_mean(llama: LoadedModel) -> None:
    entries = calibrate_keys(llama, TEXT)
    for layer, share in enumerate((0.1, 0.9, 0.4)):
        deviation = torch.ones_like(entries[f"layers.{layer}.key_deviation"])
        entries[f"layers.{layer}.key_deviation"] = deviation
        entries[f"layers.{layer}.key_mean"] = share * deviation
    seen = read_key_calibration(llama, entries)
    for name, layers in (("int4", (1,)), ("int8", ()), ("float32", ())):
        keys = condition_keys(llama, formats_of(llama, name), False, "auto", seen)
        assert keys.conditioning.offset_layers == layers


def test_the_fingerprint_is_of_the_checkpoint_not_of_the_type_it_is_loaded_in(
    tmp_path: Path,
) -> None:
    weights = load_uneven(tmp_path, "bfloat16", **MODELS["qwen2"])
    own = fingerprint(weights.hf_model)
    assert fingerprint(weights.hf_model.to(torch.float32)) == own
    weights.hf_model.model.layers[1].self_attn.k_proj.bias[0] += 1
    assert fingerprint(weights.hf_model) != own


def test_layers_that_turn_by_different_frequencies_keep_their_mean(tmp_path: Path) -> None:
    gemma = load_uneven(tmp_path, **MODELS["gemma3"])
    keys = conditioned(gemma, calibrate_keys(gemma, TEXT))
    assert keys.offsets == {}
    assert all("layers" in layer.offset_reason for layer in keys.conditioning.layers)


def test_the_mean_is_that_of_keys_before_their_rotation(llama: LoadedModel) -> None:
    """Computed by hand in the first layer, whose input is the embedding."""
    model = llama.hf_model.model
    with torch.inference_mode():
        hidden = model.embed_tokens(torch.tensor(TEXT))
        layer = model.layers[0]
        keys = layer.self_attn.k_proj(layer.input_layernorm(hidden)).double()
    shape = llama.geometry.num_kv_heads, llama.geometry.head_dim
    found = calibrate_keys(llama, TEXT)
    mean, deviation = found["layers.0.key_mean"], found["layers.0.key_deviation"]
    torch.testing.assert_close(mean.double(), keys.mean(0).view(shape), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        deviation.double(), keys.std(0, correction=0).view(shape), atol=1e-4, rtol=1e-3
    )


def test_stored_keys_lack_their_mean(llama: LoadedModel) -> None:
    """What the mean was made for: seen again, conditioned keys have none."""
    before = calibrate_keys(llama, TEXT)
    mean = before["layers.0.key_mean"]
    keys = conditioned(llama, before)
    llama.folding.use(keys.folds)
    try:
        bias = llama.hf_model.model.layers[0].self_attn.k_proj.bias
        assert bias is not None
        torch.testing.assert_close(bias.view_as(mean), -mean)
    finally:
        llama.folding.use(None)
    assert llama.hf_model.model.layers[0].self_attn.k_proj.bias is None


def test_older_statistics_outlive_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.safetensors"
    fill_disk(monkeypatch, path)
    with pytest.raises(RunError, match="No space left"):
        save_statistics({"mean": torch.zeros(2), METADATA: {"model": "a"}}, path)
    assert path.read_text() == "old"


def test_a_file_gives_what_the_mapping_gives(llama: LoadedModel, tmp_path: Path) -> None:
    entries = calibrate_keys(llama, TEXT)
    path = tmp_path / "keys.safetensors"
    save_statistics(entries, path)
    assert set(load_file(path)) == set(entries) - {METADATA}
    from_file = read_key_calibration(llama, str(path))
    from_mapping = read_key_calibration(llama, entries)
    assert from_file is not None and from_mapping is not None
    assert from_file.identity == from_mapping.identity
    entries["layers.0.key_mean"] += 1
    changed = read_key_calibration(llama, entries)
    assert changed is not None and changed.identity != from_file.identity


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: e.pop("layers.1.key_mean"), "layers.1.key_mean: got 'missing'"),
        (lambda e: e.update({"layers.9.key_mean": torch.ones(1)}), "layers.9.key_mean"),
        (lambda e: e["layers.0.key_mean"].fill_(float("nan")), "NaN or infinity"),
        (lambda e: e["layers.0.key_deviation"].fill_(-1.0), "0 or more"),
        (lambda e: e.update({"layers.0.key_mean": torch.ones(1, 1)}), "layers.0.key_mean"),
        (lambda e: e.update({"layers.0.key_mean": e["layers.0.key_mean"].half()}), "float32"),
        (lambda e: e[METADATA].update(model="another"), "keys of the model another"),
        (lambda e: e.pop(METADATA), "not said"),
    ],
    ids=["missing", "unknown", "nan", "negative", "shape", "type", "model", "no-model"],
)
def test_statistics_that_do_not_fit_are_refused(
    llama: LoadedModel, spoil: Any, message: str
) -> None:
    entries = calibrate_keys(llama, TEXT)
    spoil(entries)
    with pytest.raises(UsageError, match="key_calibration") as caught:
        read_key_calibration(llama, entries)
    assert message in str(caught.value)


def test_no_file_and_too_short_a_text_are_refused(llama: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="key_calibration"):
        read_key_calibration(llama, str(tmp_path / "absent.safetensors"))
    with pytest.raises(UsageError):
        calibrate_keys(llama, TEXT[:1])
    with pytest.raises(UsageError, match="key_offset_layers"):
        CacheConfig(key_calibration={}, key_offset_layers="none")


@pytest.mark.parametrize("granularity", ["layer", "head", "channel"])
def test_static_scales_of_a_text_clip_nothing_of_it(llama: LoadedModel, granularity: str) -> None:
    """Dividing by twice the scale that they give would, so the bound is tight."""
    config = CacheConfig(
        kv_cache_dtype=f"int8/{granularity}/static", pair_scaling=False, key_offset_layers="none"
    )
    scales = calibrate_scales(llama, config, TEXT)
    counted = {"layer": 1, "head": llama.geometry.num_kv_heads}
    counted["channel"] = counted["head"] * llama.geometry.head_dim
    for layer in range(llama.geometry.num_layers):
        for side in ("key", "value"):
            scale = scales[f"layers.{layer}.{side}_scale"]
            assert scale.numel() == counted[granularity]
            assert torch.isfinite(scale).all() and (scale > 0).all()
    value = _values_of_first_layer(llama)
    steps = value.abs() / scales["layers.0.value_scale"].view(
        *{"layer": (1, 1), "head": (-1, 1), "channel": value.shape[1:]}[granularity]
    )
    assert steps.max().item() == pytest.approx(127, abs=0.01)
    # what the cache then takes
    CacheConfig(kv_cache_dtype=f"int8/{granularity}/static", kv_cache_scales=scales)


def _values_of_first_layer(weights: LoadedModel) -> torch.Tensor:
    model = weights.hf_model.model
    with torch.inference_mode():
        hidden = model.layers[0].input_layernorm(model.embed_tokens(torch.tensor(TEXT)))
        values: torch.Tensor = model.layers[0].self_attn.v_proj(hidden)
    return values.view(len(TEXT), weights.geometry.num_kv_heads, weights.geometry.head_dim)


def test_scales_are_made_of_static_formats_only(llama: LoadedModel) -> None:
    with pytest.raises(UsageError, match="scale_type"):
        calibrate_scales(llama, CacheConfig(kv_cache_dtype="int8"), TEXT)
    with pytest.raises(UsageError, match="scale_type"):
        CacheConfig(kv_cache_dtype="int8", kv_cache_scales={"layers.0.key_scale": 1})


def test_the_calibration_text_is_long_enough_and_not_the_text_of_evaluations() -> None:
    text = calibration_text(None, 200).content
    assert len(text) >= 1000
    from pydoc_data.topics import topics

    assert text[:200] not in "".join(topics.values())


def test_static_scales_of_keys_hold_them_at_positions_beyond_the_text(tmp_path: Path) -> None:
    """Rotation moves a pair's size from one channel to the other as positions grow."""
    llama = load_uneven(tmp_path, **MODELS["llama"])
    config = CacheConfig(
        kv_cache_dtype="int8/channel/static", pair_scaling=False, key_offset_layers="none"
    )
    shape = llama.geometry.num_kv_heads, llama.geometry.head_dim
    largest = 127 * calibrate_scales(llama, config, TEXT[:3])["layers.0.key_scale"].view(shape)
    model = llama.hf_model.model
    with torch.inference_mode():
        layer = model.layers[0]
        hidden = layer.input_layernorm(model.embed_tokens(torch.tensor(TEXT[:3])))
        keys = layer.self_attn.k_proj(hidden).view(3, *shape)
        positions = torch.arange(200)
        cosine, sine = (x[0, :, None, None] for x in model.rotary_emb(keys, positions[None]))
        first, second = keys.chunk(2, -1)
        turned = keys * cosine + torch.cat((-second, first), -1) * sine  # [P, T, N, D]
    assert (turned.abs().amax((0, 1)) <= largest * (1 + 1e-5)).all()
