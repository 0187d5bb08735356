"""Attention over keys that are stored without their bias, against the float64 oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import transformers
from attention_calls import NATIVE, bits_of
from compare import assert_as_good, assert_within
from conditioned_models import MODELS, greedy, load_uneven, plan, random_tokens, run_in_chunks

from ascend_kv import ops
from ascend_kv.cache.paged import LayerCache
from ascend_kv.evaluate.planted_bias import measure_planted_bias
from ascend_kv.formats.hadamard import rotate
from ascend_kv.integrations import key_offset
from ascend_kv.integrations.key_offset import (
    KeyOffset,
    Rotation,
    cut_calls,
    find_rotation,
    holds_rotation,
    make_rotary_table,
)
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.planted_model import make_planted_model
from ascend_kv.llm import LLM

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
TOKENS = random_tokens(48, 128)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_planted_model(tmp_path_factory.mktemp("planted")))


def make_offset(positions: int, evenly: bool = False) -> KeyOffset:
    """A large offset in the slowest pair, as models have it, and a table of real angles.

    One head lacks nothing in a pair. ``evenly``: it is known that the angles grow so.
    """
    frequencies = 1e6 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2))
    angles = torch.arange(positions)[:, None] * frequencies
    offset = torch.randn(KV_HEADS, DIM)
    offset[:, [3, 7]] *= 300.0
    offset[0, [1, 5]] = 0.0
    table = torch.stack((angles.cos(), angles.sin()), -1) * 1.25
    rotation = Rotation(frequencies, 1.25) if evenly else None
    return KeyOffset({1: offset}, table.float(), rotation)


def make_cache(kind: str, blocks: int) -> LayerCache:
    shape = (blocks, KV_HEADS, BLOCK, DIM)
    if kind == "float32":
        return LayerCache(torch.randn(shape), torch.randn(shape))
    codes = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(shape[:3]) / 50 for _ in range(2)]
    return LayerCache(*codes, *scales)


def oracle_attention(
    offset: KeyOffset,
    query: torch.Tensor,
    cache: LayerCache,
    tables: list[list[int]],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    window: int,
    dtype: type,
) -> np.ndarray:
    """Query by query over keys that have their offset, with the loops of the oracle."""
    lacks, table = (x.double().numpy() for x in offset.load_arguments(1).values())

    def side(x: torch.Tensor, scale: torch.Tensor | None) -> oracle.PagedSide:
        return oracle.PagedSide(x.numpy(), None if scale is None else scale.numpy())

    bits = oracle.Bits(bits_of(cache.key, None), bits_of(cache.value, None))
    output = np.zeros(query.shape)
    start = 0
    for row, (count, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        keys = oracle.read_sequence(side(cache.key, cache.key_scale), tables[row], cached)
        values = oracle.read_sequence(side(cache.value, cache.value_scale), tables[row], cached)
        for n in range(KV_HEADS):
            for j in range(cached):
                keys[n, j] += oracle.rotate(lacks[n], j, table)
        visible = oracle.Visible(window=window)
        for i in range(count):
            seen = [j for j in range(cached) if visible(cached - count + i, j)]
            for h in range(HEADS):
                output[start + i, h], _ = oracle.attend_one(
                    query[start + i, h].numpy(),
                    keys[h // (HEADS // KV_HEADS)],
                    values[h // (HEADS // KV_HEADS)],
                    DIM**-0.5,
                    seen,
                    [0.0] * len(seen),
                    None,
                    dtype,
                    bits if dtype is np.float32 else oracle.EXACT,
                )
        start += count
    return output


@pytest.mark.parametrize(
    "most_elements", [None, 1 << 24, HEADS * 40, 1], ids=["no bias", "one", "some", "each"]
)
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_equals_the_oracle(
    kind: str, window: int, most_elements: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most_elements is None and not NATIVE:
        pytest.skip("without the native CPU operators there is a bias")
    monkeypatch.setattr(key_offset, "SCORE_BIAS_ELEMENTS", most_elements)
    query_lengths, kv_lengths = [1, 1, 7, 13, 0, 9], [17, 3, 7, 21, 5, 10]
    tables = [[9, 2, 5, 0, 7], [4], [1, 3], [9, 2, 6, 8, 11, 10], [4, 1], [9, 2, 12]]  # shared
    cache = make_cache(kind, 13)
    offset = make_offset(32, evenly=most_elements is None)
    query = torch.randn(31, HEADS, DIM)
    padded = torch.tensor([table + [-1] * (6 - len(table)) for table in tables])
    actual = offset.attend(1, query, cache, padded, query_lengths, kv_lengths, DIM**-0.5, window)
    exact, baseline = (
        oracle_attention(offset, query, cache, tables, query_lengths, kv_lengths, window, dtype)
        for dtype in (np.float64, np.float32)
    )
    assert_as_good(actual, exact, baseline)
    without, _ = ops.paged_attention(
        query, cache.key, cache.value, padded, query_lengths, kv_lengths, DIM**-0.5,
        window=window, **cache.scales,
    )  # fmt: skip
    assert (actual - without).abs().max() > 0.1


@pytest.mark.parametrize("evenly", [True, False])
def test_rotated_keys(evenly: bool) -> None:
    """The offset meets queries as they were before they were rotated as the keys are."""
    cache, offset = make_cache("float32", 13), make_offset(32, evenly)
    rotated = cache._replace(key=rotate(cache.key), rotated_keys=True)
    query = torch.randn(10, HEADS, DIM)
    tables = torch.tensor([[9, 2, 5, 0, 7], [4, 1, 3, -1, -1]])
    found, wanted = (
        offset.attend(1, query, x, tables, [1, 9], [17, 9], DIM**-0.5, 0) for x in (rotated, cache)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)  # scores of hundreds


def test_the_score_bias_is_what_scores_lack() -> None:
    offset = make_offset(50)
    query = torch.randn(5, HEADS, DIM)
    bias = offset.score_bias(1, query, 0.25, 37)
    lacks, table = (x.double().numpy() for x in offset.load_arguments(1).values())
    expected = np.zeros((5, HEADS, 37))
    for h in range(HEADS):
        for n in range(37):
            turned = oracle.rotate(lacks[h // 3], n, table)
            expected[:, h, n] = 0.25 * query[:, h].double().numpy() @ turned
    assert bias.shape == (5, HEADS, 37)
    assert_within(bias, expected, 4e-7 * np.abs(expected).max())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("most", [1, 17, 300, 10**6])
def test_calls_are_cut_in_order_and_within_bounds(heads: int, most: int) -> None:
    rng = random.Random(most)
    kv_lengths = [rng.randrange(1, 60) for _ in range(12)]
    query_lengths = [rng.choice([0, 1, 1, length]) for length in kv_lengths]
    calls = list(cut_calls(query_lengths, kv_lengths, heads, most))
    done = [0] * 12
    for call in calls:
        rows = [piece.row for piece in call]
        assert rows == list(range(rows[0], rows[-1] + 1))
        tokens = sum(piece.queries for piece in call)
        elements = tokens * heads * max(piece.kv_length for piece in call)
        assert elements <= most or tokens == 1
        for piece in call:
            done[piece.row] += piece.queries
            left = query_lengths[piece.row] - done[piece.row]
            assert piece.kv_length == kv_lengths[piece.row] - left
    assert done == query_lengths
    assert (len(calls) == 1) == (most == 10**6)


def test_cut_calls_of_nothing() -> None:
    assert list(cut_calls([], [], 4)) == []


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_load_and_fresh_keys_get_the_offset_back(kind: str) -> None:
    offset, cache = make_offset(16), make_cache(kind, 3)
    table = torch.tensor([[2, 0, 1]])
    bare, _ = ops.kv_cache_load(cache.key, cache.value, table, [11], **cache.scales)
    given = offset.load_arguments(1)
    loaded, _ = ops.kv_cache_load(cache.key, cache.value, table, [11], **cache.scales, **given)
    fresh = offset.give_back(1, bare[0].transpose(0, 1), torch.arange(11))
    lacks, angles = (x.double().numpy() for x in given.values())
    for n in range(KV_HEADS):
        for j in range(11):
            expected = bare[0, n, j].double().numpy() + oracle.rotate(lacks[n], j, angles)
            assert_within(loaded[0, n, j], expected, 1e-4)
            assert_within(fresh[j, n], expected, 1e-4)
    assert offset.load_arguments(0) == {}
    assert offset.give_back(0, fresh, torch.arange(11)) is fresh


@pytest.mark.parametrize("name", ["qwen2", "qwen2-yarn", "qwen2-linear"])
def test_the_table_holds_the_models_own_rotation(name: str, tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, **MODELS[name])
    embedding = weights.hf_model.model.rotary_emb
    table = make_rotary_table(embedding, 8, range(256))
    cosine, sine = embedding(torch.empty(0), torch.arange(256)[None])
    key = torch.randn(2, 8)
    turn = transformers.models.qwen2.modeling_qwen2.apply_rotary_pos_emb
    repeated = key[None, :, None].expand(1, 2, 256, 8)
    want, _ = turn(repeated, repeated, cosine, sine)
    offset = KeyOffset({0: key}, table)
    got = offset.give_back(0, torch.zeros(256, 2, 8), torch.arange(256))
    assert_within(got.transpose(0, 1), want[0], 1e-5)
    assert table[200].square().sum() == pytest.approx(4 * embedding.attention_scaling**2)
    assert (embedding.attention_scaling != 1) == (name == "qwen2-yarn")
    rotation = find_rotation(embedding)
    assert holds_rotation(table, range(256), rotation)
    off = torch.arange(4, dtype=torch.float64) == 1
    wrong = [
        rotation._replace(factor=rotation.factor * 1.0001),
        rotation._replace(frequencies=rotation.frequencies * (1 + 1e-5 * off)),
        rotation._replace(frequencies=rotation.frequencies[:3]),
    ]
    assert not any(holds_rotation(table, range(256), other) for other in wrong)


@torch.inference_mode()
def float64_logits(weights: LoadedModel, tokens: list[int]) -> torch.Tensor:
    weights.folding.use(None)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        weights.path, dtype=torch.float64, attn_implementation="eager"
    )
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("scaling", [False, True], ids=["offset", "both"])
@pytest.mark.parametrize(
    "chunks", [[48], [1] * 48, [21, 1, 1, 20, 5]], ids=["whole", "ones", "mixed"]
)
def test_logits_of_the_planted_model(
    planted: LoadedModel, chunks: list[int], scaling: bool
) -> None:
    keys = plan(planted, pair_scaling=scaling, key_offset_layers=[0, 2])
    exact = float64_logits(planted, TOKENS)
    plain = run_in_chunks(planted, None, TOKENS, chunks)
    conditioned = run_in_chunks(planted, keys, TOKENS, chunks)
    yardstick = (plain - exact).abs().max()
    assert yardstick < 0.01 < exact.std()
    assert (conditioned - exact).abs().max() <= 2 * yardstick
    assert not torch.equal(conditioned, plain)


@pytest.mark.parametrize("name", ["qwen2", "qwen2-yarn", "qwen2-linear"])
def test_logits_with_scaled_rotations(name: str, tmp_path: Path) -> None:
    weights = load_uneven(tmp_path, **MODELS[name])
    keys = plan(weights, pair_scaling=True, key_offset_layers="all")
    assert keys.conditioning.offset_layers == (0, 1, 2)
    tokens = random_tokens(90)
    plain = run_in_chunks(weights, None, tokens)
    conditioned = run_in_chunks(weights, keys, tokens, [50, 40])
    assert (conditioned - plain).abs().max() < 1e-3 * plain.std()


def test_bfloat16_keys_are_more_exact_without_their_bias(planted: LoadedModel) -> None:
    half: Any = transformers.AutoModelForCausalLM.from_pretrained(
        planted.path, dtype=torch.bfloat16, attn_implementation="ascend_kv"
    )
    half.requires_grad_(False)
    weights = planted._replace(hf_model=half, dtype="bfloat16", folding=type(planted.folding)(half))
    exact = float64_logits(planted, TOKENS)
    keys = plan(weights, key_offset_layers=[0, 2])
    plain, conditioned = (
        (run_in_chunks(weights, one, TOKENS) - exact).square().mean() for one in (None, keys)
    )
    assert conditioned < plain / 4


def make_llm(weights: LoadedModel, blocks: int = 64, **options: Any) -> LLM:
    formats_bytes = 2 * 4 * 2 * (32 + 4 if options.get("kv_cache_dtype") == "int8" else 128)
    return LLM(
        weights.path,
        weights=weights,
        skip_tokenizer_init=True,
        max_model_len=96,
        block_size=8,
        kv_cache_memory_bytes=blocks * 8 * formats_bytes,
        **options,
    )


# After these the most likely token is by 0.1 or more the most likely for 24 tokens.
PROMPTS = [
    random_tokens(length, 128, seed=seed) for length, seed in ((5, 4), (19, 2), (33, 4), (40, 7))
]


def test_greedy_tokens_survive_preemption(planted: LoadedModel) -> None:
    """Unquantized, so that only the offset can make a difference; it resumes by recomputing."""
    expected = greedy(make_llm(planted), PROMPTS, 24)
    roomy = make_llm(planted, key_offset_layers=[0, 2])
    assert greedy(roomy, PROMPTS, 24) == expected
    tight = make_llm(planted, 16, key_offset_layers=[0, 2], max_num_batched_tokens=16,
                     max_num_seqs=4)  # fmt: skip
    assert greedy(tight, PROMPTS, 24) == expected
    assert tight.engine.stats.preemptions > 0 == roomy.engine.stats.preemptions


def test_int8_gives_the_unquantized_tokens_with_conditioning_only(planted: LoadedModel) -> None:
    expected = greedy(make_llm(planted), PROMPTS, 24)
    conditioned = make_llm(planted, kv_cache_dtype="int8")
    assert conditioned.conditioning.offset_layers == (0, 2)
    assert greedy(conditioned, PROMPTS, 24) == expected
    bare = make_llm(planted, kv_cache_dtype="int8", pair_scaling=False, key_offset_layers="none")
    wrong = greedy(bare, PROMPTS, 24)
    assert all(ours != theirs for ours, theirs in zip(wrong, expected, strict=True))


def test_what_the_report_shows_of_the_planted_model() -> None:
    plain, bare, scaled, offset, both = measure_planted_bias(texts=3)
    assert plain.perplexity_ratio == plain.same_choices == 1
    assert bare.perplexity_ratio > 5
    assert 1.02 < scaled.perplexity_ratio < bare.perplexity_ratio / 5
    assert scaled.logit_error < bare.logit_error / 2
    for row in (offset, both):
        assert abs(row.perplexity_ratio - 1) < 0.01
        assert row.logit_error < 0.03
        assert row.same_choices > 0.95
    assert "in layers [0, 2]" in both.key_conditioning
