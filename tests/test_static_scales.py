"""Static scales and scales of groups: their files, what is refused, and models that run on them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conditioned_models import (
    BLOCK_SIZE,
    formats_of,
    greedy,
    load_uneven,
    plan,
    random_tokens,
    run_in_chunks,
    run_on_cache,
    scattered_blocks,
)
from safetensors.torch import save_file
from static_models import MAX_MODEL_LEN, Scales, make_llm, static

from ascend_kv import ops
from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.static_layer import StaticScales
from ascend_kv.cache.static_scales import load_static_scales
from ascend_kv.errors import UsageError
from ascend_kv.formats import INT8, reduced_dims
from ascend_kv.geometry import FormatSpec, format_spec
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm_engine import LLMEngine

TOKENS = random_tokens(41)


STATIC = ("layer", "head", "channel", "token", "token_head")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A Llama whose key channels differ in size: heads 6, KV heads 2, head_dim 8."""
    return load_uneven(tmp_path_factory.mktemp("llama"), model_type="llama")


def make_scales(
    weights: LoadedModel, granularity: str, symmetric: bool = True, pair_scaling: Any = True
) -> Scales:
    """Scales of what the model stores for TOKENS, the last position's for all later ones."""
    keys = plan(weights, pair_scaling=pair_scaling)
    table = scattered_blocks(len(TOKENS))
    cache = PagedKVCache(weights.geometry, formats_of(weights), len(table), BLOCK_SIZE)
    run_on_cache(weights, keys, TOKENS, cache)
    scales = {}
    for number, layer in enumerate(cache.layers):
        dense = ops.kv_cache_load(layer.key, layer.value, torch.tensor([table]), [len(TOKENS)])
        for side, x in zip(("key", "value"), dense, strict=True):
            encoded = INT8.encode(x, reduced_dims(granularity), symmetric)
            for name, y in (("scale", encoded.scale), ("zero_point", encoded.zero_point)):
                if y is not None:
                    later = MAX_MODEL_LEN - len(TOKENS) if "token" in granularity else 0
                    y = torch.cat((y, y[:, :, -1:].expand(-1, -1, later, -1)), 2)
                    scales[f"layers.{number}.{side}_{name}"] = y.contiguous()
    return scales


def with_metadata(weights: LoadedModel, scales: Scales, spec: FormatSpec) -> dict[str, Any]:
    keys = plan(weights, pair_scaling=True)
    return {**scales, "__metadata__": {"key_conditioning": keys.conditioning.identity}}


def logits(weights: LoadedModel, keys: Any, spec: FormatSpec, scales: Scales | None) -> Any:
    formats = [spec] * weights.geometry.num_layers
    identity = keys.conditioning.identity if keys else ""
    source = None if scales is None else {**scales, "__metadata__": {"key_conditioning": identity}}
    given = load_static_scales(source, weights.geometry, formats, MAX_MODEL_LEN, identity)
    blocks = len(scattered_blocks(len(TOKENS)))
    cache = PagedKVCache(weights.geometry, formats, blocks, BLOCK_SIZE, static_scales=given)
    return run_on_cache(weights, keys, TOKENS, cache, [17, 1, 1, 22]), cache


@pytest.mark.parametrize("granularity", STATIC)
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_the_text_itself_cost_little(
    weights: LoadedModel, granularity: str, symmetric: bool
) -> None:
    keys = plan(weights, pair_scaling=True)
    plain = run_in_chunks(weights, keys, TOKENS)
    scales = make_scales(weights, granularity, symmetric)
    got, cache = logits(weights, keys, static(granularity, symmetric), scales)
    most = 0.08 if granularity in ("layer", "head") else 0.05  # dynamic token_head: 0.03
    assert 0 < (got - plain).norm() / plain.norm() < most
    # with scales by position, what quantization changes in one layer clips in the next
    most = 0.2 if "token" in granularity else 0.02
    assert all(max(share) < most for share in cache.clipped_shares().values())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "token_head"])
