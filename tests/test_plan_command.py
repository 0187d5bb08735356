"""``ascend-kv plan`` for a card: JSON, explanations, simulation, sweep, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_kv import cli
from ascend_kv.evaluate.plan_published import published_tables

CARD = ["plan", "qwen2.5-7b", "--device", "910B1"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_card_is_planned_without_torch_numpy_or_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise OSError('no network in this test')\n"
        "socket.socket.connect = refuse\n"
        "from ascend_kv.cli import main\n"
        f"assert main([*{CARD!r}, '--explain', '--published', '--simulate', '--requests', '20'])"
        " == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'yaml', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_card_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, *CARD, "--max-model-len", "4096")
    assert (plan["schema"], plan["device"], plan["cards"]) == ("ascend_kv.plan/1", "910B1", 1)
    parts = {part["name"]: part["bytes"] for part in plan["memory"]}
    half, int8 = plan["policies"]
    assert int8["kv_bytes"] + sum(parts.values()) == plan["total_bytes"] == 64 * 2**30
    assert half["kv_bytes"] == int8["kv_bytes"] + parts["loaded prefix"]
    blocks = half["kv_bytes"] // (128 * 57_344)
    assert half["paged"]["num_blocks"] == blocks
    assert half["paged"]["sequences_full_length"] == blocks // 32
    # prompts of 100 and outputs of 160: one block for 29 steps (100 to 128 tokens), two for 128,
    # three for 3 (257 to 259)
    held = (29 * 1 + 128 * 2 + 3 * 3) / 160
    assert half["paged"]["sequences_live"] == pytest.approx(blocks / held)
    assert half["preemption_from"] == int(blocks / held) + 1
    assert half["longest_context"] == 32768
    assert int8["paged"]["token_bytes"] == 57_344 // 2 + 28 * 2 * 4 * 4
    speed = half["speed"]
    assert speed["low"]["tpot_seconds"] < speed["best"]["tpot_seconds"]
    assert speed["best"]["tokens_per_second"] == pytest.approx(64 / speed["best"]["tpot_seconds"])


def test_many_cards(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3-70b", "--device", "910B1", "--cards", "32"]
    plan = run_json(capsys, *arguments, "--tensor-parallel", "16", "--formats", "float16")
    assert (plan["tensor_parallel"], plan["data_parallel"]) == (16, 2)
    assert plan["copies_of_each_kv_head"] == 2
    (policy,) = plan["policies"]
    assert policy["paged"]["token_bytes"] == 2 * 80 * 1 * 128 * 2
    best = policy["speed"]["best"]
    assert best["tokens_per_second"] == pytest.approx(2 * 64 / best["tpot_seconds"])
    text = shown(capsys, *arguments, "--tensor-parallel", "16")
    assert "8 KV heads are fewer than 16 cards" in text and "one of 2 copies" in text


def test_every_formula_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *CARD, "--explain", "--max-model-len", "8192")
    for words in (
        "2 x 28 layers x 4 KV heads x 128 x 2 bytes = 57,344 bytes a token, 448.00 MiB",
        "2 x 28 layers x 28 heads x 128 x 2 bytes = 401,408 bytes a token",
        "7 times too much",
        "system = 64.00 GiB - 60.96 GiB = 3.04 GiB",
        "KV cache = 64.00 GiB - 3.04 GiB",
        "bandwidth = 1.6 T a second",
        "step = layers + tokens + the largest of memory, cube and vector",
    ):
        assert words in text, words
    assert "57 MB" not in text and "DeepSeek" not in text  # another model's story


def test_block_sizes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(
        capsys, *CARD, "--simulate", "inf", "--requests", "40", "--sigma", "0.5",
        "--memory", "1.2GiB", "--max-model-len", "1024", "--prompt", "300", "--formats", "int8",
    )  # fmt: skip
    runs = plan["simulations"]
    assert [run["block_size"] for run in runs] == [8, 16, 32, 128]
    assert [run["legal_block_size"] for run in runs] == [False, False, True, True]
    used = [run["utilisation"] for run in runs]
    assert used == sorted(used, reverse=True)  # small blocks are fuller
    assert all(run["requests"] == 40 for run in runs)
    assert runs[0]["ttft"]["p50"] <= runs[0]["ttft"]["p99"]


def test_a_trace_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_seconds": 5, "prompt_tokens": 30, "output_tokens": 2}\n' * 3)
    plan = run_json(capsys, *CARD, "--trace", str(path), "--block-sizes", "128")
    assert [run["output_tokens"] for run in plan["simulations"]] == [6, 6]


def test_a_sweep_draws_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "plots"
    plan = run_json(
        capsys, *CARD, "--sweep", str(directory), "--memory", "4GiB", "--max-model-len", "4096"
    )
    assert sorted(path.name for path in directory.iterdir()) == [
        "plan_throughput.png", "plan_tpot.png",
    ]  # fmt: skip
    points = plan["sweep"]["points"]
    assert {point["context"] for point in points} == {64, 256, 1024, 4096}
    # 4 GiB are 585 blocks of 128 tokens in half precision: 18 sequences of 4,096
    full = [p["batch"] for p in points if p["scheme"] == "float16" and p["context"] == 4096
            and p["fits"]]  # fmt: skip
    assert max(full) == 16
    assert all(point["low"] < point["best"] < point["high"] for point in points)
    (tmp_path / "file").write_text("")
    assert cli.main([*CARD, "--sweep", str(tmp_path / "file")]) == 1
    assert "Name another --sweep" in capsys.readouterr().err


def test_published_rows_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    content = run_json(capsys, *CARD, "--published")["published"]
    assert abs(content["article_third_row"]["predicted"] / 147 - 1) < 0.15
    assert len(content["studies"]) == 11
    text = shown(capsys, *CARD, "--published")
    assert "/ 128 is 57 MB" in text and "What these layers keep: 0.845 GiB" in text
    assert "this row cannot" not in text and "row cannot be predicted from the table" in text
    for table in published_tables():
        assert "published" in table.title
        assert all(len(row) == len(table.header) for row in table.rows), table.title


def test_the_parts_shown_are_one_policys_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the policy that needs most, wherever it stands."""
    for formats in ("float16,int8", "int8,float16"):
        plan = run_json(capsys, *CARD, "--formats", formats)
        parts = {part["name"]: part for part in plan["memory"]}
        assert parts["loaded prefix"]["bytes"] == 2 * 4 * 8192 * 128 * 2
        text = shown(capsys, *CARD, "--formats", formats, "--explain")
        assert "loaded prefix │ 16.00 MiB" in text or "loaded prefix 16.00 MiB" in text
        assert "loaded prefix = 2 x 4 heads x 8,192 tokens x 128 x 2 B" in text
        assert "Parts and total with int8/token_head" in text
    assert "Parts and total with" not in shown(capsys, *CARD, "--formats", "float16")
    # as much at most, more expected
    text = shown(capsys, "plan", "qwen2.5-7b", "--device", "950PR", "--formats", "int8,fp8")
    assert "Parts and total with fp8_e4m3/token_head" in text


