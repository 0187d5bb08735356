"""The house stands as CONTRIBUTING.md describes it: floors, light rooms, names, top level."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest

import ascend_kv

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / house.PACKAGE

# What the checkout's top may hold: the house, and what tools look for there.
TOP_LEVEL = {
    *("setup.py", "ascend_kv", "op_kernels", "recipes", "tests", "tools", "README.md"),
    *("pyproject.toml", "MANIFEST.in", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(".ci", ".github", ".gitignore"),
}
HEAVY = ("torch", "numpy", "transformers", "matplotlib", "rich", "yaml", "huggingface_hub")


def run_python(code: str) -> str:
    """Run code in a fresh interpreter; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_import_goes_down() -> None:
    assert house.find_violations(PACKAGE) == []


BROKEN = {
    "upwards": ("cache/paged.py", "import ascend_kv.engine.batch", "on above"),
    "upwards, by name": ("geometry.py", "from ascend_kv import config", "on above"),
    "upwards, relative": ("ops/store.py", "from ..cache.blocks import BlockPool", "on above"),
    "upwards, in a function": ("engine/a.py", "def f():\n    import ascend_kv.llm", "on above"),
    "upwards, for types": (
        "formats/a.py",
        "if TYPE_CHECKING:\n    from ascend_kv.ops import x",
        "on above",
    ),
    "sideways": ("evict/a.py", "from ascend_kv.cache.blocks import BlockPool", "its own floor"),
    "from the lazy package": ("cli.py", "from ascend_kv import LLM", "no room"),
    "a room on no floor": ("attic.py", "", "on no floor"),
    "torch in a light room": ("plan/capacity.py", "import torch.nn", "without it"),
    "torch, hidden": ("config.py", "def f():\n    from torch import nn", "without it"),
    "torch_npu": ("engine/a.py", "try:\n    import torch_npu\nexcept ImportError: pass", "only"),
    "torch_npu by another name": ("cache/a.py", "import torch\ntorch.npu.synchronize()", "only"),
    "torch_npu, dynamic": ("ops/a.py", "importlib.import_module('torch_npu')", "only"),
    "transformers": ("evaluate/a.py", "from transformers import AutoConfig", "only integrations"),
}
SOUND = {
    "downwards": ("engine/a.py", "from ascend_kv.cache.blocks import BlockPool\nimport torch"),
    "inside the room": ("cache/tables.py", "from .blocks import BlockPool"),
    "from the ground": ("geometry.py", "from ascend_kv.errors import UsageError"),
    "the version": ("cli.py", "from ascend_kv import __version__"),
    "torch for types": ("engine/batch.py", "if TYPE_CHECKING:\n    import torch"),
    "torch_npu in its place": ("ops/platform.py", "import torch_npu\ntorch_npu.npu.synchronize()"),
    "transformers in its place": ("integrations/a.py", "import transformers"),
}


def build(root: Path, name: str, text: str) -> Path:
    package = root / house.PACKAGE
    path = package / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return package


@pytest.mark.parametrize("name", BROKEN)
def test_reader_sees_what_breaks_the_rules(name: str, tmp_path: Path) -> None:
    path, text, complaint = BROKEN[name]
    violations = house.find_violations(build(tmp_path, path, text))
    assert violations and all(complaint in line for line in violations)


@pytest.mark.parametrize("name", SOUND)
def test_reader_lets_pass_what_keeps_them(name: str, tmp_path: Path) -> None:
    assert house.find_violations(build(tmp_path, *SOUND[name])) == []


def test_contributing_shows_the_same_floors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \S+ \| ([^|]+) \|", text, flags=re.MULTILINE)
    told = [re.findall(r"`(\w+?)(?:\.py|/)`", row) for row in rows]
    assert [sorted(rooms) for rooms in told if rooms] == [sorted(rooms) for rooms in house.FLOORS]


def light_modules() -> list[str]:
    """The modules that must work without torch, as they can be imported."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = house.module_name(path, PACKAGE)
        if any(module == light or module.startswith(f"{light}.") for light in house.NO_TORCH):
            names.append(f"{house.PACKAGE}.{module}")
    return names


def test_light_modules_exist() -> None:
    """A module that was renamed must not slip out of the rule."""
    later = {"metrics"}
    missing = [
        name
        for name in house.NO_TORCH
        if name not in later and importlib.util.find_spec(f"{house.PACKAGE}.{name}") is None
    ]
    assert missing == []


def test_light_modules_import_with_torch_blocked() -> None:
    run_python(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torch_npu', 'transformers'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import importlib\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    printed = run_python(
        f"import sys, ascend_kv; print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert printed.strip() == "[]"


def test_public_names_come_from_their_rooms() -> None:
    """``__all__``, the lazy table and what type checkers are told name the same things."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    told = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(told) == set(ascend_kv.__all__) - {"__version__"}
    for name, home in told.items():
        assert getattr(ascend_kv, name).__module__ == home
    assert set(ascend_kv.__all__) <= set(dir(ascend_kv))


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = ascend_kv.LLMs


def test_one_operator_has_one_name() -> None:
    torch = pytest.importorskip("torch")
    from ascend_kv import ops

    prefix = f"{house.PACKAGE}::"
    registered = {
        schema.name.removeprefix(prefix)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(prefix)
    }
    assert registered and set(ops.__all__) == registered
    for name in registered:
        assert (PACKAGE / "ops" / f"{name}.py").is_file(), name
        assert (ROOT / "tests" / "ops" / f"test_{name}.py").is_file(), name
    for path in (ROOT / "tests" / "ops").glob("test_*.py"):
        subject = path.stem.removeprefix("test_").removesuffix("_kernel")
        words = subject.split("_")  # a module's name, and perhaps what of it is tested
        modules = (PACKAGE / "ops" / f"{'_'.join(words[:n])}.py" for n in range(1, len(words) + 1))
        assert any(module.is_file() for module in modules), path.name
    for path in filter(Path.is_dir, (ROOT / "op_kernels").iterdir()):
        assert path.name in registered | {"common", "host", "twin"}, path


def source_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "tools", ROOT / "recipes", ROOT / "op_kernels")
    return [ROOT / "setup.py", *(path for folder in folders for path in folder.rglob("*.py"))]


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in source_files()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_folder_of_the_package_is_a_package() -> None:
    """setuptools leaves out a folder without ``__init__.py``; a checkout would not notice."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_top_level_is_fixed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert names - TOP_LEVEL == set()