def test_static_is_dynamic_where_the_scales_coincide(
    weights: LoadedModel, granularity: str, symmetric: bool
) -> None:
    keys = plan(weights, pair_scaling=True)
    expected, dynamic = logits(weights, keys, format_spec("int8", granularity, symmetric), None)
    table = torch.tensor(scattered_blocks(len(TOKENS)))
    scales = {}
    for number, layer in enumerate(dynamic.layers):
        for name, paged in layer.scales.items():
            if paged is not None:
                dense = paged[table].transpose(0, 1).flatten(1)[:, : len(TOKENS)]
                padding = torch.ones(len(dense), MAX_MODEL_LEN - len(TOKENS))
                scales[f"layers.{number}.{name}"] = torch.cat((dense, padding), 1)[None, ..., None]
    got, cache = logits(weights, keys, static(granularity, symmetric), scales)
    assert torch.equal(got, expected)
    last = len(TOKENS) % BLOCK_SIZE
    for ours, theirs in zip(cache.layers, dynamic.layers, strict=True):
        for x, y in zip(ours.block_tensors, theirs.block_tensors, strict=True):
            assert torch.equal(x[table[:-1]], y[table[:-1]])
            assert torch.equal(x[table[-1], :, :last], y[table[-1], :, :last])


@pytest.mark.parametrize("granularity", STATIC)
@pytest.mark.parametrize("symmetric", [True, False])
def test_each_token_is_stored_with_the_scale_of_its_position(
    weights: LoadedModel, granularity: str, symmetric: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    spec = static(granularity, symmetric)
    shape = spec.scale_shape(2, 8, 30)
    names = ["scale"] if symmetric else ["scale", "zero_point"]
    given = {
        f"{side}_{name}": torch.rand(shape, generator=generator) / 10 + 0.01
        for side in ("key", "value")
        for name in names
    }
    cache = PagedKVCache(weights.geometry, [spec] * 3, 5, 3, static_scales=[given] * 3)
    slots, positions = torch.tensor([14, 0, 7, 3]), torch.tensor([29, 0, 13, 13])
    tokens = dict(zip(("key", "value"), torch.randn(2, 4, 2, 8, generator=generator), strict=True))
    layer = cache.layers[1]
    layer.store(**tokens, slots=slots, positions=positions)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        for side, stored in (("key", layer.key), ("value", layer.value)):
            at = position if shape[2] > 1 else 0
            scale, zero = (
                given.get(f"{side}_{name}", torch.zeros(shape))[0, :, at].double()
                for name in ("scale", "zero_point")
            )
            steps = (tokens[side][row].double() - zero) / scale
            expected = steps.round().clamp(-127 if symmetric else -128, 127)
            assert (stored[slot // 3, :, slot % 3] - expected).abs().max() <= 1
            assert (stored[slot // 3, :, slot % 3] != expected).sum() <= 1  # a tie in float32
            if shape[2] > 1:
                paged = layer.scales[f"{side}_scale"][slot // 3, :, slot % 3]
                assert torch.equal(paged, scale[:, 0].float())


def test_groups_lose_no_more_than_whole_heads_where_channels_differ(weights: LoadedModel) -> None:
    plain = run_in_chunks(weights, None, TOKENS)

    def error(spec: FormatSpec) -> float:
        return float((logits(weights, None, spec, None)[0] - plain).norm() / plain.norm())

    errors = [error(format_spec("int8"))]
    for symmetric in (True, False):
        for size in (4, 2):
            errors.append(error(format_spec("int8", "group", symmetric, group_size=size)))
    whole, *groups = errors
    assert all(0 < group < whole for group in groups), errors
    assert min(groups) < 0.7 * whole, errors


@pytest.mark.parametrize("granularity", [*STATIC, "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_engine_runs_on_every_combination(
    weights: LoadedModel, granularity: str, symmetric: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"group_size": 2}
    if granularity != "group":
        path = tmp_path / "scales.safetensors"
        identity = plan(weights, pair_scaling=True).conditioning.identity
        # the whole layer's range, so that what is generated finds room
        shape = static(granularity, symmetric).scale_shape(2, 8, MAX_MODEL_LEN)
        whole = make_scales(weights, "layer", symmetric)
        scales = {name: scale.expand(shape).contiguous() for name, scale in whole.items()}
        save_file(scales, path, metadata={"key_conditioning": identity})
        options = {"scale_type": "static", "kv_cache_scales": path}
    llm = make_llm(weights, granularity=granularity, symmetric=symmetric, **options)
    plain = make_llm(weights, kv_cache_dtype="auto")
    prompts = [TOKENS[:20], TOKENS[5:12], TOKENS[3:40]]
    pairs = [
        pair
        for x, y in zip(greedy(llm, prompts, 8), greedy(plain, prompts, 8), strict=True)
        for pair in zip(x, y, strict=True)
    ]
    assert sum(x == y for x, y in pairs) >= 12
    # the budget holds the blocks and, once, the static scales
    block_bytes = llm.geometry.block_bytes(llm.formats, llm.block_size)
    static_bytes = llm.geometry.static_bytes(llm.formats, MAX_MODEL_LEN)
    assert llm.cache.num_blocks == ((1 << 20) - static_bytes) // block_bytes
    assert llm.cache.allocated_bytes == llm.cache.num_blocks * block_bytes + static_bytes
    assert str(llm.formats[0]).startswith(f"int8/{granularity}")


def test_results_do_not_depend_on_the_batch(weights: LoadedModel) -> None:
    spec = static("token_head")
    scales = with_metadata(weights, make_scales(weights, "token_head"), spec)
    llm = make_llm(weights, scale_type="static", kv_cache_scales=scales, max_num_batched_tokens=64)
    prompts = [TOKENS[:9], TOKENS[2:33], TOKENS[30:]]
    together = greedy(llm, prompts, 6)
    assert together == [greedy(llm, [prompt], 6)[0] for prompt in prompts]


def test_what_lies_beyond_is_clipped_counted_and_said_once(
    weights: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    scales = make_scales(weights, "head")
    scales["layers.1.value_scale"] = scales["layers.1.value_scale"] / 4
    source = with_metadata(weights, scales, static("head"))
    llm = make_llm(weights, granularity="head", scale_type="static", kv_cache_scales=source)
    with caplog.at_level(logging.WARNING):
        greedy(llm, [TOKENS], 2)
        greedy(llm, [TOKENS], 2)
    shares = llm.cache.clipped_shares()
    assert list(shares) == [0, 1, 2]
    assert 0.01 < shares[1].value < 1 and shares[1].key < 0.01
    assert max(shares[0]) < 0.01
    assert caplog.text.count("static scales clip") == 1
    assert "layer 1" in caplog.text


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_count_is_that_of_the_codes_at_their_ends(symmetric: bool) -> None:
    spec = static("layer", symmetric)
    given = {name: torch.full((1, 1, 1, 1), 2.0) for name in ("key_scale", "value_scale")}
    if not symmetric:
        given |= {f"{side}_zero_point": torch.ones(1, 1, 1, 1) for side in ("key", "value")}
    scales = StaticScales(spec, given)
    shift = 0.0 if symmetric else 1.0
    inside = [2 * 127.49 + shift, -2 * 127.49 + shift]
    beyond = [2 * 127.51 + shift, 1e30, -1e30, -2 * 128.51 + shift]
    # -127.51 rounds to -128, a code of asymmetric INT8 only
    between = [-2 * 127.51 + shift]
    key = torch.tensor(inside + beyond + between).view(1, 1, 7)
    scales.count(key, torch.zeros(1, 1, 7), torch.zeros(1, dtype=torch.int64))
    assert scales.clipped_share == ((5 if symmetric else 4) / 7, 0.0)
    assert StaticScales(spec, given).clipped_share == (0.0, 0.0)
    lost = StaticScales(spec, given)  # where values are not looked at, NaN gets code 0
    lost.count(key * float("nan"), torch.zeros(1, 1, 7), torch.zeros(1, dtype=torch.int64))
    assert lost.clipped_share == (1.0, 0.0)


def test_conditioned_keys_want_scales_of_conditioned_keys(weights: LoadedModel) -> None:
    identity = plan(weights, pair_scaling=True).conditioning.identity
    scaled = make_scales(weights, "head")
    plain = make_scales(weights, "head", pair_scaling=False)
    options: dict[str, Any] = {"granularity": "head", "scale_type": "static"}
    with pytest.raises(UsageError) as caught:
        make_llm(weights, kv_cache_scales=plain, **options)
    assert caught.value.given == "scales for keys as the model makes them"
    assert caught.value.legal == f"scales for key conditioning {identity}"
    assert "pair_scaling false" in caught.value.hint
    labelled = {**scaled, "__metadata__": {"key_conditioning": identity}}
    with pytest.raises(UsageError, match=f"{identity}'; legal: scales for keys as the model"):
        make_llm(weights, kv_cache_scales=labelled, pair_scaling=False, **options)
    make_llm(weights, kv_cache_scales=labelled, **options)
    llm = make_llm(weights, kv_cache_scales=plain, pair_scaling=False, **options)
    assert llm.conditioning.identity == ""


def test_auto_leaves_keys_alone_whose_channels_have_scales_of_their_own(
    weights: LoadedModel,
) -> None:
    scales = make_scales(weights, "channel", pair_scaling=False)
    options: dict[str, Any] = {"scale_type": "static", "kv_cache_scales": scales}
    llm = make_llm(weights, granularity="channel", pair_scaling="auto", **options)
    record = llm.conditioning
    assert record.identity == ""
    assert "channel has a quantization scale" in record.layers[0].scaling_reason


def test_entries_of_skipped_layers_are_neither_needed_nor_refused(weights: LoadedModel) -> None:
    scales = make_scales(weights, "head", pair_scaling=False)
    options: dict[str, Any] = {
        "granularity": "head",
        "scale_type": "static",
        "pair_scaling": False,
        "kv_cache_dtype_skip_layers": [1],
    }
    for source in (scales, {k: v for k, v in scales.items() if not k.startswith("layers.1.")}):
        llm = make_llm(weights, kv_cache_scales=source, **options)
        assert [layer.static is None for layer in llm.cache.layers] == [False, True, False]
        assert list(llm.cache.clipped_shares()) == [0, 2]
        assert len(greedy(llm, [TOKENS[:5]], 3)[0]) == 3


def change(scales: Scales, name: str, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {**scales, name: value}
    return {name: x for name, x in changed.items() if x is not None}


SHAPE = (1, 2, 1, 1)


REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "a layer is missing": ("layers.2.key_scale", None, "missing", "float32 [1, 2, 1, 1]"),
    "a side is missing": ("layers.0.value_scale", None, "missing", "int8/head/static"),
    "half precision": ("layers.0.key_scale", torch.ones(SHAPE).half(), "float16", "float32"),
    "integers": ("layers.0.key_scale", torch.ones(SHAPE, dtype=torch.int32), "int32", "float32"),
    "no tensor": ("layers.0.key_scale", 0.5, "float", "torch.float32"),
    "another shape": ("layers.1.key_scale", torch.ones(1, 2, 1, 8), "[1, 2, 1, 8]", "[1, 2, 1, 1]"),
    "no dimensions": ("layers.1.key_scale", torch.ones(()), "[]", "[1, 2, 1, 1]"),
    "zero": ("layers.1.value_scale", torch.tensor([0.0, 1]).view(SHAPE), "0.0", "positive"),
    "negative": ("layers.1.value_scale", torch.tensor([1.0, -2]).view(SHAPE), "-2.0", "positive"),
    "NaN": ("layers.1.key_scale", torch.tensor([1.0, float("nan")]).view(SHAPE), "NaN", "finite"),
    "infinity": ("layers.1.key_scale", torch.full(SHAPE, float("inf")), "infinity", "finite"),
    "a layer too many": ("layers.3.key_scale", torch.ones(SHAPE), "layers.3", "0 to 2"),
    "another name": ("layers.0.k_scale", torch.ones(SHAPE), "layers.0.k_scale", "key_scale"),
    "a zero point": ("layers.0.key_zero_point", torch.ones(SHAPE), "zero_point", "symmetric true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_are_refused(weights: LoadedModel, case: str) -> None:
    name, value, given, legal = REFUSED[case]
    scales = {
        f"layers.{layer}.{side}_scale": torch.ones(SHAPE)
        for layer in range(3)
        for side in ("key", "value")
    }
    formats = [static("head")] * 3
    assert load_static_scales(scales, weights.geometry, formats, MAX_MODEL_LEN, "")
    with pytest.raises(UsageError) as caught:
        source = change(scales, name, value)
        load_static_scales(source, weights.geometry, formats, MAX_MODEL_LEN, "")
    assert "kv_cache_scales" in caught.value.field
    assert name in str(caught.value)
    assert given in str(caught.value.given)
    assert legal in caught.value.legal


def test_zero_points_are_wanted_where_codes_are_asymmetric(weights: LoadedModel) -> None:
    scales = make_scales(weights, "channel", symmetric=False)
    formats = [static("channel", False)] * 3
    given = load_static_scales(scales, weights.geometry, formats, MAX_MODEL_LEN, "")
    assert {*given[0]} == {"key_scale", "value_scale", "key_zero_point", "value_zero_point"}
    for value, message in ((None, "missing"), (torch.full((1, 2, 1, 8), float("nan")), "NaN")):
        with pytest.raises(UsageError, match=f"layers.1.value_zero_point: got '{message}"):
            source = change(scales, "layers.1.value_zero_point", value)
            load_static_scales(source, weights.geometry, formats, MAX_MODEL_LEN, "")


def test_a_table_by_position_is_long_enough_and_kept_no_longer(weights: LoadedModel) -> None:
    scales = make_scales(weights, "token_head")
    formats = [static("token_head")] * 3
    for kept in (MAX_MODEL_LEN, MAX_MODEL_LEN - 7):
        given = load_static_scales(scales, weights.geometry, formats, kept, "")
        assert given[0]["key_scale"].shape == (1, 2, kept, 1)
        assert torch.equal(given[0]["key_scale"], scales["layers.0.key_scale"][:, :, :kept])
        assert given[0]["key_scale"].untyped_storage().nbytes() == 2 * kept * 4
    with pytest.raises(UsageError, match=r"\[1, 2, 64, 1\]'?; legal: \[1, 2, 65, 1\].*more pos"):
        load_static_scales(scales, weights.geometry, formats, MAX_MODEL_LEN + 1, "")


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_files_that_cannot_be_read(
    weights: LoadedModel, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "scales.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        make_llm(weights, granularity="head", scale_type="static", kv_cache_scales=path)
    assert (caught.value.field, caught.value.given) == ("kv_cache_scales", str(path))


def test_static_scales_have_to_be_given(weights: LoadedModel) -> None:
    with pytest.raises(UsageError, match="kv_cache_scales: got None; legal: a file"):
        make_llm(weights, granularity="head", scale_type="static")
    with pytest.raises(UsageError, match="scale_type: got 'static'; legal: dynamic where no layer"):
        make_llm(weights, kv_cache_dtype="auto", granularity="head", scale_type="static")
    assert make_llm(weights, kv_cache_dtype="auto").cache.clipped_shares() == {}


def test_the_engine_takes_them_in_one_mapping(weights: LoadedModel) -> None:
    scales = make_scales(weights, "channel", pair_scaling=False)
    config = {
        "kv_cache_dtype": "int8",
        "granularity": "channel",
        "scale_type": "static",
        "kv_cache_scales": scales,
    }
    options: dict[str, Any] = {"weights": weights, "max_model_len": MAX_MODEL_LEN}
    options["skip_tokenizer_init"] = True
    engine = LLMEngine(weights.path, kv_cache_config=config, **options)
    assert engine.cache.layers[0].static is not None
    LLMEngine(weights.path, kv_cache_scales=scales, kv_cache_config=config, **options,
              scale_type="static")  # fmt: skip
    with pytest.raises(UsageError, match="kv_cache_config.kv_cache_scales"):
        LLMEngine(
            weights.path, kv_cache_scales={}, kv_cache_config=config, **options, scale_type="static"
        )
    groups = {"kv_cache_dtype": "int8", "granularity": "group", "group_size": 4}
    engine = LLMEngine(weights.path, kv_cache_config=groups, **options)
    assert engine.cache.layers[0].key_scale.shape[3] == 2
