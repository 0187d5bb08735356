"""Reports: what they show, the documented layout of report.json, and disks that are full."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fixture import make_result
from rich.console import Console

from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate import plots, report
from ascend_kv.evaluate.console import Log, print_table
from ascend_kv.text_table import TextTable

DOCUMENT = Path(__file__).parents[1] / "recipes" / "qwen_910b.md"
PNG = b"\x89PNG\r\n\x1a\n"


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all leaves: ``schemes[].measured.steps``; free-form mappings end in ``.*``."""
    if path in ("recipe", "operators", "machine.versions"):
        yield f"{path}.*"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from keys_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        yield from keys_of(value[0], f"{path}[]")
    else:
        yield path


def test_every_key_of_the_json_report_is_documented_and_no_other(tmp_path: Path) -> None:
    report.write_json(make_result(), tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    documented = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(set(keys_of(written)))
    assert f"`{written['schema']}`" in DOCUMENT.read_text()


def test_json_holds_the_figures(tmp_path: Path) -> None:
    result = make_result()
    report.write_json(result, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["schemes"][1]["measured"]["tokens_per_second"] == 125.0
    assert written["schemes"][1]["predicted"]["sequences_live"] == 11.25
    assert written["perplexity"]["formats"][1]["ratio_low"] == 0.9996
    assert written["machine"]["processor"] == "Some Processor"
    assert written["workload"]["total_mean"] == 140.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_an_unfinished_report_can_be_written(tmp_path: Path) -> None:
    result = make_result()
    result.schemes, result.perplexity, result.sweep, result.complete = [], None, None, False
    report.write_report(result, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["complete"] is False and written["perplexity"] is None
    assert "Unfinished" in (tmp_path / "report.md").read_text()


def test_a_cpu_has_no_attention_routes(tmp_path: Path) -> None:
    result = make_result()
    result.attention_routes = []
    report.write_report(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "fused attention: not used" in text and "fused attention read on" not in text


def test_markdown_shows_everything(tmp_path: Path) -> None:
    report.write_report(make_result(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| paged INT8 | int8 | 7.5"))
    assert row == (
        "| paged INT8 | int8 | 7.5 (8) | 125.0 | 2.50x | 1.37 MiB | 96.0% | 3 | 1,234 "
        "| +0.080 % [-0.040, +0.200] |"
    )
    assert "| contiguous 16-bit | float16 | 7.5 (8) | 50.0 | 1.00x |" in text
    assert "| paged INT8 | 8.5 | 11.2 | 8 | 7.5 | 8 | 1,440,000 | 1,440,000 |" in text
    assert "| contiguous 16-bit | 75.0 | 50.0 | +50% | 0.80x | +20% |" in text
    assert "| together | paged INT8 | contiguous 16-bit | 2.50x |" in text
    assert "| int8 | 12.5100 | +0.080 % [-0.040, +0.200] | pair scales | 9.0 |" in text
    assert "| unquantized | 8.250 | reference | 0.00% | 100.0% | keys as" in text
    assert "| INT8 as it is | 66.000 | +700.00 % | 75.00% | 25.0% | keys as" in text
    assert "| 8 | 130.0 | 61.5 |" in text
    assert "Some Processor, 2 cores, 2 threads" in text
    assert "log-normal with mean 12, sigma 0.3, clipped to 4 to 32" in text
    assert "mean 80 as drawn" in text and "some text (5,000 tokens)" in text
    assert "> one\n> three" in text and "4 of 9 tokens equal" in text
    assert "equal those of the geometry to the byte" in text
    assert "called them or not: kv_cache_store: reference. CANN's fused attention: see" in text
    assert "| contiguous 16-bit | decode: loaded (cache type) | 1,200 | cache type |" in text
    assert "| paged INT8 | decode: paged | 34 | - |" in text
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert text.count("![") == 3


def test_every_table_says_what_kind_of_figures_it_holds() -> None:
    titles = re.findall(r"^## (.*)$", report.markdown(make_result(), []), re.MULTILINE)
    assert len(titles) == 9
    for title in titles:
        assert re.search(r"\((measured|predicted)\b.*\)$", title), title


def test_bytes_that_differ_from_the_geometry_are_shouted_about() -> None:
    result = make_result()
    scheme = result.schemes[1]
    result.schemes[1] = replace(scheme, measured=replace(scheme.measured, kv_geometry_bytes=7))
    text = report.markdown(result, [])
    assert "ALLOCATED BYTES DIFFER FROM GEOMETRY: paged INT8: 1,440,000 allocated, 7 by" in text
    assert "to the byte" not in text


def test_terminal_shows_the_tables() -> None:
    stream = io.StringIO()
    report.show(make_result(), Console(file=stream, width=140))
    shown = stream.getvalue()
    for expected in ("2.50x", "+0.080 % [-0.040, +0.200]", "96.0%", "together", "Some Processor"):
        assert expected in shown


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_and_leaves_the_older_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.write_json(make_result(), tmp_path)
    before = (tmp_path / "report.json").read_text()
    result = make_result()
    result.quick = False
    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(RunError, match=r"report\.json.*No space left.*Name another place"):
        report.write_json(result, tmp_path)
    assert (tmp_path / "report.json").read_text() == before


def test_a_full_disk_for_the_plots_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascend_kv.evaluate.plots.Figure.savefig", full_disk)
    with pytest.raises(RunError, match="No space left"):
        report.write_report(make_result(), tmp_path)


def test_while_the_job_runs_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    save = report.Saver(tmp_path, Log(Console(file=said, width=200)))
    save(make_result())
    assert (tmp_path / "report.json").exists() and said.getvalue() == ""
    monkeypatch.setattr(Path, "write_text", full_disk)
    save(make_result())
    save(make_result())
    assert said.getvalue().count("No space left on device") == 1


def test_the_directory_is_tried_before_the_work(tmp_path: Path) -> None:
    report.prepare_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(RunError, match=r"file.*cannot be written.*Name another place"):
            report.prepare_directory(tmp_path / place)


def test_a_report_of_another_command_is_not_overwritten(tmp_path: Path) -> None:
    report.write_json(make_result(), tmp_path)
    before = (tmp_path / "report.json").read_text()
    with report.output_directory(tmp_path, "ascend_kv.bench/2"):
        pass
    other = report.output_directory(tmp_path, "ascend_kv.eval/1")
    with pytest.raises(UsageError, match=r"--output.*ascend_kv\.bench/1"), other:
        pass
    assert (tmp_path / "report.json").read_text() == before
    for nothing in ("{", "[]", "{}"):
        (tmp_path / "report.json").write_text(nothing)
        with report.output_directory(tmp_path, "ascend_kv.eval/1"):
            pass


def test_a_disk_already_full_is_noticed_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(RunError, match="No space left"):
        report.prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_legend_and_no_note_of_a_plot_lies_over_a_figure() -> None:
    result = make_result()
    long = "a scheme with quite a long name"
    result.schemes = [replace(s, name=f"{long} {i}") for i, s in enumerate(result.schemes * 3)]
    for draw in (plots._memory, plots._utilisation):
        figure = draw(result)
        figure.savefig(io.BytesIO())
        (axes,) = figure.axes
        frame, inside = figure.bbox, axes.get_window_extent()
        outside = [axes.get_legend().get_window_extent()]
        outside += [text.get_window_extent() for text in axes.texts]
        for box in outside:
            assert not box.overlaps(inside)
            assert frame.x0 < box.x0 and box.x1 < frame.x1 - 5 and frame.y0 < box.y0
        source = figure._supxlabel.get_window_extent()
        assert not outside[0].overlaps(source)


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (140, False)])
def test_no_figure_of_a_table_loses_a_digit(width: int, terminal: bool) -> None:
    rows = [(f"scheme {i}", *(f"{i}.123456 | {j}.987654" for j in range(20))) for i in range(3)]
    table = TextTable("Wide", ("name", *(f"column {j}" for j in range(20))), rows, [])
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, no_color=True)
    print_table(table, console)
    for row in rows:
        for cell in row:
            assert all(word in written.getvalue() for word in cell.split()), cell
    assert console.width == width
