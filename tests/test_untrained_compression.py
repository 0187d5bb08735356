"""Compression of dense models: what a query sees, both switches, batches, bytes, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model
from untrained_runs import POLICY, Runner, expected

from ascend_kv import LLM, SamplingParams, UsageError, ops
from ascend_kv.cache.untrained import UntrainedKVCache, group_block_bytes, sequence_bytes
from ascend_kv.cache.untrained_tables import UntrainedTables
from ascend_kv.geometry import FORMATS
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.untrained_step import turn
from ascend_kv.ops import platform
from ascend_kv.untrained_compression import Compression, most_by_group, plan_untrained_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SETTINGS = {
    "window": 9, "sinks": 3, "window_layers": 1, "csa_from": 41, "hca_from": 190, "top_k": 6,
}  # fmt: skip
CONFIG = {"compression": SETTINGS, "untrained_compression": True}
PROMPTS = [
    {"prompt_token_ids": [(7 * number + 13 * place) % 90 + 3 for place in range(length)]}
    for number, length in enumerate([30, 300, 178, 9, 420, 39])
]
"""Below csa_from; far over both; over hca_from, below csa_from, over csa_from while generating"""


def tokens_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_model(tmp_path_factory.mktemp("llama"), max_position_embeddings=700)
    return load_model(path)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


# ---- what a query sees -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"count_tokens": "none"},
        {"count_tokens": "all"},
        {"hca_from": None, "top_k": 1000},
        {"window": 1, "sinks": 0, "window_layers": 0},
        {"window": 16, "sinks": 17, "csa_from": 1, "hca_from": 1, "window_layers": 2},
        {"csa_from": 100, "hca_from": 100, "top_k": 31},
    ],
)
def test_every_query_sees_what_the_definition_says(
    loaded: LoadedModel, changes: dict[str, Any]
) -> None:
    policy, tokens = replace(POLICY, **changes), tokens_of(340)
    logits = Runner(loaded, policy).in_chunks(tokens, [23, 1, 8, 55, 1, 1, 3])
    close(logits, expected(loaded, policy, tokens))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_models_with_biases_and_norms_of_keys(kind: str, tmp_path: Path) -> None:
    other = load_model(make_model(tmp_path, kind, max_position_embeddings=700))
    tokens = tokens_of(230)
    logits = Runner(other).in_chunks(tokens, [64, 1])
    close(logits, expected(other, POLICY, tokens))


@pytest.mark.parametrize("chunks", [[1], [2, 5], [39, 1, 1, 1, 150], [41], [300], [7, 64, 1]])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunks_do_not_matter(loaded: LoadedModel, chunks: list[int], block_size: int) -> None:
    tokens = tokens_of(300, seed=1)
    whole = Runner(loaded, block_size=16).in_chunks(tokens, [300])
    close(Runner(loaded, block_size=block_size).in_chunks(tokens, chunks), whole)


def test_the_cache_holds_the_same_entries_however_it_was_filled(loaded: LoadedModel) -> None:
    """Entries are made of what is stored, so a chunk cannot leave another trace than decoding."""
    tokens, kept = tokens_of(330, seed=2), []
    for chunks in ([330], [1] * 330):
        runner = Runner(loaded)
        low = 0
        for chunk in chunks:
            runner.step([("it", tokens[low : low + chunk])])
            low += chunk
        layer = runner.cache.layers[2]
        tables = runner.tables.group_tables("it")
        assert layer.coarse is not None
        entries = layer.coarse.key[tables["hca"]].transpose(0, 1).flatten(1, 2)
        kept.append(entries[:, : POLICY.coarse(330)])
    assert kept[0].shape[1] == 2
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-5)


def test_sequences_on_both_sides_of_the_thresholds_in_one_batch(loaded: LoadedModel) -> None:
    lengths = {"a": 30, "b": 300, "c": 60, "d": 210}
    sequences = {name: tokens_of(n, seed=n) for name, n in lengths.items()}
    for seed in range(2):
        mixed = Runner(loaded, sequences=5).mixed(sequences, seed)
        for name, tokens in sequences.items():
            close(mixed[name], Runner(loaded).in_chunks(tokens, [len(tokens)]))


def test_turning_back_undoes_a_rotation_that_scales() -> None:
    angles = torch.rand(5, 3, 1) * 6
    table = 1.3 * torch.cat((angles.cos(), angles.sin()), 2)
    x = torch.randn(5, 2, 6)
    torch.testing.assert_close(turn(turn(x, table), table, back=True), x)


# ---- below the threshold -----------------------------------------------------------------------


def record(monkeypatch: pytest.MonkeyPatch, llm: LLM, prompts: Any) -> list[Any]:
    """Every call of an operator: its name, and its arguments, tensors as they were."""
    calls: list[Any] = []

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return list(value) if isinstance(value, list | tuple) else value
        # caches have other sizes, and parts that nobody has written
        return tuple(value.shape[1:]) if value.dim() == 4 else value.clone()

    with monkeypatch.context() as patch:
        for name in ops.__all__:
            original = getattr(ops, name)

            def call(*args: Any, _name: str = name, _original: Any = original, **options: Any):  # type: ignore[no-untyped-def]
                told = {key: kept(value) for key, value in options.items()}
                calls.append((_name, [kept(value) for value in args], told))
                return _original(*args, **options)

            patch.setattr(ops, name, call)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    calls.append([output.outputs[0].token_ids for output in outputs])
    return calls


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)


def make(loaded: LoadedModel, config: dict[str, Any] | None = None, **options: Any) -> LLM:
    given = {"max_model_len": 460, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 5}
    config = CONFIG if config is None else config
    return LLM(
        loaded.path, weights=loaded, skip_tokenizer_init=True, kv_cache_config=config,
        **given | options,
    )  # fmt: skip


def test_below_the_threshold_the_calls_are_full_attentions(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [{"prompt_token_ids": tokens_of(n, seed=n)} for n in (10, 70, 3, 20)]
    config = {"compression": {**SETTINGS, "csa_from": 95}, "untrained_compression": True}
    options: dict[str, Any] = {"max_num_batched_tokens": 32}
    ours = record(monkeypatch, make(loaded, config, **options), short)
    # 94 tokens at most: the last one that is sampled is never stored
    theirs = record(monkeypatch, make(loaded, {}, **options), short)
    assert {call[0] for call in ours[:-1]} == {"kv_cache_store", "paged_attention"}
    assert len(ours) == len(theirs) > 100
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    sooner = {"compression": {**SETTINGS, "csa_from": 93}, "untrained_compression": True}
    others = record(monkeypatch, make(loaded, sooner, **options), short)
    assert {call[0] for call in others[:-1]} >= {"hca_compress", "merge_attention"}


# ---- the engine --------------------------------------------------------------------------------


def generate(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[list[int]]:
    """Greedy tokens by the definition, one sequence at a time, without cache or engine."""
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt["prompt_token_ids"])
        runner = Runner(loaded)
        last = runner.step([("it", tokens)])["it"][-1]
        made = []
        for _ in range(24):
            made.append(int(last.argmax()))
            last = runner.step([("it", made[-1:])])["it"][-1]
        outputs.append(made)
    return outputs


def test_the_definition_gives_these_tokens(loaded: LoadedModel, alone: list[list[int]]) -> None:
    """Prompt 178 crosses hca_from, prompt 39 crosses csa_from while it generates."""
    for number in (2, 5):
        tokens = list(PROMPTS[number]["prompt_token_ids"]) + alone[number]
        logits = expected(loaded, POLICY, tokens[:-1])
        assert logits[-24:].argmax(-1).tolist() == alone[number]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 460, "enable_chunked_prefill": False},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "block_size": 16},
    ],
)
def test_the_engine_generates_them(
    loaded: LoadedModel, alone: list[list[int]], options: dict[str, Any]
) -> None:
    llm = make(loaded, **options)
    assert generate(llm) == alone
    assert all(one.used_blocks == one.used_tokens == 0 for _, one in llm.tables.stats().groups)


def test_preempted_requests_resume(loaded: LoadedModel) -> None:
    """Entries of 4 tokens pile up while four sequences generate, until one has to give way."""
    config = {"compression": {**SETTINGS, "hca_from": None}, "untrained_compression": True}
    prompts = [{"prompt_token_ids": tokens_of(n, seed=n)} for n in (50, 45, 48, 52)]
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    by_block = group_block_bytes(loaded.geometry, POLICY, FORMATS["float32"], 5)
    del by_block["hca"]
    most = most_by_group(replace(POLICY, hca_from=None), by_block, 200, 8, 5)
    least = sum(most[group] * size for group, size in by_block.items())
    made = []
    for scarce, memory in ((False, 8 * least), (True, int(2.2 * least))):
        llm = make(
            loaded, config, kv_cache_memory_bytes=memory, max_model_len=200,
            max_num_batched_tokens=8,
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        made.append([output.outputs[0].token_ids for output in outputs])
        stats = llm.engine.stats
        assert bool(stats.preemptions) == bool(stats.recomputed_tokens) == scarce
    assert made[0] == made[1]


def test_statistics_and_bytes_show_every_group(loaded: LoadedModel) -> None:
    llm = make(loaded)
    assert isinstance(llm.cache, UntrainedKVCache) and llm.cache.allocated_bytes > 0
    by_block = group_block_bytes(loaded.geometry, POLICY, FORMATS["float32"], 5)
    token = 2 * 2 * 8 * 4  # key and value, 2 heads of 8, float32
    assert by_block == {
        "window": 5 * token,
        "full": 10 * token,
        "csa": 10 * token,
        "hca": 10 * token,
    }
    assert llm.cache.bytes_by_group == {g: by_block[g] * n for g, n in llm.cache.blocks.items()}
    assert llm.cache.allocated_bytes == sum(llm.cache.bytes_by_group.values())
    stored = {
        id(x): x for layer in llm.cache.layers for part in layer[1:] if part for x in part[:2]
    }
    assert llm.cache.allocated_bytes == sum(x.untyped_storage().nbytes() for x in stored.values())
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    last = dict(llm.engine.stats.steps[-1].cache.groups)
    tokens = 300 + 23
    fine, coarse = (tokens - 3 - 9) // 4, (tokens - 3 - 9) // 128
    assert last["hca"].used_tokens == coarse == 2
    assert fine - 32 * coarse <= last["csa"].used_tokens < fine - 32 * coarse + 5
    assert last["full"].used_blocks <= 6 and last["window"].used_blocks <= 6


# ---- tables ------------------------------------------------------------------------------------


def tables_for(policy: Compression, step: int, size: int, sequences: int = 2) -> UntrainedTables:
    most = most_by_group(policy, policy.groups(3), 600, step, size)
    return UntrainedTables(policy, {g: sequences * n for g, n in most.items()}, size, step)


def test_memory_returns_to_the_pool_at_the_switch() -> None:
    tables = tables_for(POLICY, 8, 4)
    counts = []
    for stop in range(1, 501):
        assert tables.reserve("a", stop)
        tables.write("a", stop - 1, stop)
        counts.append({name: one.used_blocks for name, one in tables.stats().groups})
    assert counts[39]["full"] == counts[39]["window"] == 10 and counts[39]["csa"] == 0
    assert all(count["full"] <= 7 and count["window"] <= 6 for count in counts[45:])
    assert max(count["csa"] for count in counts) == counts[188]["csa"] == 11  # 44 entries
    assert all(count["csa"] <= 10 for count in counts[191:]) and counts[-1]["hca"] == 1
    tables.release("a")
    assert all(one.used_blocks == one.used_tokens == 0 for _, one in tables.stats().groups)


@pytest.mark.parametrize("seed", range(4))
def test_a_reserved_sequence_never_lacks_a_block(seed: int) -> None:
    """Whatever the chunks: what was reserved at once is enough, and each block has one holder."""
    rng = random.Random(seed)
    for _ in range(30):
        policy = Compression(
            window=rng.randrange(1, 40),
            sinks=rng.randrange(9),
            window_layers=rng.randrange(3),
            csa_from=(switch := rng.randrange(1, 200)),
            hca_from=rng.choice([None, switch, switch + rng.randrange(300)]),
        )
        step, size, total = rng.randrange(1, 90), rng.randrange(1, 20), rng.randrange(1, 601)
        tables = tables_for(policy, step, size, 1)
        assert tables.max_sequence_tokens >= 600
        assert tables.reserve("a", total)
        free = {name: g.pool.num_free for name, g in tables._groups.items()}
        start = 0
        while start < total:
            stop = min(total, start + rng.randrange(1, step + 1))
            assert tables.reserve("a", stop)
            tables.write("a", start, stop)
            for name, group in tables._groups.items():
                held = group.holdings["a"]
                assert group.pool.num_free >= free[name]
                free[name] = group.pool.num_free
                assert len({*held.table, *held.spare}) == held.count == group.pool.num_used
                needed = policy.high(name, stop) - size * policy.dropped_blocks(name, start, size)
                assert len(held.table) == max(0, -(-needed // size))
            start = stop


def test_what_does_not_fit_changes_nothing() -> None:
    tables = tables_for(POLICY, 8, 4, 1)
    assert tables.reserve("a", 600) and not tables.can_admit(600)
    before = tables.stats()
    assert not tables.reserve("b", 600) and not tables.holds("b")
    assert tables.stats() == before
    tables.release("a")
    assert tables.can_admit(600) and not tables.can_admit(600, headroom_blocks=1)
    assert not tables.can_admit(tables.max_sequence_tokens + 1)


def test_memory_is_divided_by_what_a_sequence_needs() -> None:
    by_block = {"window": 10, "full": 20, "csa": 20, "hca": 20}
    most = most_by_group(POLICY, by_block, 600, 8, 4)
    least = sum(most[group] * size for group, size in by_block.items())
    assert plan_untrained_blocks(POLICY, by_block, least, 600, 8, 4, 9) == most
    blocks = plan_untrained_blocks(POLICY, by_block, 3 * least + 5, 600, 8, 4, 9)
    assert blocks == {group: 3 * count for group, count in most.items()}
    blocks = plan_untrained_blocks(POLICY, by_block, 30 * least, 600, 8, 4, 9)
    assert blocks == {group: 9 * count for group, count in most.items()}
    with pytest.raises(UsageError, match="max_model_len = 600"):
        plan_untrained_blocks(POLICY, by_block, least - 1, 600, 8, 4, 9)


def test_bytes_of_a_long_sequence(loaded: LoadedModel) -> None:
    """What geometry says for 128K: one layer of a window, two of entries."""
    token = 2 * 2 * 8 * 4
    found = sequence_bytes(
        loaded.geometry, Compression(window_layers=1), FORMATS["float32"], 131_072
    )
    fine = (131_072 - 132) // 4
    assert found["window"] == token * (4 + 127)
    assert found["full"] == 2 * token * (131_072 - 4 * fine)
    assert found["csa"] == 2 * token * (fine % 32)
    assert found["hca"] == 2 * token * (fine // 32)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "config", "words"),
    [
        ("untrained_compression", {"compression": {}}, "SmolLM2-135M"),
        ("compression", {"untrained_compression": True}, "{}"),
        ("compression.window", {"compression": {"window": 0}}, "1 or more"),
        ("compression.sinks", {"compression": {"sinks": -1}}, "0 or more"),
        ("compression.top_k", {"compression": {"top_k": 0}}, "1 or more"),
        ("compression.hca_from", {"compression": {"hca_from": 4095}}, "csa_from = 4096"),
        ("compression.window_layers", {"compression": {"window_layers": 3}}, "at most 2"),
        (
            "kv_cache_config: compression.count_tokens",
            {"compression": {"count_tokens": "hca"}},
            "all",
        ),
        ("kv_cache_dtype", {"compression": {}, "kv_cache_dtype": "int8"}, "rounded"),
        ("kv_cache_dtype", {"compression": {}, "kv_cache_dtype_layers": {"0": "float16"}}, "all"),
        ("kv_allocator", {"compression": {}, "kv_allocator": "contiguous"}, "come back"),
        ("pair_scaling", {"compression": {}, "pair_scaling": True}, "with compression"),
        ("key_offset_layers", {"compression": {}, "key_offset_layers": "all"}, "compression"),
        ("kv_cache_memory_bytes", {"compression": {}, "kv_cache_memory_bytes": 999}, "blocks"),
    ],
)
def test_what_cannot_be_is_refused(
    loaded: LoadedModel, field: str, config: dict[str, Any], words: str
) -> None:
    asked = {} if field == "untrained_compression" else {"untrained_compression": True}
    with pytest.raises(UsageError, match=words) as error:
        make(loaded, {**config, **asked})
    assert error.value.field == field


def test_models_with_windows_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral", sliding_window=32)
    with pytest.raises(UsageError, match="forget tokens already"):
        LLM(path, kv_cache_config=CONFIG, skip_tokenizer_init=True)


def test_deepseek_has_compression_of_its_own(tmp_path: Path) -> None:
    from deepseek_models import make_deepseek

    with pytest.raises(UsageError) as error:
        LLM(make_deepseek(tmp_path, "window", "csa"), kv_cache_config=CONFIG)
    assert error.value.field == "compression"


def test_an_npu_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from ascend_kv.integrations import untrained

    class Elsewhere:
        device = torch.device("meta")
        base_model = loaded.hf_model.base_model

    with pytest.raises(UsageError, match="takes no lists"):
        untrained.check_model(loaded._replace(hf_model=Elsewhere()))
    assert platform.find_device() in ("cpu", "npu")