def test_no_speed_without_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "qwen2.5-7b", "--device", "950PR", "--formats"]
    half, fp8, mixed = run_json(capsys, *arguments, "float16,fp8,k:int8+v:fp8")["policies"]
    assert half["speed"] and fp8["speed"] == mixed["speed"] == {}
    text = shown(capsys, *arguments, "float16,fp8")
    assert "no kernel: served by references" in text
    assert "Dequantizing is not counted: the 950PR's vector rate is not known" in text
    reason = "fp8_e4m3/token_head has no kernel on a 950PR: it is served by references"
    assert f"No speed is predicted: {reason}" in shown(capsys, *arguments, "fp8")
    assert cli.main([*arguments, "float16,fp8", "--simulate", "1"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert "Dequantizing is not counted" not in shown(capsys, *CARD)


def test_950_alone_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "qwen2.5-7b", "--device", "Ascend950", "--memory", "4GiB"]
    assert run_json(capsys, *arguments)["policies"][0]["speed"] == {}
    assert "no bandwidth is published for the 950" in shown(capsys, *arguments)


def test_a_card_without_a_published_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "qwen2.5-7b", "--device", "910B4"]
    assert run_json(capsys, *arguments)["policies"][0]["speed"] == {}
    assert "no bandwidth is published for the 910B4" in shown(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "16"], "4 x 4"),
        (["--formats", "fp8,int8", "--asymmetric"], "--asymmetric: got 'fp8'; legal: formats that"),
        (["--formats", "int8,k:int8+v:fp8", "--asymmetric"], "--asymmetric: got 'k:int8+v:fp8'"),
        (["--weights", "int3"], "--weights: got 'int3'; legal: auto, float32"),
        (["--memory", "50GiB"], "--memory: got '50.00 GiB'; legal: at most 4"),
        (["--memory-utilization", "1.5"], "--memory-utilization: got 1.5"),
        (["--memory-utilization", "0.2"], "does not fit"),
        (["--device", "950"], "Two cards are called 950: 950PR and 950DT."),
        (["--device", "A3-die"], "--device: got 'A3-die'; legal: cpu, 910B1"),
        (["--max-model-len", "40000"], "--max-model-len: got 40000; legal: 2 to 32768"),
        (["--max-num-seqs", "0"], "--max-num-seqs: got 0"),
        (["--max-num-seqs", "600"], "--max-num-batched-tokens: got 512; legal: 600 or more"),
        (["--requests", "0"], "--requests: got 0"),
        (["--sigma", "9"], "--sigma: got 9.0"),
        (["--simulate", "fast"], "--simulate: got 'fast'"),
        (["--simulate", "-1"], "--simulate: got -1.0"),
        (["--simulate", "1e-320"], "legal: requests a second, 1e-06 or more"),
        (["--requests", "1000000000000"], "--requests: got 1000000000000; legal: 1 to 1000000"),
        (["--simulate", "1", "--block-sizes", "16,0"], "--block-sizes: got [16, 0]"),
        (["--simulate", "1", "--block-sizes", "a"], "--block-sizes: got 'a'"),
        (["--trace", "nowhere.jsonl"], "--trace: got 'nowhere.jsonl'"),
        (["--calibrate"], "--device: got '910B1'; legal: cpu with --calibrate"),
        (["--calibration", "x.json"], "--device: got '910B1'; legal: cpu with --calibration"),
        (["--save-calibration", "x.json"], "--save-calibration: got 'x.json'; legal: together"),
        (["--device", "910B4", "--simulate", "1"], "--device: got '910B4'; legal: 910B1 to"),
        (["--device", "910B4", "--sweep", "x"], "950DT with --sweep"),
        (["--device", "cpu"], "--memory: got None"),
    ],
)
def test_mistakes_name_the_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*CARD, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_models_it_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "nowhere/config.json", "--device", "910B1"]) == 2
    assert "Built in: qwen2.5-0.5b" in capsys.readouterr().err


TRACE = '{"arrival_seconds": 0.5, "prompt_tokens": 80, "output_tokens": 40}\n'


@pytest.mark.parametrize(
    "flags",
    [
        ["--block-sizes", "32"],
        ["--trace", "TRACE", "--simulate", "5"],
        ["--trace", "TRACE", "--requests", "5"],
        ["--trace", "TRACE", "--prompt", "100"],
        ["--trace", "TRACE", "--sigma", "0"],
    ],
)
def test_flags_without_effect_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    given = [str(tmp_path / "trace.jsonl") if flag == "TRACE" else flag for flag in flags]
    assert cli.main([*CARD, *given]) == 2
    assert flags[-2] in capsys.readouterr().err


def test_memory_that_nobody_asks_for_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unused" not in shown(capsys, *CARD)
    assert "unused 38." in shown(capsys, *CARD, "--memory", "2GiB")


def test_a_word_that_no_model_has_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_hub(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("ascend_kv.plan.models.load_config", no_hub)
    assert cli.main(["plan", "qwen2.5-8b", "--device", "910B1"]) == 2
    assert "Did you mean qwen2.5-7b?" in capsys.readouterr().err
