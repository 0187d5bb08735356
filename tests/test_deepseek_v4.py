"""DeepSeek-V4 on the compressed cache against transformers, in float32 and in every order."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_as_good, assert_within
from deepseek_models import FLASH_SCHEDULE, PRO_SCHEDULE, load_theirs, make_deepseek, their_logits
from deepseek_runs import BLOCKS, FLOAT32, Runner

from ascend_kv import ops
from ascend_kv.cache.compressed import PagedVectors
from ascend_kv.compressed_layers import CompressedFormats, GroupBlocks
from ascend_kv.errors import RunError, UnsupportedModelError
from ascend_kv.formats import INT8
from ascend_kv.integrations.deepseek_v4_attention import install
from ascend_kv.integrations.loading import load_model

Tensor = torch.Tensor
LENGTH = 290
TOLERANCE = 1e-5
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "flash": (FLASH_SCHEDULE, {}),
    "pro": (PRO_SCHEDULE, {"seed": 1}),
    "window only": (("window", "window"), {"sliding_window": 16}),
    "ratios": (("csa", "hca"), {"compress_rates": {
        "compressed_sparse_attention": 8, "heavily_compressed_attention": 12}}),
    "plain rope": (FLASH_SCHEDULE, {"rope_parameters": None}),
    "window 128": (("hca", "csa"), {"sliding_window": 128}),
}  # fmt: skip


def draw(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule, changes = MODELS[request.param]
    return make_deepseek(tmp_path_factory.mktemp("deepseek"), *schedule, **changes)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek(tmp_path_factory.mktemp("flash"))


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Any:
    return load_theirs(checkpoint)


def test_one_call(checkpoint: Path, theirs: Any) -> None:
    runner = Runner(checkpoint)
    for length in (1, 4, 127, 129, LENGTH):
        tokens = draw(length, length)
        ours = runner.step([("a", tokens)])["a"]
        assert_within(ours, their_logits(theirs, tokens), TOLERANCE)
        runner.release("a")
        runner.poison()


@pytest.mark.parametrize(
    "chunks",
    [[37, 1, 1, 90, 3, 128, 1, 1, 28], [127, 1, 1, 160, 1]],
)
def test_chunks(checkpoint: Path, theirs: Any, chunks: list[int]) -> None:
    tokens = draw(LENGTH)
    ours = Runner(checkpoint).in_chunks("a", tokens, chunks)
    assert_within(ours, their_logits(theirs, tokens), TOLERANCE)


def test_token_by_token(checkpoint: Path, theirs: Any) -> None:
    tokens = draw(140)
    ours = Runner(checkpoint).in_chunks("a", tokens, [1] * 140)
    assert_within(ours, their_logits(theirs, tokens), TOLERANCE)


def test_mixed_lengths_in_packed_batches(checkpoint: Path, theirs: Any) -> None:
    """Four sequences side by side, slots and blocks handed on from earlier ones."""
    runner = Runner(checkpoint)
    for seed in range(2):
        lengths = {"a": 2, "b": 131, "c": 70 + seed, "d": 260}
        sequences = {name: draw(n, n + seed) for name, n in lengths.items()}
        for name, logits in runner.mixed(sequences, seed).items():
            assert_within(logits, their_logits(theirs, sequences[name]), TOLERANCE)
            runner.release(name)


def smallest_gap(model: Any, token_ids: list[int], topk: int) -> tuple[Tensor, float]:
    """Their logits, and how near the last selected score is to the first that is not."""
    gaps = []

    def look(module: Any, inputs: Any, scores: Tensor) -> None:
        for position, row in enumerate(scores[0]):
            seen = row[: (position + 1) // 4].sort(descending=True).values
            if len(seen) > topk:
                gaps.append(float(seen[topk - 1] - seen[topk]))

    scorers = [block.self_attn.compressor.indexer.scorer for block in model.model.layers
               if block.self_attn.layer_type.startswith("compressed")]  # fmt: skip
    hooks = [scorer.register_forward_hook(look) for scorer in scorers]
    logits = their_logits(model, token_ids)
    for hook in hooks:
        hook.remove()
    assert gaps
    return logits, min(gaps)


@pytest.mark.parametrize("topk", [1, 6])
def test_a_small_topk_where_no_scores_tie(
    tmp_path: Path, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_deepseek(tmp_path, "csa", "hca", "csa", index_topk=topk, index_n_heads=16)
    theirs, tokens = load_theirs(model), draw(100, 5)
    expected, gap = smallest_gap(theirs, tokens, topk)
    assert gap > 1e-5, "another seed: here scores tie"
    assert_within(Runner(model).step([("a", tokens)])["a"], expected, TOLERANCE)
    ours = Runner(model).in_chunks("a", tokens, [17, 1, 1, 50, 1, 30])
    assert_within(ours, expected, TOLERANCE)
    others = {"a": tokens, "b": draw(40), "c": draw(77)}
    assert_within(Runner(model).mixed(others)["a"], expected, TOLERANCE)
    for name, value in (("indexer._KEY_TILE", 7), ("indexer._SCORE_ELEMENTS", 400),
                        ("step._PAGE_ELEMENTS", 500)):  # fmt: skip
        monkeypatch.setattr(f"ascend_kv.integrations.deepseek_v4_{name}", value)
    sizes: list[int] = []
    select = ops.select_topk

    def look(scores: Tensor, k: int, **rest: Any) -> Tensor:
        sizes.append(scores.numel())
        return select(scores, k, **rest)

    monkeypatch.setattr(ops, "select_topk", look)
    assert_within(Runner(model).mixed(others)["a"], expected, TOLERANCE)
    assert 25 < max(sizes) <= 400, "scores of some queries at a time, not of all"


def test_ties_go_to_the_lowest_entry_however_a_sequence_is_cut(tmp_path: Path) -> None:
    """One indexer head: half of all scores are exactly 0, and more than index_topk tie."""
    model = make_deepseek(tmp_path, "csa", "csa", index_topk=6, index_n_heads=1)
    tokens = draw(100)
    whole = Runner(model).step([("a", tokens)])["a"]
    for chunks in ([1] * 100, [50, 50], [7, 1, 92]):
        assert_within(Runner(model).in_chunks("a", tokens, chunks), whole, TOLERANCE)


def store_rounded(formats: CompressedFormats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an unquantized cache keep what an INT8 one would read back."""
    store = PagedVectors.store

    def rounded(vectors: PagedVectors, x: Tensor, slots: Tensor) -> None:
        entries = x.shape[1] == 24
        if (formats.entries if entries else formats.index_keys) == "int8":
            width = 16  # of 24 channels RoPE turns 8; indexer keys have 16
            codes = INT8.decode(INT8.encode(x[:, :width], (1,)), torch.float32)
            x = torch.cat((codes, x[:, width:]), 1)
        store(vectors, x, slots)

    monkeypatch.setattr(PagedVectors, "store", rounded)


