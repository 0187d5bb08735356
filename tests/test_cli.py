"""The command line: exit codes, messages without tracebacks, and the two commands end to end."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_fixture import make_model_with_tokenizer, make_result, write_recipe
from tiny_models import make_model

import ascend_kv
from ascend_kv import cli
from ascend_kv.evaluate import main_job

PLAN = ["--memory", "1MB", "--max-model-len", "64", "--prompt", "20", "--output", "12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.yaml")


def test_bench_end_to_end(
    model: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", str(recipe), "--model", str(model), "--device", "cpu", "--quick"]
    output = tmp_path / "out"
    assert cli.main([*arguments, "--output", str(output), "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)  # nothing else is on standard output
    assert result == json.loads((output / "report.json").read_text())
    assert result["complete"] and result["quick"] and result["workload"]["requests"] == 6
    assert len(result["schemes"]) == 5
    assert "Throughput under one KV budget" in printed.err
    names = {entry.name for entry in output.iterdir()}
    plots = {"throughput.png", "memory.png", "utilisation.png"}
    assert names == {"report.md", "report.json"} | plots


def test_tables_go_to_standard_output_and_the_report_beside_the_user(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main_job, "run_main_job", lambda *_: make_result())
    assert cli.main(["bench", str(recipe)]) == 0
    printed = capsys.readouterr()
    assert "Throughput under one KV budget" in printed.out
    assert "Throughput" not in printed.err
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.md").exists() and str(run.relative_to(tmp_path)) in printed.err


def test_a_disk_that_fills_up_costs_the_report_but_not_the_tables(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(main_job, "run_main_job", lambda *_: make_result())
    monkeypatch.setattr(os, "replace", full_disk)
    assert cli.main(["bench", str(recipe), "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "2.50x" in printed.out
    assert "No space left on device" in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(ascend_kv.RunError("it broke"), 1), (ascend_kv.UsageError("a", "b", "c"), 2),
     (KeyboardInterrupt(), 130), (ZeroDivisionError(), 1)],
)  # fmt: skip
def test_a_job_that_breaks_off_leaves_a_report_of_what_was_done(
    error: BaseException,
    code: int,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def break_off(*arguments: Any) -> None:
        result = make_result()
        result.complete, result.perplexity = False, None
        arguments[-1](result)
        raise error

    monkeypatch.setattr(main_job, "run_main_job", break_off)
    output = tmp_path / "out"
    assert cli.main(["bench", str(recipe), "--output", str(output)]) == code
    names = {entry.name for entry in output.iterdir()}
    plots = {"throughput.png", "memory.png", "utilisation.png"}
    assert names == {"report.md", "report.json"} | plots
    text = (output / "report.md").read_text()
    assert "Unfinished" in text and "| paged INT8 | int8 | 7.5 (8) | 125.0 |" in text
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(("ascend-kv: ", "This is a fault")) and "report.md" in said[1]


def test_a_job_that_breaks_off_on_a_full_disk_still_says_why(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def break_off(*arguments: Any) -> None:
        arguments[-1](make_result())
        raise ascend_kv.UsageError("late", 1, "2")

    monkeypatch.setattr(main_job, "run_main_job", break_off)
    monkeypatch.setattr(os, "replace", full_disk)
    assert cli.main(["bench", str(recipe), "--output", str(tmp_path / "out")]) == 2
    assert "late: got 1; legal: 2" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan", "qwen2.5-7b", "--device", "910B1"], ["doctor"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_fault(arguments: list[str], form: list[str]) -> None:
    command = [sys.executable, "-m", "ascend_kv", *arguments, *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_output_that_is_no_directory_fails_before_the_model_is_loaded(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_job, "run_main_job", lambda *_: pytest.fail("too late"))
    assert cli.main(["bench", str(recipe), "--output", str(recipe / "below")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bench", "RECIPE", "--model", "/no/such/model"], 2, "model: got '/no/such/model'"),
        (["bench", "/no/such.yaml"], 2, "recipe: got '/no/such.yaml'"),
        (["bench", "RECIPE", "--text", "/no/such.txt"], 2, "text: got '/no/such.txt'"),
        (["plan", "MODEL", "--memory", "lots"], 2, "--memory: got 'lots'"),
        (["plan", "", *PLAN], 2, "model: got ''"),
        (["plan", "MODEL", *PLAN, "--memory", "1KB"], 2, "--memory: got 1000; legal: "),
        (
            ["plan", "MODEL", *PLAN, "--device", "910B3", "--memory", "64.1GiB"],
            2,
            "--memory: got '64.10 GiB'; legal: at most ",
        ),
        (["plan", "MODEL", *PLAN, "--formats", "int3"], 2, "--formats: got 'int3'"),
        (["plan", "MODEL", *PLAN, "--formats", ""], 2, "--formats: got ''; legal: auto, "),
        (["plan", "MODEL", *PLAN, "--granularity", "row"], 2, "--granularity: got 'row'"),
        (["plan", "MODEL", *PLAN, "--granularity", "group"], 2, "--group-size: got None"),
        (["plan", "MODEL", *PLAN, "--scale-type", "fixed"], 2, "--scale-type: got 'fixed'"),
        (["plan", "MODEL", *PLAN, "--device", "910C"], 2, "--device: got '910C'"),
        (["plan", "MODEL", *PLAN, "--device", "910B1", "--block-size", "24"], 2, "--block-size"),
        (["plan", "MODEL", *PLAN, "--skip-layers", "7"], 2, "--skip-layers: got 7; legal: -3 to 2"),
        (["plan", "MODEL", *PLAN, "--skip-layers", "a"], 2, "--skip-layers: got 'a'"),
        (["plan", "MODEL", *PLAN, "--prompt", "0"], 2, "--prompt: got 0; legal: 1 or more"),
        (["plan", "MODEL", *PLAN, "--output", "0"], 2, "--output: got 0; legal: 1 or more"),
        (["bench", "RECIPE", "--model", ""], 2, "model: got ''"),
        (["plan", "MODEL", *PLAN, "--max-model-len", "9999"], 2, "--max-model-len: got 9999"),
        (["plan", "MODEL", *PLAN, "--max-model-len", "1"], 2, "--max-model-len: got 1"),
        (["plan", "MODEL", *PLAN, "--prompt", "60"], 2, "--prompt and --output: got '60 + 12'"),
    ],
)
def test_mistakes_end_with_a_message_and_a_code(
    arguments: list[str],
    code: int,
    message: str,
    model: Path,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RECIPE": str(recipe), "MODEL": str(model)}
    assert cli.main([places.get(argument, argument) for argument in arguments]) == code
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "/x/y: No space left"),
        (ascend_kv.RunError("it broke"), 1, "ascend-kv: it broke"),
        (ascend_kv.UsageError("a", "b", "c"), 2, "a: got 'b'; legal: c"),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError: by zero"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(main_job, "run_main_job", fail)
    arguments = ["bench", str(recipe), "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == code
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
    monkeypatch.setenv("ASCEND_KV_DEBUG", "1")
    cli.main(arguments)
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)
    monkeypatch.setenv("ASCEND_KV_DEBUG", "0")
    cli.main([*arguments, "--debug"])
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)


@pytest.mark.parametrize("arguments", [[], ["tune"], ["bench"], ["bench", "x", "--fast"]])
def test_unknown_commands_and_options_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["bench", "plan"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown and f"  ascend-kv {command} " in shown


def plan_policies(
    model: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, dict[str, Any]]:
    """The policies of ``ascend-kv plan --json`` by scheme, with blocks of four tokens."""
    arguments = ["plan", str(model), *PLAN, "--block-size", "4", "--json", *options]
    assert cli.main(arguments) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    return {policy["scheme"]: policy for policy in policies}


def test_plan_counts_sequences(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = plan_policies(model, capsys)
    # 3 layers, 2 KV heads of 8: 192 bytes a token in half precision, 96 + 48 of scales in INT8
    paged, contiguous = (policies["float16"][name] for name in ("paged", "contiguous"))
    assert paged["token_bytes"] == 192
    assert policies["int8/token_head"]["paged"]["token_bytes"] == 144
    # 1,000,000 bytes // (4 x 192) = 1,302 blocks; 16 blocks hold 64 tokens, 8 hold the 31 that
    # are stored of 20 + 12
    assert paged["num_blocks"] == 1302
    assert (paged["sequences_full_length"], paged["sequences_mean"]) == (81, 1302 / 8)
    assert (contiguous["sequences_full_length"], contiguous["sequences_live"]) == (81, 81.0)
    # 5, 5 and then 6, 7, 8 blocks in 12 steps: from the next sequence on some are preempted
    assert policies["float16"]["preemption_from"] == int(paged["sequences_live"]) + 1
    assert policies["float16"]["longest_context"] == 256  # the model's; the cache has 5,208 slots


def test_plan_shows_the_same_as_tables(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(model), *PLAN, "--block-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "Memory of one cpu (predicted)" in shown
    (row,) = [line.split() for line in shown.splitlines() if "paged float16" in line]
    assert row[2:6] == ["192", "1,302", "of", "4"]
    assert "add --calibrate" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "scheme", "token_bytes", "blocks"),
    [
        # 96 + 2 scales of 4 bytes a vector; 1,000,000 // (4 x 192)
        (["--granularity", "group", "--group-size", "4"], "int8/group4", 192, 1302),
        # 3 layers x 2 sides x 2 heads x 8 channels x 4 bytes once: (1,000,000 - 384) // (4 x 96)
        (
            ["--granularity", "channel", "--scale-type", "static"],
            "int8/channel/static",
            96,
            2603,
        ),
        # 96 + a scale and a zero point of 4 bytes a vector
        (["--asymmetric"], "int8/token_head/asymmetric", 192, 1302),
        # the last layer in float32, 128 bytes; two at 32 + 16: 1,000,000 // (4 x 224)
        (["--skip-layers=-1"], "2 x int8/token_head, 1 x float32", 224, 1116),
    ],
)
def test_plan_knows_every_kind_of_scale(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    scheme: str,
    token_bytes: int,
    blocks: int,
) -> None:
    plan = plan_policies(model, capsys, *options)[scheme]["paged"]
    assert (plan["token_bytes"], plan["num_blocks"]) == (token_bytes, blocks)


def test_plan_explains_both_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path)
    assert cli.main(["plan", str(tmp_path), *PLAN, "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 x 3 layers x 2 KV heads x 8 x 2 bytes = 192 bytes a token" in shown
    assert "2 x 3 layers x 6 heads x 8 x 2 bytes = 576 bytes a token" in shown
    assert shown.count("If every query head kept its own key") == 1


def test_plan_loads_no_torch(model: Path) -> None:
    code = (
        "import sys; from ascend_kv.cli import main; "
        f"main(['plan', {str(model)!r}, *{PLAN}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_log_has_no_progress_bars_of_other_libraries(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", max_model_len=512)  # ends after loading
    done = subprocess.run(
        [sys.executable, "-m", "ascend_kv", "bench", str(recipe), "--model", str(model),
         "--device", "cpu", "--output", str(tmp_path / "out")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "Report", "Model", "ascend-kv",
    ]  # fmt: skip


def test_the_installed_command_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ascend_kv", "--version"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"ascend-kv {ascend_kv.__version__}\n"


@pytest.mark.parametrize("command", ["bench", "eval"])
def test_a_mistake_leaves_no_folder_behind(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml")
    arguments = [str(recipe)] if command == "bench" else []
    output = tmp_path / "new" / "out"
    flags = ["--model", str(model), "--device", "cpu", "--output", str(output)]
    assert cli.main([command, *arguments, *flags, "--text", str(tmp_path / "missing.txt")]) == 2
    assert "missing.txt" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("")
    assert cli.main([command, *arguments, *flags, "--text", str(tmp_path / "missing.txt")]) == 2
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine"]
