"""INT4 keys by channel of a block, with an open block in 16 bits, against attention in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import oracle_formats
import pytest
import torch
from conditioned_models import greedy, load_uneven, random_tokens

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.cache.residual import Lacking, Pieces, ResidualLayer, cut_step
from ascend_kv.cache.residual_tables import ResidualTables
from ascend_kv.cache.tables import PagedTables
from ascend_kv.config import CacheConfig
from ascend_kv.devices import get_device
from ascend_kv.errors import UsageError
from ascend_kv.format_names import format_spec, layer_format
from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.key_offset import KeyOffset, Rotation
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.llm import LLM
from ascend_kv.resolved_cache import plan_blocks, resolve_block_size

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 6, 5
SCALE = 0.4
NAMES = [
    "int4/kivi",
    "k:int4/channel/symmetric+v:int8",
    "k:int4/channel/asymmetric+v:fp8",
    "k:int4/channel/asymmetric+v:int4/group2/asymmetric",
    "k:int4/channel/asymmetric+v:float16",
    "k:int4/channel/asymmetric+v:int4/asymmetric/hadamard",
]
CUTS = [[23], [1] * 23, [4, 1, 5, 13], [5, 5, 10, 3], [2, 21]]


def geometry_of(layers: int = 1) -> ModelGeometry:
    return ModelGeometry(
        "llama", layers, HEADS, KV_HEADS, DIM, 24, 97, 512, "float32", (None,) * layers
    )


def make_layer(name: str, blocks: int = 12, slots: int = 3, dtype: str = "float32") -> Any:
    """A layer whose memory holds NaN, and codes of no meaning, wherever nothing was written."""
    cache = PagedKVCache(
        geometry_of(), [layer_format(name)], blocks, SIZE, max_num_seqs=slots, model_dtype=dtype
    )
    layer = cache.layers[0]
    for tensor in (*layer.block_tensors, *layer.slot_tensors):
        tensor.fill_(math.nan if tensor.dtype.is_floating_point else 99)
    expected = geometry_of().cache_bytes([layer_format(name)], blocks, SIZE, 100, slots)
    assert cache.allocated_bytes == expected
    return layer


def random_text(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, HEADS, DIM, generator=generator)
    key = torch.randn(tokens, KV_HEADS, DIM, generator=generator)
    key[:, :, 1] += 40  # a channel that is large in every token
    return query, key, torch.randn(tokens, KV_HEADS, DIM, generator=generator)


def decoded(x: np.ndarray, name: str, granularity: str, symmetric: bool) -> np.ndarray:
    stored, scale, zero = oracle_formats.quantize(x, granularity, name, symmetric)
    return oracle_formats.as_numbers(stored, name) * scale.astype(float) + zero.astype(float)


def through(x: torch.Tensor, side: Any) -> np.ndarray:
    """A full block ``[S, N, D]`` as the oracle stores and reads it."""
    block = x.to(torch.float16).float().numpy().transpose(1, 0, 2)[None]
    if not side.quantized:
        return block[0].transpose(1, 0, 2).astype(float)
    if side.group_size:
        rows = block.reshape(1, KV_HEADS, -1, side.group_size)
        read = decoded(rows, side.name, "token_head", side.symmetric)
    else:
        read = decoded(block, side.name, side.granularity, side.symmetric)
    return read.reshape(block.shape)[0].transpose(1, 0, 2)


def oracle(
    text: tuple[torch.Tensor, ...], name: str, window: int = 0, bias: torch.Tensor | None = None
) -> np.ndarray:
    """Token by token: full blocks before a token's own as stored, its own in half."""
    spec, (query, key, value) = layer_format(name), text
    turned = spec.value.hadamard
    if turned:
        value = torch.tensor(rotated(value.numpy()) / 2, dtype=torch.float32)
    halves = [x.to(torch.float16).double().numpy() for x in (key, value)]
    output = np.zeros(query.shape)
    for t in range(len(query)):
        own = t - t % SIZE
        sides = []
        for x, half, side in ((key, halves[0], spec.key), (value, halves[1], spec.value)):
            full = [through(x[b : b + SIZE], side) for b in range(0, own, SIZE)]
            sides.append(np.concatenate([*full, half[own : t + 1]]))
        first = max(0, t + 1 - window) if window else 0
        for h in range(HEADS):
            k, v = (x[first:, h // (HEADS // KV_HEADS)] for x in sides)
            score = SCALE * k @ query[t, h].double().numpy()
            if bias is not None:
                score += bias[t, h, first : t + 1].double().numpy()
            p = np.exp(score - score.max())
            output[t, h] = p @ v / p.sum()
    return rotated(output) if turned else output


def rotated(x: np.ndarray) -> np.ndarray:
    """Pairs of channels, of which DIM has an odd number."""
    return (x.reshape(*x.shape[:2], DIM // 2, 2) @ oracle_formats.hadamard(2)).reshape(x.shape)


def bias_of(
    queries: torch.Tensor,
    bias: torch.Tensor,
    asked: torch.Tensor,
    scale: float,
    length: int,
    first: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The rows of ``bias`` [T, H, P] of the queries ``asked``, from their first keys on."""
    same = (asked[:, None] == queries[None]).flatten(2).all(2)
    rows = bias[same.int().argmax(1)]
    columns = torch.arange(length) + (0 if first is None else first[:, None, None])
    return {"score_bias": rows.gather(2, columns.expand(*rows.shape[:2], length))}


def run(
    layer: ResidualLayer,
    texts: list[tuple[torch.Tensor, ...]],
    cuts: list[list[int]],
    window: int = 0,
    biases: list[torch.Tensor] | None = None,
    lacking: Lacking | None = None,
) -> list[torch.Tensor]:
    """Texts side by side, each cut as it is said; sequence i in slot i, blocks from the last."""
    blocks = layer.stored.key.shape[0]
    done = [0] * len(texts)
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, cuts))):
        rows = [i for i in range(len(texts)) if step < len(cuts[i])]
        rows.sort(key=lambda i: cuts[i][step] != 1)
        counts = [cuts[i][step] for i in rows]
        spans = [slice(done[i], done[i] + n) for i, n in zip(rows, counts, strict=True)]
        width = max(-(-span.stop // SIZE) for span in spans)
        tables = torch.tensor(
            [[blocks - 1 - i - len(texts) * b for b in range(width)] for i in rows]
        ).clamp_(min=0)
        pieces = cut_step([2 - i for i in rows], tables, counts, [s.stop for s in spans], SIZE)
        parts = [
            torch.cat([texts[i][n][s] for i, s in zip(rows, spans, strict=True)]) for n in range(3)
        ]
        if biases is not None:
            wanted = torch.cat([biases[i][s] for i, s in zip(rows, spans, strict=True)])
            lacking = partial(bias_of, parts[0], wanted)
        result = layer.attend(*parts, pieces, SCALE, window, lacking)
        for i, span, part in zip(rows, spans, result.split(counts), strict=True):
            done[i] = span.stop
            outputs[i].append(part)
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_query_reads_full_blocks_as_stored_and_its_own_in_half(
    name: str, cuts: list[int]
) -> None:
    text = random_text(23)
    (found,) = run(make_layer(name), [text], [cuts])
    np.testing.assert_allclose(found, oracle(text, name), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("window", [0, 1, 3, 5, 7, 12])
def test_sequences_side_by_side_with_windows(window: int) -> None:
    texts = [random_text(n, seed=n) for n in (13, 5, 17)]
    cuts = [[6, 1, 1, 1, 4], [1, 1, 3], [17]]
    found = run(make_layer("int4/kivi"), texts, cuts, window)
    for one, text in zip(found, texts, strict=True):
        np.testing.assert_allclose(one, oracle(text, "int4/kivi", window), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("elements", [1 << 24, 4 * 40, 1])
def test_a_score_bias_by_position(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_kv.cache.residual.BIAS_ELEMENTS", elements)
    texts = [random_text(n, seed=n) for n in (13, 9)]
    generator = torch.Generator().manual_seed(1)
    biases = [torch.randn(len(text[0]), HEADS, 64, generator=generator) for text in texts]
    found = run(make_layer("int4/kivi"), texts, [[11, 1, 1], [1, 7, 1]], 0, biases)
    for one, text, bias in zip(found, texts, biases, strict=True):
        wanted = oracle(text, "int4/kivi", 0, bias)
        np.testing.assert_allclose(one, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("window", [0, 7])
def test_an_offset_that_attention_gives_back(window: int, evenly: bool) -> None:
    """As with the score bias of all positions, wherever a query's own block begins.

    ``evenly``: it is known that the angles grow so, and native attention needs no bias.
    """
    angles = torch.arange(64)[:, None] * torch.tensor([1.1, 0.3, 0.01], dtype=torch.float64)
    table = 1.5 * torch.stack((angles.cos(), angles.sin()), -1).float()
    rotation = Rotation(angles[1], 1.5) if evenly else None
    offset = KeyOffset({0: 5 * torch.randn(KV_HEADS, DIM)}, table, rotation)
    texts = [random_text(n, seed=n) for n in (13, 9)]
    biases = [offset.score_bias(0, query, SCALE, len(query)) for query, _, _ in texts]
    lacking = partial(offset.attention_arguments, 0)
    found = run(make_layer("int4/kivi"), texts, [[11, 1, 1], [1, 7, 1]], window, lacking=lacking)
    for one, text, bias in zip(found, texts, biases, strict=True):
        wanted = oracle(text, "int4/kivi", window, bias)
        np.testing.assert_allclose(one, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_written_once_and_never_change(name: str) -> None:
    text = random_text(23)
    bits = []
    for cuts in CUTS:
        layer = make_layer(name)
        run(layer, [text], [cuts])
        used = [layer.stored.key.shape[0] - 1 - b for b in range(4)]
        assert not layer.stored.value[0].float().nan_to_num(99.0).ne(99).any()  # nobody's block
        bits.append([x[used].clone() for x in layer.block_tensors])
        _, scale, _ = oracle_formats.quantize(
            text[1][:SIZE].to(torch.float16).float().numpy().transpose(1, 0, 2)[None],
            "channel", "int4", layer.format.key.symmetric,
        )  # fmt: skip
        np.testing.assert_array_equal(layer.stored.key_scale[used[0]], scale[0])
    for other in bits[1:]:
        for x, y in zip(bits[0], other, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_a_step_without_tokens() -> None:
    layer = make_layer("int4/kivi")
    query, key, value = (x[:0] for x in random_text(3))
    assert layer.attend(query, key, value, [], SCALE).shape == (0, HEADS, DIM)


def test_beyond_half_and_nan_stay_visible() -> None:
    query, key, value = random_text(12)
    key[2, 0, 3] = 1e6  # no half
    (found,) = run(make_layer("int4/kivi"), [(query, key, value)], [[12]])
    assert found[:2].isfinite().all()
    assert found[5:, : HEADS // KV_HEADS].isnan().all()
    assert found[5:, HEADS // KV_HEADS :].isfinite().all()


def test_open_blocks_are_of_the_models_own_16_bits() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        layer = make_layer("int4/kivi", dtype=dtype)
        wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        assert layer.key.dtype is layer.value.dtype is wanted


def test_pieces_are_cut_by_block() -> None:
    tables = torch.tensor([[4, 7], [5, 6]])
    decodes, chunks = cut_step([1, 0], tables, [1, 6], [7, 8], SIZE)
    assert isinstance(decodes, Pieces)
    assert decodes.in_place and decodes.blocks.tolist() == [7] and decodes.slots.tolist() == [1]
    assert not chunks.in_place and chunks.blocks.tolist() == [5, 6]
    assert [tuple(piece) for piece in chunks.pieces] == [(1, 2, 5), (1, 5, 8)]
    assert chunks.positions.tolist() == [2, 3, 4, 5, 6, 7]
    assert cut_step([], tables[:0], [], [], SIZE) == []


def test_names() -> None:
    spec = layer_format("int4/kivi")
    assert str(spec) == "k:int4/channel/asymmetric+v:int4/token_head/asymmetric"
    assert layer_format(str(spec)) == spec
    assert spec.token_bytes(2, 64) == 2 * (32 + 32 + 4)
    assert 8 * spec.block_bytes(2, 64, 64) == 2 * 2 * 64 * 64 * 4.5
    for wrong in (
        "int4/channel",
        "k:int8+v:int4/channel",
        "k:int4/channel/hadamard+v:int4",
        "k:int4/channel+v:float32",
        "k:int4/channel+v:int8/head/static",
        "int4/kivi/hadamard",
    ):
        with pytest.raises(UsageError):
            layer_format(wrong)
    with pytest.raises(UsageError, match="channel with int4"):
        format_spec("int4/head")


def test_small_blocks_and_devices_are_refused() -> None:
    formats = [layer_format("int4/kivi")]
    cpu = get_device("cpu")
    assert resolve_block_size(CacheConfig(), cpu, formats) == 64
    assert resolve_block_size(CacheConfig(block_size=100), cpu, formats) == 100
    with pytest.raises(UsageError, match="64 or more .*32 / 16 = 2 bits a number here, 0.5 at 64"):
        resolve_block_size(CacheConfig(block_size=16), cpu, formats)
    with pytest.raises(UsageError, match="no INT4 kernel"):
        resolve_block_size(CacheConfig(), get_device("910B1"), formats)
    geometry, residual = geometry_of(), 2 * KV_HEADS * DIM * 64 * 2
    block = geometry.block_bytes(formats, 64)
    assert plan_blocks(geometry, formats, 64, 3 * block + 7 * residual, 64, 7) == 3
    with pytest.raises(UsageError, match=f"open blocks of 7 sequences {7 * residual} bytes"):
        plan_blocks(geometry, formats, 64, block + 7 * residual - 1, 64, 7)


def test_a_slot_goes_with_its_sequence() -> None:
    tables = ResidualTables(PagedTables(4, 2), 2)
    assert tables.reserve("a", 3) and tables.reserve("b", 1)
    assert tables.group_tables("a") != tables.group_tables("b")
    assert not tables.can_admit(1) and not tables.reserve("c", 1)
    assert tables.write("a", 0, 3) == [0, 1, 2]
    held = tables.group_tables("a")
    assert tables.reserve("a", 4) and tables.group_tables("a") == held
    assert not tables.reserve("a", 8)
    tables.release("a")
    assert not tables.holds("a") and tables.reserve("c", 5) is True
    assert tables.group_tables("c") == held
    groups = dict(tables.stats().groups)
    assert groups["residual"].used_blocks == 2 and groups["blocks"].used_blocks == 4


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_uneven(
        tmp_path_factory.mktemp("qwen2"), model_type="qwen2", head_dim=16,
        max_position_embeddings=512,
    )  # fmt: skip


def make_llm(weights: LoadedModel, **options: Any) -> LLM:
    options = {"max_model_len": 300, "max_num_seqs": 3, "max_num_batched_tokens": 96} | options
    options.setdefault("kv_cache_memory_bytes", 1 << 20)
    config = {"kv_cache_dtype": "int4/kivi", "key_offset_layers": "all"}
    return LLM(
        weights.path, weights=weights, skip_tokenizer_init=True, device="cpu",
        kv_cache_config=config, **options,
    )  # fmt: skip


PROMPTS = [random_tokens(150), random_tokens(64, seed=2), random_tokens(9, seed=3)]


def test_the_engine_serves_batches_as_it_serves_one(weights: LoadedModel) -> None:
    llm = make_llm(weights)
    sequences = 3
    assert llm.cache.allocated_bytes == llm.geometry.cache_bytes(
        llm.formats, llm.cache.num_blocks, 64, 300, sequences
    )
    together = greedy(llm, PROMPTS, 60)
    assert together == [greedy(make_llm(weights), [prompt], 60)[0] for prompt in PROMPTS]
    whole = make_llm(weights, max_num_batched_tokens=300, enable_chunked_prefill=False)
    assert greedy(whole, PROMPTS, 60) == together


def test_preempted_sequences_go_on_as_before(weights: LoadedModel) -> None:
    wanted = greedy(make_llm(weights), PROMPTS, 60)
    llm = make_llm(weights)
    room = llm.geometry.cache_bytes(llm.formats, 5, 64, 300, 3)
    tight = make_llm(weights, kv_cache_memory_bytes=room)
    assert greedy(tight, PROMPTS, 60) == wanted
    assert tight.engine.stats.preemptions > 0
    stats = dict(tight.tables.stats().groups)
    assert stats["residual"].used_blocks == stats["blocks"].used_blocks == 0
