"""The tables of setup.py, without running it."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import Any

_SETUP = Path(__file__).resolve().parents[1] / "setup.py"


@lru_cache
def setup_tables() -> dict[str, Any]:
    """What stands in capitals at its top level and needs no import."""
    tables: dict[str, Any] = {}
    for node in ast.parse(_SETUP.read_text()).body:
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if name.isupper() and name != "ROOT":
            exec(compile(ast.Module([node], []), str(_SETUP), "exec"), tables)
    return tables
