"""What documents and packaging name must exist: commands, flags, files, code, versions."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import ascend_kv
from ascend_kv.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "recipes").glob("*.md"),
    ROOT / "op_kernels" / "README.md",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(document: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Every command line in the documents, with the document's name."""
    return [
        (document.name, line)
        for document in DOCUMENTS
        for block in blocks(document, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def help_of_tool(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / path))["main"](["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("document", "line"), commands())
def test_command_in_a_document_exists(
    document: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        known = help_of("bench", capsys) if "recipes/" in words[1] else ""
    elif words[0] == "ascend-kv":
        known = help_of(words[1], capsys)
    elif words[:1] == ["python"] and words[1].startswith("tools/"):
        known = help_of_tool(words[1], capsys)
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\.\[(.+?)\]", line)
        assert set(extras) <= set(PROJECT["optional-dependencies"])
        known = None
    else:
        return  # git, source and the like
    for flag in words if known else []:
        if flag.startswith("--"):
            assert re.search(rf"(?<![\w-]){flag.split('=')[0]}(?![\w-])", known or ""), flag
    for path in re.findall(r"(?:recipes|tools|tests)/[\w./-]+", line):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_a_document_compiles_and_imports_what_exists(document: Path) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "ascend_kv":
                assert {alias.name for alias in node.names} <= set(ascend_kv.__all__)


def test_quantizer_example_of_the_readme_runs() -> None:
    (example,) = [code for code in blocks(ROOT / "README.md", "python") if "KVCacheQ" in code]
    names: dict[str, object] = {}
    exec(example, names)
    for before, after in (("keys", "keys_again"), ("values", "values_again")):
        assert abs(names[before] - names[after]).max() < 0.05  # type: ignore[operator]


def test_compressor_example_of_the_readme_runs() -> None:
    (example,) = [code for code in blocks(ROOT / "README.md", "python") if "HCACompressor" in code]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["k_c"].shape == (1, 4, 7, 64) and names["v_new"].shape == (1, 4, 1, 64)
    assert (names["k_again"][:, :, 895] == names["k_c"][:, :, 6]).all()
    assert names["compressor"].num_tokens == 1024


def constraints() -> dict[str, list[Requirement]]:
    """The pinned versions by normalised name; some names have one for each Python."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins.setdefault(normalise(pin.name), []).append(pin)
    return pins


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_everything_needed_is_pinned_within_its_bounds_for_every_python() -> None:
    pins = constraints()
    extras = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(need for extra in extras for need in extra)]:
        need = Requirement(text)
        for python in ("3.10", "3.11", "3.12", "3.13"):
            if need.marker and not need.marker.evaluate({"python_version": python}):
                continue
            fitting = [
                pin
                for pin in pins.get(normalise(need.name), [])
                if not pin.marker or pin.marker.evaluate({"python_version": python})
            ]
            assert len(fitting) == 1, (text, python)
            (version,) = fitting[0].specifier
            assert version.operator == "==" and version.version in need.specifier, text


def test_torch_and_torch_npu_go_together() -> None:
    pins = constraints()
    assert pins["torch"][0].specifier == pins["torch-npu"][0].specifier


def test_what_the_package_imports_is_declared() -> None:
    distributions = {"yaml": "pyyaml"}
    declared = {normalise(Requirement(text).name) for text in PROJECT["dependencies"]}
    declared |= {"torch-npu", "ascend-kv"}
    for path in (ROOT / "ascend_kv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for top in {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names):
                name = normalise(distributions.get(top, top))
                assert name in declared, f"{path.name} imports {top}"
