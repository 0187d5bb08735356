"""Plans of DeepSeek-V3.2 and V4: bytes by group, sequences, steps, parallel sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_kv import cli
from ascend_kv.compressed_layers import CompressedFormats, CompressedLayers
from ascend_kv.plan.builtin_models import BUILTIN_MODELS
from ascend_kv.plan.capacity import mean_blocks
from ascend_kv.plan.hardware import HARDWARE
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.parallel import Parallel
from ascend_kv.plan.performance import Load, load_of
from ascend_kv.plan.sparse import SPARSE_PEAK, SparseCosts, sparse_model, sparse_step_time
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS

FLASH = ["plan", "deepseek-v4-flash", "--device", "950DT", "--cards", "16"]
HALF = CompressedFormats("bfloat16", "bfloat16", "bfloat16")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


def layers_of(name: str) -> CompressedLayers:
    layers = find_planned_model(name).geometry.compressed
    assert layers is not None
    return layers


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [
        ("deepseek-v4-flash", 131_072, 0.845),
        ("deepseek-v4-flash", 1_048_576, 6.72),
        ("deepseek-v4-pro", 131_072, 1.21),
        ("deepseek-v4-pro", 1_048_576, 9.62),
        ("deepseek-v3.2", 131_072, 10.5),
        ("deepseek-v3.2", 1_048_576, 83.9),
    ],
)
def test_published_bytes_of_a_sequence(name: str, tokens: int, gib: float) -> None:
    kept = layers_of(name).kv_bytes(tokens, HALF)
    del kept["state"]
    assert sum(kept.values()) / 2**30 == pytest.approx(gib, rel=0.005)


def test_latents_by_hand() -> None:
    """576 numbers and an indexer key of 128 in each of 61 layers; INT8 as CANN has it."""
    latent = layers_of("deepseek-v3.2")
    assert latent.group_entry_bytes("csa", HALF) == 61 * 2 * (512 + 64 + 128)
    int8 = CompressedFormats("bfloat16", "int8", "int8")
    assert latent.entry_bytes("csa", int8) == 656 + 132
    assert latent.slot_bytes("window", HALF) == latent.slot_bytes("state", HALF) == 0


def test_flash_on_16_cards_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, *FLASH, "--max-model-len", "131072", "--max-num-seqs", "32")
    assert (plan["tensor_parallel"], plan["data_parallel"], plan["expert_parallel"]) == (1, 16, 16)
    assert plan["model"]["weights"] == "fp8-mxfp4"
    parts = {part["name"]: part["bytes"] for part in plan["memory"]}
    layers, experts = 43, 43 * 256 * 3 * 4096 * 2048
    assert parts["weights"] > experts * 17 / 32 / 16 + 2 * 2 * 129_280 * 4096
    half, int8 = plan["policies"]
    assert half["formats"] == {
        "dtype": "bfloat16", "entries": "bfloat16", "index_keys": "bfloat16",
    }  # fmt: skip
    sequence = half["sequence_bytes"]
    assert sequence["window"] == layers * 128 * 512 * 2
    assert sequence["csa"] == 21 * 131_072 // 4 * (512 + 128) * 2
    assert sequence["hca"] == 20 * 131_072 // 128 * 512 * 2
    assert sequence["state"] == 4 * 2 * (21 * 8 * 2 * (512 + 128) + 20 * 128 * 512)
    assert half["group_bytes"]["state"] == 32 * sequence["state"]
    assert half["blocks"]["slots"] == half["sequences_full_length"] == 32
    assert sum(half["group_bytes"].values()) <= half["kv_bytes"]
    assert half["preemption_from"] is None and half["longest_context"] == 1_048_576
    assert int8["sequence_bytes"]["csa"] < sequence["csa"]
    speed = half["speed"]
    assert speed["low"]["tpot_seconds"] < speed["best"]["tpot_seconds"]
    assert speed["best"]["tokens_per_second"] == pytest.approx(
        16 * half["batch"] / speed["best"]["tpot_seconds"]
    )


def test_little_memory_holds_few_and_says_from_where_on_it_preempts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*FLASH, "--formats", "auto", "--max-num-seqs", "8", "--max-model-len", "131072"]
    lengths = ["--prompt", "100000", "--output", "20000"]
    plan = run_json(capsys, *arguments, *lengths, "--memory", "2GiB")
    (policy,) = plan["policies"]
    # 16 KV blocks of 128 entries hold 8,192 tokens each
    blocks = policy["blocks"]
    assert policy["sequences_full_length"] == min(blocks["csa"] // 256, blocks["hca"] // 8) == 2
    assert policy["sequences_full_length"] <= policy["sequences_live"] < 8
    assert policy["preemption_from"] == int(policy["sequences_live"]) + 1
    assert 131_072 < policy["longest_context"] < 1_048_576
    assert cli.main([*arguments, "--memory", "100MiB"]) == 2
    message = capsys.readouterr().err
    assert "--memory: got 104857600" in message and "Windows and state" in message


def test_blocks_held_while_a_sequence_grows() -> None:
    """Against a count of every step."""
    for prompt, output, size, ratio in ((100, 160, 16, 1), (7, 90, 2, 4), (300, 900, 3, 128)):
        held = [-(-(t // ratio) // size) for t in range(prompt, prompt + output)]
        expected = sum(held) / output
        assert mean_blocks([(prompt, output)], size, ratio) == pytest.approx(expected)


def test_a_step_by_hand() -> None:
    model = find_planned_model("deepseek-v4-flash")
    form = WEIGHT_FORMATS["bfloat16"]
    one = sparse_model(model, form, Parallel(1, 4, 4), 1024, 256)
    context = 8192
    window, chosen, heavy = 43 * 128, 21 * 512, 20 * 64
    assert one.attended(context) == window + chosen + heavy
    each = window * 1024 + 21 * 2048 * 256 + heavy * 1024
    assert one.cache_bytes_read(3, 3, context) == 3 * each + 3 * chosen * 1024
    # more tokens than there are entries read each entry once
    assert one.cache_bytes_read(1, 50, context) == each + 21 * 2048 * 1024
    parameters = model.parameters
    reached = (1 - (1 - 6 / 256) ** 12) * parameters.experts
    assert one.reached(12) == pytest.approx(reached)
    weights = 2 * (parameters.attention + parameters.dense + parameters.output) + 2 * reached / 4
    assert one.weight_bytes_read(3) == pytest.approx(weights)  # 4 copies' tokens reach experts
    load = Load(3, 3 * context)
    assert one.moved_bytes(load) == pytest.approx(weights + one.cache_bytes_read(3, 3, context))
    inner = 2 * (parameters.active - parameters.output) * 3 + 2 * parameters.output * 3
    pairs = 3 * one.attended(context)
    assert one.operations(load) == pytest.approx(inner + 4 * 512 * 64 * pairs)
    assert one.index_operations(load) == 2 * 21 * 64 * 128 * 3 * 2048
    card = HARDWARE["910B1"]
    assert card.hbm_bytes_per_second and card.cube_flops
    step = sparse_step_time(one, load, card, SPARSE_PEAK)
    assert step.parts["memory"] == pytest.approx(one.moved_bytes(load) / 1.6e12)
    assert step.parts["cube"] == pytest.approx(one.operations(load) / card.cube_flops)
    assert step.bound == "memory" and step.seconds == pytest.approx(sum(step.parts.values()))
    slow = sparse_step_time(one, load, card, SparseCosts(2, 3, 1e-6, 1.5))
    assert slow.parts["memory"] == pytest.approx(3 * step.parts["memory"])
    assert slow.parts["cube"] == pytest.approx(4.5 * step.parts["cube"])
    assert slow.parts["index"] == pytest.approx(1.5 * 1e-6 * 21 * 2048)
    int8 = sparse_model(model, WEIGHT_FORMATS["w8a8"], Parallel(1, 4, 4), 1024, 256)
    twice = sparse_step_time(int8, load, card, SPARSE_PEAK)
    assert twice.parts["cube"] == pytest.approx(step.parts["cube"] / 2)


def test_a_prompt_shares_what_its_tokens_attend_to() -> None:
    model = find_planned_model("deepseek-v3.2")
    one = sparse_model(model, WEIGHT_FORMATS["w8a8"], Parallel(2, 1, 2), 656, 132)
    assert (one.heads, one.head_width) == (64, 576 + 512)
    chunk = load_of([(3000, 3100)])
    read = one.cache_bytes_read(1, 100, 3100)
    assert read == 61 * 3100 * (656 + 132)  # 100 x 2,048 are more than there are
    assert one.moved_bytes(chunk) == pytest.approx(one.weight_bytes_read(100) + read)
    mean = chunk.prefill_pairs / 100
    assert one.attended(mean) == 61 * 2048
    assert one.key_rows(chunk) == 61 * (mean // 1)


def test_formulas_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *FLASH, "--explain", "--max-model-len", "131072")
    for words in (
        "window: 43 layers x 128 tokens x 512 numbers in bfloat16 = 5.38 MiB",
        "state, csa: 21 layers x 8 tokens x 2 (values and gates) x 2 x (512 + 128) channels",
        "57 MB", "7.3 GB / 128", "What these layers keep: 0.845 GiB",
        "of it state", "step = memory + cube + index",
        "in routed experts x 0.53125 B / 16",
    ):  # fmt: skip
        assert words in text, words
    latent = ["plan", "deepseek-v3.2", "--device", "910B2", "--cards", "64"]
    text = shown(capsys, *latent, "--explain")
    assert "57 MB" not in text and "state" not in text.replace("Without state", "")
    assert "stored as w8a8" in text and "does not serve it" in text


def test_the_cache_of_v4_goes_through_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("deepseek-v4-flash", "deepseek-v3.2"):
        plan = run_json(
            capsys, "plan", name, "--device", "950DT", "--cards", "32", "--simulate", "inf",
            "--requests", "20", "--memory", "3GiB", "--block-sizes", "32,128", "--formats", "auto",
        )  # fmt: skip
        runs = plan["simulations"]
        assert [run["requests"] for run in runs] == [20, 20]
        assert all(run["preemptions"] == 0 and run["batch_peak"] == 20 for run in runs)


def test_a_sweep_knows_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(
        capsys, *FLASH, "--sweep", str(tmp_path), "--memory", "20GiB", "--formats", "auto",
        "--max-model-len", "1048576", "--max-num-seqs", "2",
    )  # fmt: skip
    points = [p for p in plan["sweep"]["points"] if p["context"] == 1_048_576]
    assert [p["batch"] for p in points if p["fits"]] == [1, 2]


def test_the_card_decides_what_auto_means(capsys: pytest.CaptureFixture[str]) -> None:
    for device, weights in (("910B1", "w8a8"), ("950PR", "fp8-mxfp4")):
        arguments = ["plan", "deepseek-v4-flash", "--device", device, "--cards", "16"]
        plan = run_json(capsys, *arguments)
        assert plan["model"]["weights"] == weights
    plan = run_json(capsys, "plan", "deepseek-v3.2", "--device", "950DT", "--cards", "16")
    assert plan["model"]["weights"] == "fp8"
    plan = run_json(capsys, "plan", "deepseek-v4-flash", "--memory", "4GiB")
    assert plan["model"]["weights"] == "bfloat16" and plan["policies"][0]["speed"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "12"], "--cards: got 12; legal: on 12 cards, --expert-parallel: 1, 2, 4."),
        (["--expert-parallel", "3"], "--expert-parallel: got 3; legal: on 16 cards"),
        (["--expert-parallel", "0"], "--expert-parallel: got 0"),
        (["--tensor-parallel", "16"], "--tensor-parallel: got 16; legal: 1, 2, 4, 8"),
        (["--device", "910B1", "--weights", "fp8-mxfp4"], "A 910B1 multiplies no FP8"),
        (["--granularity", "token"], "--granularity: got 'token'"),
        (["--formats", "float16"], "--formats: got 'float16'; legal: bfloat16, int8"),
        (["--indexer-format", "fp8"], "--indexer-format"),
        (["--cards", "1"], "Weights"),
        (["--cards", "4", "--device", "910B4"], "Take more cards"),
        (["--device", "cpu", "--memory", "9GiB", "--calibrate"], "--calibrate: got 'deepseek"),
    ],
)
def test_mistakes_name_the_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*FLASH, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_flags_of_such_models_are_refused_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--expert-parallel", "2"), ("--indexer-format", "int8")):
        assert cli.main(["plan", "qwen2.5-7b", "--device", "910B1", flag, value]) == 2
        assert "with DeepSeek-V3.2 and V4 only" in capsys.readouterr().err


def test_cards_share_heads_but_not_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FLASH, "--formats", "auto", "--memory", "4GiB"]
    one, four = (run_json(capsys, *arguments, "--tensor-parallel", n) for n in ("1", "4"))
    assert one["policies"][0]["sequence_bytes"] == four["policies"][0]["sequence_bytes"]
    weights = [plan["memory"][2]["bytes"] for plan in (one, four)]
    assert weights[0] > weights[1] and (four["data_parallel"], four["expert_parallel"]) == (4, 16)
    assert "Every card of a copy keeps the whole cache" in shown(
        capsys, *arguments, "--tensor-parallel", "4"
    )


def test_builtin_configurations_are_of_the_published_layers() -> None:
    assert BUILTIN_MODELS["deepseek-v4-pro"].config["hc_mult"] == 4
    assert [layers_of(f"deepseek-v4-{name}").count("csa") for name in ("flash", "pro")] == [21, 30]