@pytest.mark.parametrize(
    "formats",
    [
        CompressedFormats("float32", "int8", "float32"),
        CompressedFormats("float32", "float32", "int8"),
        CompressedFormats("float32", "int8", "int8"),
    ],
)
@pytest.mark.parametrize("topk", [6, 512])
def test_int8_is_the_attention_over_rounded_entries(
    tmp_path: Path, formats: CompressedFormats, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_deepseek(tmp_path, index_topk=topk, index_n_heads=16)
    tokens, others = draw(140), {"b": draw(77), "c": draw(5)}
    exact = Runner(model).step([("a", tokens)])["a"]
    whole = Runner(model, formats).step([("a", tokens)])["a"]
    selects_all = topk == 512 and formats.entries == "float32"
    assert (float((whole - exact).abs().max()) < TOLERANCE) is selects_all
    in_chunks = [
        Runner(model, formats).in_chunks("a", tokens, chunks)
        for chunks in ([100, *[1] * 30, 10], [9, 130, 1])
    ]
    in_chunks.append(Runner(model, formats).mixed({"a": tokens, **others})["a"])
    store_rounded(formats, monkeypatch)
    expected = Runner(model).step([("a", tokens)])["a"]
    for ours in (whole, *in_chunks):
        assert_within(ours, expected, TOLERANCE)


def test_int8_entries_keep_what_rope_turns_exact(flash: Path) -> None:
    runner = Runner(flash, CompressedFormats("float32", "int8", "int8"))
    exact = Runner(runner.loaded)
    tokens = draw(140)
    for one in (runner, exact):
        one.step([("a", tokens)])
    layer, plain = (one.cache.layers[2] for one in (runner, exact))
    slots = torch.arange(16)
    ours, theirs = (one.entries.read(slots, torch.float32) for one in (layer, plain))
    assert torch.equal(ours[:, 16:], theirs[:, 16:])
    step = theirs[:, :16].abs().amax(1, keepdim=True) / 127
    assert ((ours[:, :16] - theirs[:, :16]).abs() <= 0.51 * step).all()
    assert not torch.equal(ours, theirs)
    keys, plain_keys = (one.index_keys.read(slots, torch.float32) for one in (layer, plain))
    assert ((keys - plain_keys).abs() <= 0.51 * plain_keys.abs().amax(1, keepdim=True) / 127).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_err_no_more_than_transformers(flash: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    runner = Runner(load_model(flash, name), CompressedFormats(name, name, name))
    tokens = draw(200)
    logits = runner.in_chunks("a", tokens, [150, 1, 49])
    theirs = load_theirs(flash)
    exact = their_logits(theirs, tokens)
    assert logits.dtype == dtype
    assert_as_good(logits.float(), exact, their_logits(theirs.to(dtype), tokens).float())


@pytest.mark.parametrize(
    "formats", [FLOAT32, CompressedFormats("bfloat16", "int8", "int8")], ids=["float32", "int8"]
)
def test_allocated_bytes_are_the_geometrys(flash: Path, formats: CompressedFormats) -> None:
    runner = Runner(load_model(flash, formats.dtype), formats)
    layers = runner.loaded.geometry.compressed
    expected = layers.cache_bytes(BLOCKS, formats)
    assert runner.cache.bytes_by_group == expected
    assert runner.cache.allocated_bytes == sum(expected.values())
    assert all(count > 0 for count in expected.values())
    storages = {}
    for layer in runner.cache.layers:
        for part in (layer.ring, layer.state, layer.index_state, *(layer.entries or ()),
                     *(layer.index_keys or ())):  # fmt: skip
            if part is not None:
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    assert sum(storages.values()) == runner.cache.allocated_bytes


def test_a_plain_forward_is_refused(flash: Path) -> None:
    loaded = load_model(flash)
    with pytest.raises(RunError, match="compressed cache"):
        loaded.hf_model(input_ids=torch.tensor([[5]]))


def test_modules_that_are_at_odds_are_refused(flash: Path, caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    loaded = load_model(flash)
    layers = loaded.geometry.compressed
    blocks = loaded.hf_model.base_model.layers
    for kinds, field in (
        (layers.kinds[1:], "num_hidden_layers"),
        (("hca", *layers.kinds[1:]), "layers.0.self_attn.compressor"),
        ((*layers.kinds[:2], "window", *layers.kinds[3:]), "layers.2.self_attn.compressor"),
        ((*layers.kinds[:2], "hca", *layers.kinds[3:]), "layers.2.self_attn.compressor"),
    ):
        with pytest.raises(UnsupportedModelError) as error:
            install(loaded.hf_model, layers.__class__(kinds, 24, 8, 16, 512, 8))
        assert error.value.field == field
    del blocks[3].self_attn.compressor.gate_proj
    with pytest.raises(UnsupportedModelError, match="without gate_proj"):
        install(loaded.hf_model, layers)


def test_slots_and_blocks_have_no_memory(flash: Path) -> None:
    """A sequence gives the same logits in a slot, and blocks, that others have filled."""
    runner = Runner(flash, blocks=GroupBlocks(1, 20, 1, 16))
    tokens = draw(200)
    fresh = runner.step([("a", tokens)])["a"]
    for seed in (1, 2):
        runner.release("a" if seed == 1 else "x")
        runner.step([("x", draw(133 * seed, seed))])
    runner.release("x")
    assert torch.equal(runner.step([("b", tokens)])["b"], fresh)
