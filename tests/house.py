"""The rules of the house, read from the source: who may import whom, and what stays light.

``find_violations`` reads the imports of every file of a package with ``ast``, those inside
functions and ``TYPE_CHECKING`` blocks too, and returns one line for each that breaks a rule.
The same table stands, for people, in CONTRIBUTING.md; a test compares the two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "ascend_kv"

# From the ground up. A room imports from the floors below its own, never from its own floor and
# never from above; inside a room everything may import everything.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("model_config",),
    ("architectures", "cache_formats", "compressed_layers", "gguf_header", "untrained_compression"),
    ("format_names",),
    (
        *("geometry", "devices", "build_targets", "registry", "metrics"),
        *("text_table", "plot_style", "whole_files"),
    ),
    ("model_files", "user_values"),
    ("config",),
    ("resolved_cache",),
    ("formats",),
    ("ops",),
    ("quantize", "cache", "compress", "evict"),
    ("engine",),
    ("integrations", "plan"),
    ("llm_engine",),
    ("llm",),
    ("evaluate", "profile", "serve"),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Modules (and all below them) that work without torch. Annotations may still name its types.
NO_TORCH = (
    *(room for rooms in FLOORS[: FLOOR_OF["resolved_cache"] + 1] for room in rooms),
    "cache.blocks",
    "cache.tables",
    "cache.group_tables",
    "cache.stats",
    "cache.untrained_tables",
    "engine.detokenizer",
    "engine.outputs",
    "engine.params",
    "engine.request",
    "engine.batch",
    "engine.scheduler",
    "engine.stats",
    "plan",
    "profile",
)
# A foreign library, and the only place that may import it.
ONLY_IN = {
    "torch_npu": "ops.platform",
    "cann_ops_transformer": "ops.platform",
    "transformers": "integrations",
    "vllm": "integrations",
}


class Import(NamedTuple):
    """One imported module, ``ascend_kv.ops`` or ``torch.nn``."""

    target: str
    line: int
    for_types: bool


def module_name(path: Path, package: Path) -> str:
    """The dotted name inside the package: ``cache.blocks``, ``cache`` or "" for the package."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(path: Path, package: Path) -> Iterator[Import]:
    """Every import of a file, wherever it stands, relative ones made absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for target in _targets(node, path, package):
            yield Import(target, node.lineno, id(node) in for_types)  # type: ignore[attr-defined]


def _targets(node: ast.AST, path: Path, package: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            here = (PACKAGE, *path.relative_to(package).parts)
            above = here[: len(here) - node.level]
            source = ".".join((*above, *([source] if source else [])))
        if source == PACKAGE:  # `from ascend_kv import ops`: the names are rooms
            yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
        elif source:
            yield source
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _is_in(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def find_violations(package: Path) -> list[str]:
    """What breaks the rules in the package at ``package``, one line each, with file and line."""
    violations = []
    for path in sorted(package.rglob("*.py")):
        module = module_name(path, package)
        room = module.split(".")[0]
        where = path.relative_to(package.parent).as_posix()
        if not module:
            continue  # the package itself is lazy: a test of its own sees that it stays so
        if room not in FLOOR_OF:
            violations.append(f"{where}: the room {room!r} is on no floor")
            continue
        for imported in read_imports(path, package):
            complaint = _judge(module, room, imported)
            if complaint:
                violations.append(f"{where}:{imported.line}: {complaint}")
        violations.extend(f"{where}:{line}: {text}" for line, text in _names_npu(path, module))
    return violations


def _judge(module: str, room: str, imported: Import) -> str | None:
    top = imported.target.split(".")[0]
    if top == PACKAGE:
        other = imported.target.split(".")[1] if "." in imported.target else ""
        if other.startswith("__") or other == room:
            return None
        if other not in FLOOR_OF:
            return f"imports {imported.target}, which is no room: import from the room itself"
        if FLOOR_OF[other] >= FLOOR_OF[room]:
            floor = "its own floor" if FLOOR_OF[other] == FLOOR_OF[room] else "above"
            return f"{room} imports {other}, which is on {floor}"
    elif top == "torch" and not imported.for_types:
        if any(_is_in(module, light) for light in NO_TORCH):
            return f"{module} imports torch and must work without it"
    elif top in ONLY_IN and not _is_in(module, ONLY_IN[top]):
        return f"imports {top}, which only {ONLY_IN[top]} may"
    return None


def _names_npu(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """``torch.npu`` is torch_npu under another name, so it has the same place."""
    if module == ONLY_IN["torch_npu"]:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.npu":
            yield node.lineno, f"uses torch.npu, which only {ONLY_IN['torch_npu']} may"
        if isinstance(node, ast.Name) and node.id == "torch_npu":
            yield node.lineno, f"uses torch_npu, which only {ONLY_IN['torch_npu']} may"
