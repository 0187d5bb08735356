"""The operators' bench: its report from end to end, and what its plot shows."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from ascend_kv.evaluate.operator_plot import draw_operators
from ascend_kv.ops.registration import has_kernel

ROOT = Path(__file__).resolve().parents[1]


def row(shape: str, context: int, **changes: Any) -> dict[str, Any]:
    given = {
        "operator": "paged_attention decode",
        "format": "int8",
        "shape": shape,
        "batch": 2,
        "context": context,
        "implementation": "native",
        "median_seconds": context * 1e-6,
        "fraction_of_limit": 0.5,
    }
    return given | changes


def drawn(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_operators(report, "a machine", Path("ops.png"))
    (figure,) = figures
    return figure


def points(axes: Any) -> dict[str, list[list[float]]]:
    return {dots.get_label(): dots.get_offsets().tolist() for dots in axes.collections}


def test_plot_shows_native_fractions_and_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "operators": [
            row("9/3x64", 1000),
            row("9/3x64", 4000, fraction_of_limit=0.75),
            row("9/3x64", 1000, implementation="reference", fraction_of_limit=0.01),
            row("9/3x64", 4000, operator="kv_cache_store", fraction_of_limit=0.25),
            row("8/8x128", 4000, format="bfloat16", fraction_of_limit=0.6),
        ],
        "fits": [{"shape": "9/3x64", "start_seconds": 1e-3, "seconds_per_token": 1e-6}],
    }
    above, below = drawn(report, monkeypatch).axes
    names = [label.get_text() for label in above.get_yticklabels()]
    assert names == [
        *("paged_attention decode, int8", "kv_cache_store, int8"),
        "paged_attention decode, bfloat16",
    ]
    pale = [dots.get_alpha() for dots in above.collections]
    assert [list(alpha) for alpha in pale] == [[0.35, 1, 1], [1]]
    shown = points(above)
    assert [x for x, _ in shown["9/3x64"]] == [0.5, 0.75, 0.25]
    assert [round(y) for _, y in shown["9/3x64"]] == [0, 0, 1]
    assert [(x, round(y)) for x, y in shown["8/8x128"]] == [(0.6, 2)]
    # the reference is not drawn; other shapes than the fitted one have no INT8 decode here
    assert points(below) == {"9/3x64": [[2000, 1], [8000, 4]]}
    (line,) = below.lines
    x, y = line.get_data()
    assert list(x) == [2000, 8000] and list(y) == pytest.approx([3, 9])


def test_plot_without_native_operators_is_empty_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = {"operators": [row("9/3x64", 1000, implementation="reference")], "fits": []}
    above, below = drawn(report, monkeypatch).axes
    assert points(above) == points(below) == {}


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ops", ROOT / "tools/bench_ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, plot = tool(), tmp_path / "ops.png"
    monkeypatch.setattr(bench, "BANDWIDTH_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "MATMUL_SIZE", 32)
    sizes = ["--shape", "4/2x16", "--context", "16", "32", "64", "--batch", "1", "--prompt", "5"]
    options = ["--seconds", "0.001", "--threads", "1", "--json", "--plot", str(plot)]
    assert bench.main([*sizes, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    bench.show(report)
    shown = capsys.readouterr().out
    assert "float32 matrix product" in shown and "kv_cache_store" in shown
    assert all(0 < of["median"] <= of["best"] for of in report["limits"].values())
    served = {"reference"} | ({"native"} if has_kernel("paged_attention", "cpu") else set())
    decodes = [r for r in report["operators"] if r["operator"] == "paged_attention decode"]
    assert served <= {r["implementation"] for r in decodes}
    assert {r["context"] for r in decodes} == {16, 32, 64}
    for r in report["operators"]:
        assert r["runs"] >= 5 and r["fraction_of_limit"] > 0, r
        assert r["fraction_of_limit"] == r["limit_seconds"] / r["median_seconds"]
    assert [fit["shape"] for fit in report["fits"]] == (["4/2x16"] if "native" in served else [])
    assert plot.read_bytes().startswith(b"\x89PNG")
    costs = [(cost["operator"], cost["context"]) for cost in report["offset_costs"]]
    decodes = [("paged_attention decode", context) for context in (16, 32, 64)]
    expected = [*decodes, ("paged_attention prefill", 5)] if "native" in served else []
    assert costs == expected


@pytest.mark.parametrize(
    "words",
    [
        *(["--context", "16", "0"], ["--batch", "-1"], ["--prompt", "0"], ["--threads", "0"]),
        *(["--seconds", "nan"], ["--shape", "foo"], ["--shape", "3/2x64"], ["--shape", "0/1x8"]),
    ],
)
def test_mistakes_name_the_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool().main(words) == 2
    printed = capsys.readouterr()
    assert f"{words[0]}: got" in printed.err and not printed.out


def test_a_plot_is_tried_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tool()
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("it measured"))
    assert bench.main(["--plot", str(tmp_path / "gone" / "x.png")]) == 1
    assert "x.png cannot be written" in capsys.readouterr().err


class Clock:
    """Calls that take so many seconds each, one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.took = 0.0, list[float]()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def call(self, *seconds: float) -> Callable[[], None]:
        left = itertools.cycle(seconds)

        def run() -> None:
            self.took.append(next(left))
            self.now += self.took[-1]

        return run


