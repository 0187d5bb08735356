"""Key conditioning: what is decided, what is folded into the weights, and that it comes out."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conditioned_models import (
    MODELS,
    formats_of,
    greedy,
    load_foreign,
    load_uneven,
    plan,
    random_tokens,
    run_in_chunks,
)

from ascend_kv.config import CacheConfig
from ascend_kv.errors import UsageError
from ascend_kv.geometry import format_spec
from ascend_kv.integrations.key_folding import WeightFolding
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.key_weights import pair_norms, pair_partners
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.planted_model import PLANTED_LAYERS, make_planted_model
from ascend_kv.llm import LLM
from ascend_kv.user_values import from_mapping

TOKENS = random_tokens(48)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_planted_model(tmp_path_factory.mktemp("planted")))


@pytest.fixture
def qwen2(tmp_path: Path) -> LoadedModel:
    return load_uneven(tmp_path, **MODELS["qwen2"])


def state(weights: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in weights.hf_model.state_dict().items()}


def assert_as_loaded(weights: LoadedModel, before: dict[str, torch.Tensor]) -> None:
    weights.folding.use(None)
    for name, x in weights.hf_model.state_dict().items():
        assert x.dtype == before[name].dtype, name
        assert torch.equal(x, before[name]), name


def make_llm(weights: LoadedModel, **options: Any) -> LLM:
    options = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 22} | options
    return LLM(weights.path, weights=weights, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_pair_scaling_changes_no_bit_of_the_logits(name: str, dtype: str, tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, dtype, **MODELS[name])
    keys = plan(weights, pair_scaling=True, key_offset_layers="none")
    low, high = keys.conditioning.exponent_range
    assert keys.conditioning.scaled_layers == tuple(range(weights.geometry.num_layers))
    assert low <= -1 and high >= 1
    assert keys.conditioning.rounded_weights == 0
    plain = run_in_chunks(weights, None, TOKENS)
    scaled = run_in_chunks(weights, keys, TOKENS)
    if name == "gemma3":  # its norms add 1 to their weight, in float32
        eps = torch.finfo(getattr(torch, dtype)).eps
        assert (plain - scaled).abs().max() <= 4 * eps * plain.abs().max()
    else:
        assert torch.equal(plain, scaled)
    assert plain.float().std() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, "bfloat16", **MODELS[name])
    before = state(weights)
    plans = [
        plan(weights, pair_scaling=scaling, key_offset_layers=offsets)
        for scaling in (True, False)
        for offsets in ("all", "none")
    ]
    assert_as_loaded(weights, before)
    changed = 0
    for keys in plans * 2:
        weights.folding.use(keys.folds)
        now = weights.hf_model.state_dict()
        changed += any(not torch.equal(now[name], x) for name, x in before.items())
    assert changed == 2 * (3 if "qwen2" in name else 2)
    assert_as_loaded(weights, before)


def test_keys_become_equally_large_and_scales_are_powers_of_two(qwen2: LoadedModel) -> None:
    keys = plan(qwen2, pair_scaling=True, key_offset_layers="none")
    for fold in keys.folds.values():
        size = pair_norms(fold.weights.bias, 8) + 3 * pair_norms(fold.weights.own, 8)
        scaled = size / 2.0**fold.exponents
        assert size.max() / size.min() > 4
        assert scaled.max() / scaled.min() <= 2 * (1 + 1e-6)
        assert torch.equal(fold.exponents[:, :4], fold.exponents[:, 4:])


def test_the_size_of_a_channel_counts_the_norm_before_it(qwen2: LoadedModel) -> None:
    layer = qwen2.hf_model.model.layers[0]
    layer.input_layernorm.weight.uniform_(0.2, 3.0)
    fold = plan(qwen2, pair_scaling=True).folds[0]
    rows = layer.self_attn.k_proj.weight * layer.input_layernorm.weight
    assert torch.allclose(fold.weights.own.flatten(), rows.norm(dim=1), rtol=1e-4)
    assert torch.equal(fold.weights.bias.flatten(), layer.self_attn.k_proj.bias)


def test_an_interrupted_fold_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_uneven(tmp_path, **MODELS["qwen2"])
    before = state(weights)
    folds = plan(weights, pair_scaling=True).folds
    assert len(folds) > 1
    apply, done = WeightFolding._apply, []

    def interrupted(folding: WeightFolding, fold: Any) -> None:
        if done:
            raise KeyboardInterrupt
        apply(folding, fold)
        done.append(fold)

    with monkeypatch.context() as patch:
        patch.setattr(WeightFolding, "_apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.folding.use(folds)
    weights.folding.use(None)
    assert_as_loaded(weights, before)


def test_float16_stays_in_its_range_and_comes_back(tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, "float16", **MODELS["qwen2"])
    attention = weights.hf_model.model.layers[1].self_attn
    attention.k_proj.weight.mul_(2.0**-10)  # root mean square 1e-4, the smallest normal 6e-5
    free = plan(weights, pair_scaling=True).folds[0].exponents
    weights.hf_model.model.layers[0].self_attn.q_proj.weight.mul_(2.0**-10)
    before = state(weights)
    keys = plan(weights, pair_scaling=True, key_offset_layers="none")
    assert free.min() < 0 < free.max()
    exponents = keys.folds[1].exponents
    assert exponents.max() == 0 and exponents.min() < 0  # those keys may grow only
    assert torch.equal(keys.folds[0].exponents, free.clamp(min=0))  # nor may those queries shrink
    assert keys.conditioning.rounded_weights > 0
    weights.folding.use(keys.folds)
    for name, x in weights.hf_model.state_dict().items():
        assert x.isfinite().all()
        if "k_proj.weight" in name or "q_proj.weight" in name:
            rms, loaded = (y.float().square().mean(1).sqrt() for y in (x, before[name]))
            assert (rms >= loaded.clamp(max=2.0**-14)).all(), name
    weights.folding.use(None)
    plain = run_in_chunks(weights, None, TOKENS).float()
    scaled = run_in_chunks(weights, keys, TOKENS).float()
    assert (plain - scaled).abs().max() < 0.02 * plain.std()
    assert_as_loaded(weights, before)


def test_models_that_share_weights_take_turns(qwen2: LoadedModel) -> None:
    prompts = [TOKENS[:17], TOKENS[20:31]]
    choices: list[dict[str, Any]] = [
        {"kv_cache_dtype": "int8"},
        {},
        {"kv_cache_dtype": "int8", "pair_scaling": False, "key_offset_layers": "all"},
        {"pair_scaling": True, "key_offset_layers": [0, -1]},
    ]
    alone = [greedy(make_llm(qwen2, **options), prompts, 12) for options in choices]
    llms = [make_llm(qwen2, **options) for options in choices]
    for number, llm in enumerate(llms):
        for i, prompt in enumerate(prompts):
            llm.engine.add_request(f"{number}.{i}", prompt, greedy_params())
    tokens: dict[str, list[int]] = {}
    while any(llm.has_unfinished_requests() for llm in llms):
        for llm in llms:  # step by step, so that every step finds the weights of another
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
    assert [[tokens[f"{n}.{i}"] for i in range(2)] for n in range(len(llms))] == alone


def greedy_params() -> Any:
    from ascend_kv import SamplingParams

    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_defaults_follow_the_formats(qwen2: LoadedModel) -> None:
    skipped = make_llm(qwen2, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[1])
    assert skipped.conditioning.scaled_layers == (0, 2)
    assert skipped.conditioning.layers[1].scaling_reason == "float32 channels share no scale"
    assert make_llm(qwen2).conditioning.identity == ""
    off = make_llm(qwen2, kv_cache_dtype="int8", pair_scaling=False, key_offset_layers="none")
    assert off.conditioning.scaled_layers == off.conditioning.offset_layers == ()
    assert off.conditioning.layers[0].scaling_reason == "switched off"
    config = {"kv_cache_dtype": "int8", "pair_scaling": False, "key_offset_layers": [2]}
    llm = make_llm(qwen2, kv_cache_config=config)
    assert llm.conditioning.scaled_layers == ()
    assert llm.conditioning.offset_layers == (2,)


def test_auto_takes_the_offset_in_the_planted_layers_alone(planted: LoadedModel) -> None:
    unscaled = plan(planted, "int8", pair_scaling=False).conditioning
    assert unscaled.offset_layers == PLANTED_LAYERS
    assert plan(planted, "int8").conditioning.offset_layers == PLANTED_LAYERS
    assert plan(planted).conditioning.offset_layers == ()
    assert "above 8" in unscaled.layers[0].offset_reason
    assert "at most 8" in unscaled.layers[1].offset_reason
    mixed = [format_spec("int8")] + [format_spec("float32")] * 3
    assert condition_keys(planted, mixed).conditioning.offset_layers == (0,)


def test_with_scaled_pairs_int8_stands_a_bias_that_it_does_not_stand_without(
    tmp_path: Path,
) -> None:
    weights = load_model(make_planted_model(tmp_path, bias_norm=120.0))
    assert plan(weights, "int8").conditioning.offset_layers == ()
    assert plan(weights, "int8", pair_scaling=False).conditioning.offset_layers == PLANTED_LAYERS


def test_the_record_tells_the_cost_and_can_be_written_down(planted: LoadedModel) -> None:
    record = plan(planted, "int8", key_offset_layers=[0, 2, 3]).conditioning
    assert record.offset_bytes == 3 * 2 * 32 * 4
    assert record.table_position_bytes == 16 * 2 * 4
    assert record.score_bias_bytes == 3 * 4 * 4
    assert record.layers[0].bias_share > 50 > 1 > record.layers[1].bias_share
    assert record.layers[0].offset_norm * 2.0 ** record.layers[0].highest_exponent >= 480
    assert str(record).endswith("in 4 of 4 layers, key offset in layers [0, 2, 3]")
    assert asdict(record)["layers"][3]["offset_reason"] == "asked for"
    others = [plan(planted, "int8"), plan(planted, "int8", key_offset_layers="none")]
    identities = [record.identity, *(keys.conditioning.identity for keys in others)]
    assert len(set(identities)) == 3
    again = plan(planted, "int8", key_offset_layers=(0, 2, -1))
    assert again.conditioning.identity == record.identity


def test_a_plan_is_made_once(planted: LoadedModel) -> None:
    assert plan(planted, "int8", key_offset_layers=[0]) is plan(
        planted, "int8", key_offset_layers=(-4,)
    )


@pytest.mark.parametrize("rotary_dim", [8, 4, 0])
def test_pairs_of_a_partial_rotary_embedding(rotary_dim: int) -> None:
    partners = pair_partners(8, rotary_dim).tolist()
    expected = {
        8: [4, 5, 6, 7, 0, 1, 2, 3],
        4: [2, 3, 0, 1, 4, 5, 6, 7],
        0: [0, 1, 2, 3, 4, 5, 6, 7],
    }
    assert partners == expected[rotary_dim]
    x = torch.arange(1.0, 9.0)
    norms = pair_norms(x, rotary_dim)
    for c, p in enumerate(partners):
        want = x[c] if p == c else (x[c] ** 2 + x[p] ** 2).sqrt()
        assert torch.isclose(norms[c], want)


def partial_rotary() -> LoadedModel:
    config = transformers.PhiConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    weights = load_foreign(config, kv_heads=3, head_dim=16)
    for layer in weights.hf_model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.q_proj):
            generator = torch.Generator().manual_seed(2)
            projection.weight.mul_(4 ** (2 * torch.rand(48, 1, generator=generator) - 1))
            projection.bias.normal_(0, 2.0)
    return weights


def test_channels_that_are_not_rotated_are_scaled_one_by_one() -> None:
    weights = partial_rotary()
    keys = plan(weights, "int8", key_offset_layers="all")
    assert keys.conditioning.scaled_layers == (0, 1)
    for fold in keys.folds.values():
        rotated, free = fold.exponents[:, :8], fold.exponents[:, 8:]
        assert torch.equal(rotated[:, :4], rotated[:, 4:])
        assert not torch.equal(free[:, :4], free[:, 4:])
        size = fold.weights.bias.abs() + 3 * fold.weights.own
        assert (size / 2.0**fold.exponents)[:, 8:].log2().std() < size[:, 8:].log2().std() / 2
    assert keys.conditioning.offset_layers == ()
    assert "only 8 of its channels are rotated" in keys.conditioning.layers[0].offset_reason
    plain = run_in_chunks(weights, None, TOKENS)
    assert torch.equal(run_in_chunks(weights, keys, TOKENS), plain)


def test_a_model_with_other_pairs_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.CohereConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=128,
        attention_bias=True,
    )
    weights = load_foreign(config, kv_heads=1, head_dim=16)
    for layer in weights.hf_model.model.layers:
        layer.self_attn.k_proj.bias.normal_(0, 3.0)
    before = state(weights)
    with caplog.at_level(logging.WARNING):
        record = plan(weights, "int8", key_offset_layers="all").conditioning
    assert record.scaled_layers == record.offset_layers == ()
    assert record.identity == ""
    assert "scores change" in record.layers[0].scaling_reason
    assert "scores change" in caplog.text
    assert_as_loaded(weights, before)
    for demand in ({"pair_scaling": True}, {"key_offset_layers": [1], "pair_scaling": False}):
        with pytest.raises(UsageError, match="scores change"):
            plan(weights, "int8", **demand)


@pytest.mark.parametrize(
    ("name", "reason"), [("llama", "no key bias"), ("qwen3", "pass a norm after the bias")]
)
def test_models_without_an_offset_say_why(name: str, reason: str, tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, **MODELS[name])
    record = plan(weights, "int8", key_offset_layers="all").conditioning
    assert record.offset_layers == ()
    assert {reason in layer.offset_reason for layer in record.layers} == {True}


def test_projections_of_another_kind_are_named(qwen2: LoadedModel) -> None:
    attention = qwen2.hf_model.model.layers[1].self_attn
    attention.extra_norm = torch.nn.LayerNorm(8)
    record = plan(qwen2, "int8").conditioning
    assert record.scaled_layers == (0, 2)
    assert record.layers[1].scaling_reason == "norms extra_norm in its attention"
    with pytest.raises(UsageError, match="pair_scaling: got True.*Layer 1: norms extra_norm"):
        condition_keys(qwen2, formats_of(qwen2), True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pair_scaling": "always"}, "pair_scaling"),
        ({"pair_scaling": 1}, "pair_scaling"),
        ({"key_offset_layers": "some"}, "key_offset_layers"),
        ({"key_offset_layers": 3}, "key_offset_layers"),
        ({"key_offset_layers": [0, "1"]}, "key_offset_layers"),
        ({"key_offset_layers": [True]}, "key_offset_layers"),
        ({"key_offset_layers": [3]}, "key_offset_layers"),
        ({"key_offset_layers": [-4]}, "key_offset_layers"),
    ],
)
def test_bad_values_are_refused_by_name(
    qwen2: LoadedModel, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_llm(qwen2, **options)
    assert caught.value.field == field
    assert caught.value.legal


def test_a_recipe_says_it_in_yaml() -> None:
    config = from_mapping(CacheConfig, {"pair_scaling": False, "key_offset_layers": [1, -1]}, "r")
    assert config == CacheConfig(pair_scaling=False, key_offset_layers=(1, -1))
    assert from_mapping(CacheConfig, {"pair_scaling": "auto"}, "r").pair_scaling == "auto"
    with pytest.raises(
        UsageError, match="r: pair_scaling: got 'on'; legal: true or false, or auto"
    ):
        from_mapping(CacheConfig, {"pair_scaling": "on"}, "r")
    with pytest.raises(UsageError, match="r: key_offset_layers: got 'most'; legal: auto, all"):
        from_mapping(CacheConfig, {"key_offset_layers": "most"}, "r")
