"""The bench beside other engines: arithmetic, protocol, what is said of an engine that is absent.

Stand-ins play the engines; nothing is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_model

from ascend_kv.errors import RunError
from ascend_kv.evaluate import peer_report, peers
from ascend_kv.evaluate.peers import Outcome, Peer, PeerError, Plan, Worker, compare

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests/stand_in_engine.py"
PLAN = Plan(Path("model.gguf"), (10, 30), turns=3, steps=2, threads=3)


@pytest.fixture(autouse=True)
def protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOCOL", str(ROOT / "tools/peers"))
    monkeypatch.setenv("PATH", os.defpath)


def stand_in(*variants: str, installs: tuple[tuple[str, ...], ...] = ()) -> Peer:
    return Peer("stand-in", STAND_IN, variants, installs)


def run(peer: Peer, folder: Path, plan: Plan = PLAN) -> list[Outcome]:
    return compare([(peer, variant) for variant in peer.variants], folder, plan, lambda _: None)


def measured(peer: str, variant: str, short: list[float], long: list[float]) -> Outcome:
    return Outcome(peer, variant, None, "weights", {"x": "1"}, {7000: long, 1000: short})


def test_marginal_cost_is_the_difference_by_turn_over_the_difference_of_contexts() -> None:
    outcome = measured("a", "b", [1.0, 2.0, 10.0], [7.0, 14.0, 16.0])
    assert outcome.marginal_seconds() == [0.001, 0.002, 0.001]
    (row,) = peer_report.as_rows([outcome], "int8")
    assert row["marginal_median_seconds"] == 0.001
    assert row["marginal_quartile_seconds"] == [0.001, 0.002]
    assert row["marginal_best_seconds"] == 0.001  # (7 - 1) / 6000
    assert row["step_median_seconds"] == {1000: 2.0, 7000: 14.0}
    assert "ratio_to_ours" not in row


def test_ratios_are_to_the_named_cache_of_ours_where_it_was_measured() -> None:
    ours = measured("ascend_kv", "int8", [1.0, 1.0], [4.0, 4.0])
    other = measured("q", "int8", [1.0, 1.0], [13.0, 13.0])
    absent = Outcome("ascend_kv", "float16", "ended")
    assert [r.get("ratio_to_ours") for r in peer_report.as_rows([absent, ours, other], "int8")] == [
        *(None, 1.0, 4.0)
    ]
    # a difference below the noise is no base to divide by
    ours.step_seconds[7000] = [0.5, 0.5]
    assert all("ratio_to_ours" not in row for row in peer_report.as_rows([ours, other], "int8"))


def test_longest_sequence_holds_every_step(tmp_path: Path) -> None:
    assert PLAN.most_tokens == 30 + (3 + 1) * 2 + 1
    (outcome,) = run(stand_in("well"), tmp_path)  # the stand-in would say that it is full
    assert outcome.skipped is None


def test_engines_take_turns_and_noise_does_not_disturb(tmp_path: Path) -> None:
    first, second = run(stand_in("well", "well too"), tmp_path)
    for outcome in (first, second):
        assert outcome.skipped is None
        tools = Path(sys.executable).parent  # as if the environment were activated
        assert outcome.loaded == f"model.gguf, 3 threads, 3 of OpenMP, {tools}"
        assert outcome.versions == {"stand-in": "1.0"}
        assert {c: len(times) for c, times in outcome.step_seconds.items()} == {10: 3, 30: 3}
        # sleeping takes at least as long as asked, and a cache grows
        assert all(t >= 30e-5 for t in outcome.step_seconds[30])


def test_turns_alternate_between_engines_and_the_order_of_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, Any]] = []

    class Recorded:
        def __init__(self, command: Sequence[str], threads: int) -> None:
            self.number = len(made)
            made.append(self)

        def ask(self, **request: Any) -> dict[str, Any]:
            asked.append((self.number, request.get("tokens", request["do"])))
            return {"loaded": "", "versions": {}, "seconds": [3.0, 1.0, 2.0]}

        def close(self) -> None:
            asked.append((self.number, "close"))

    made: list[Recorded] = []
    monkeypatch.setattr(peers, "Worker", Recorded)
    first, _ = run(stand_in("a", "b"), tmp_path, PLAN._replace(turns=1))
    assert asked == [
        *((0, "load"), (0, 10), (0, 30), (1, "load"), (1, 10), (1, 30)),
        *((0, 30), (0, 10), (1, 30), (1, 10)),  # warms up
        *((0, 10), (0, 30), (1, 10), (1, 30)),
        *((1, "close"), (0, "close")),
    ]
    assert first.step_seconds == {10: [2.0], 30: [2.0]}  # the median, without the warm-up


def test_engine_that_fails_is_skipped_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    refuses, ends, later, well = run(stand_in("refuses", "ends", "ends later", "well"), tmp_path)
    assert refuses.skipped == "ValueError: no such cache"
    assert ends.skipped == "ended with exit code 7: out of memory"
    assert later.skipped is not None and later.skipped.startswith("ended with exit code 9: ")
    assert well.skipped is None and len(well.step_seconds[10]) == 3


def test_absent_engine_is_skipped_and_the_way_to_install_it_said(tmp_path: Path) -> None:
    peer = stand_in("any", installs=(("engine==1",),))
    (outcome,) = run(peer, tmp_path)
    assert outcome.skipped == f"not installed in {tmp_path}: --install stand-in"
    (row,) = peer_report.as_rows([outcome], "int8")
    shown = peer_report.table([row], PLAN)
    assert shown.rows == []
    assert shown.notes[-1] == f"Skipped: stand-in, any: {outcome.skipped}"


def test_environment_is_made_once_and_known_by_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    failing = ""

    def play(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(exist_ok=True)
        return SimpleNamespace(returncode=int(bool(failing) and failing in command))

    monkeypatch.setattr(peers.subprocess, "run", play)
    peer = stand_in("any", installs=(("torch",), ("engine==1", "other")))
    failing = "other"
    with pytest.raises(RunError, match="stand-in is not installed: .* other failed"):
        peer.install(tmp_path, Path("pins.txt"))
    assert peer.why_absent(tmp_path), "half an environment is none"
    failing, commands[:] = "", []
    peer.install(tmp_path, Path("pins.txt"))
    assert commands[0] == [sys.executable, "-m", "venv", "--clear", str(tmp_path / "stand-in")]
    python = str(tmp_path / "stand-in/bin/python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-c", "pins.txt"]
    assert commands[1:] == [[*pip, "torch"], [*pip, "engine==1", "other"]]
    assert peer.why_absent(tmp_path) is None
    newer = peer._replace(installs=(("engine==2",),))
    reason = newer.why_absent(tmp_path)
    assert reason == f"in other versions installed in {tmp_path}: --install stand-in"


def test_environment_whose_python_is_gone_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="/bin/python: No such file"):
        Worker([str(tmp_path / "bin/python")], 1)


def test_our_own_engine_serves_the_protocol(tmp_path: Path) -> None:
    model = make_model(tmp_path, vocab_size=21000)
    worker = Worker([sys.executable, str(ROOT / "tools/peers/run_ascend_kv.py")], 1)
    try:
        with pytest.raises(PeerError, match="AssertionError: nothing is loaded"):
            worker.ask(do="prefill", tokens=5)
        load = {"do": "load", "model": str(model), "threads": 1, "most_tokens": 48}
        answer = worker.ask(**load, variant="int8")
        assert answer["versions"].keys() == {"ascend_kv", "transformers", "torch"}
        assert "operators" in answer["loaded"]
        for tokens in (17, 40):
            assert worker.ask(do="prefill", tokens=tokens) == {}
        for tokens in (40, 17):
            seconds = worker.ask(do="decode", tokens=tokens, steps=7)["seconds"]
            assert len(seconds) == 7 and min(seconds) > 0
        with pytest.raises(PeerError, match="UsageError: kv_cache_dtype"):
            worker.ask(**load, variant="int3")
            worker.ask(do="prefill", tokens=5)
    finally:
        worker.close()


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", ROOT / "tools/bench_peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool with stand-ins for engines and for the geometry of a model."""
    module = tool()
    ours = stand_in("int8", "refuses")._replace(name="ascend_kv")
    other = stand_in("any", installs=(("engine==1",),))._replace(name="other")
    monkeypatch.setattr(module, "PEERS", (ours, other))
    geometry = SimpleNamespace(max_position_tokens=100)
    monkeypatch.setattr(module, "load_geometry", lambda _: geometry)
    return module