def test_slow_calls_skip_turns_of_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = tool().take_turns({"fast": clock.call(1), "slow": clock.call(100)}, 2000)
    assert len(times["fast"]) == 2000
    assert 20 <= len(times["slow"]) <= 2000 * 4 // 100 + 1
    quarter = len(clock.took) // 4  # all along, not in the first turns only
    assert all(100 in clock.took[n * quarter : (n + 1) * quarter] for n in range(4))


def test_limits_are_those_of_the_same_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, clock = tool(), Clock(monkeypatch)
    probes = {
        "read": bench.Probe(clock.call(1, 2, 3), 100, []),
        "multiply": bench.Probe(clock.call(5), 1000, []),
        "copy": bench.Probe(clock.call(1), 1, []),
    }
    calls = {"native": clock.call(4, 10, 10), "reference": clock.call(40)}
    case = bench.Case("paged_attention decode", {}, calls, {"read": 300, "multiply": 1000})
    native, reference = bench.measure(case, probes, 60)
    # reading 300 takes 3 of the probe's calls: 6 s by the median, 3 s at best, and multiplying 5
    assert native["limit"] == "read" and native["limit_seconds"] == 6
    assert native["fraction_of_limit"] == pytest.approx(6 / 10)
    assert native["best_fraction_of_limit"] == pytest.approx(3 / 4)
    assert reference["fraction_of_limit"] == pytest.approx(6 / 40)
    assert set(probes["read"].rates) == {100, 50, 100 / 3} and not probes["copy"].rates


def test_what_an_offset_adds() -> None:
    plain = row("9/3x64", 1000, median_seconds=2.0)
    rows = [
        plain,
        plain | {"implementation": "native + offset", "median_seconds": 2.5},
        plain | {"context": 2000, "median_seconds": 9.0},
        plain | {"format": "bfloat16", "median_seconds": 1.0},
    ]
    (cost,) = tool().offset_costs(rows)
    assert cost["context"] == 1000 and cost["added"] == pytest.approx(0.25)


def test_lines_are_fitted_to_relative_errors() -> None:
    def decode(batch: int, context: int, seconds: float) -> dict[str, object]:
        return row("9/3x64", context, batch=batch, median_seconds=seconds)

    exact = [decode(b, c, 1e-5 + 2e-8 * b * c) for b in (1, 8) for c in (1000, 30000)]
    (fit,) = tool().fit_lines(exact)
    assert fit["start_seconds"] == pytest.approx(1e-5) and fit["points"] == 4
    assert fit["seconds_per_token"] == pytest.approx(2e-8)
    assert fit["worst_relative_error"] < 1e-6
    # A tenth more at the longest moves the line of absolute errors far from the shortest.
    (fit,) = tool().fit_lines([*exact[:-1], decode(8, 30000, 1.1 * (1e-5 + 2e-8 * 240000))])
    assert fit["worst_relative_error"] < 0.1