RUN = ["--model", "model.gguf", "--context", "10", "30", "--turns", "2", "--threads", "1"]


def test_the_tool_writes_json_and_a_plot(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "peers.png"
    options = ["--folder", str(tmp_path), "--json", "--plot", str(plot)]
    assert bench.main([*RUN, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"] == {
        "model": "model.gguf",
        "contexts": [10, 30],
        "turns": 2,
        "steps": 8,
        "threads": 1,
    }
    assert report["load_average_before"] >= 0
    assert [(row["peer"], row["variant"]) for row in report["rows"]] == [
        *(("ascend_kv", "int8"), ("ascend_kv", "refuses"), ("other", "any"))
    ]
    skipped = [row["skipped"] for row in report["rows"]]
    assert skipped[0] is None and "no such cache" in skipped[1] and "--install other" in skipped[2]
    assert len(report["rows"][0]["turn_step_seconds"]["30"]) == 2
    assert "cancels out" in " ".join(report["remarks"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_tool_prints_what_was_and_what_was_not_compared(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*RUN, "--folder", str(tmp_path), "--only", "other", "ascend_kv:int8"]) == 0
    shown = capsys.readouterr().out
    assert "decode, batch 1, 1 threads (measured in 2 turns of 8 tokens)" in shown
    assert "load average before the run" in shown and "stand-in 1.0" in shown
    assert "Compared: " in shown and "Not compared: " in shown
    assert "Skipped: other, any: not installed in" in shown and "refuses" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nobody"], "only: got 'nobody'; legal: ascend_kv, other, ascend_kv:int8"),
        (["--install", "ascend_kv"], "install: got 'ascend_kv'; legal: other"),
        (["--turns", "1"], "turns: got 1; legal: 2 or more"),
        (["--steps", "0"], "steps: got 0"),
        (["--model", "model"], "a .gguf file"),
        (["--context", "30", "30"], "context: got '30 30'"),
        (["--context", "0", "30"], "context: got '0 30'"),
        (["--context", "10", "76"], "rising, up to 75"),  # 75 + 3 turns of 8 and one are 100
    ],
)
def test_the_tool_refuses_by_name(
    bench: ModuleType, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*RUN, *options]) == 2
    assert message in capsys.readouterr().err


def test_every_engine_of_the_tool_has_a_script_that_compiles() -> None:
    for peer in tool().PEERS:
        compile(peer.script.read_text(encoding="utf-8"), str(peer.script), "exec")
        assert peer.variants
    names = {path.name for path in (ROOT / "tools/peers").glob("run_*.py")}
    assert names == {peer.script.name for peer in tool().PEERS}


def test_help_starts_nothing() -> None:
    command = [sys.executable, str(ROOT / "tools/bench_peers.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--install" in done.stdout and done.stderr == ""
