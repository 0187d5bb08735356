"""Calibration: what a cache may know of a model's keys and values before it serves, from a text.

Two things are made of a few thousand tokens. *Key statistics* give the key offset: INT4 keys keep
their answers better without the mean that all of them share. *Static scales* are what formats with
``scale_type`` static want. Both are of one model, are checked when they are used, and come as what
``LLM`` takes::

    save_statistics(calibrate_keys(loaded, token_ids), "keys.safetensors")
    LLM(model, kv_cache_dtype="int4/asymmetric/hadamard", key_calibration="keys.safetensors")
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascend_kv.config import CacheConfig
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.text import Text, load_text
from ascend_kv.integrations.key_calibration import (
    observe_keys,
    observe_scales,
    read_key_calibration,
)
from ascend_kv.integrations.key_planning import condition_keys
from ascend_kv.integrations.key_statistics import save_statistics
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.resolved_cache import resolve_formats

__all__ = ["calibrate_keys", "calibrate_scales", "calibration_text", "save_statistics"]

_CHARACTERS_A_TOKEN = 12
"""More than any tokenizer of English needs, so that enough of the text is read."""

calibrate_keys = observe_keys


def calibrate_scales(
    loaded: LoadedModel, config: CacheConfig, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Static scales for a cache, from the keys and values that a text makes in it.

    Args:
        loaded: the model.
        config: of the cache, with ``scale_type`` static or formats that say so, and without
            ``kv_cache_scales``: its pair scaling and key offset decide what is stored.
        token_ids: of the text.

    Returns:
        What ``kv_cache_scales`` takes.

    Raises:
        UsageError: no format has static scales, or they have them by position; too short a text.
    """
    formats = resolve_formats(loaded.geometry, replace(config, kv_cache_scales=None), loaded.dtype)
    if not any(spec.static for spec in formats):
        raise UsageError("scale_type", config.scale_type, "static, for there to be scales to make")
    statistics = read_key_calibration(loaded, config.key_calibration)
    keys = condition_keys(
        loaded, formats, config.pair_scaling, config.key_offset_layers, statistics
    )
    return observe_scales(loaded, keys, formats, token_ids)


def calibration_text(path: Path | None, tokens: int) -> Text:
    """The user's file, or the docstrings of Python's standard library, enough of them.

    They are not the topics of ``help()``, on which evaluations run.

    Raises:
        UsageError: as ``load_text``; or the library's source is not there.
    """
    if path is not None:
        return load_text(path)
    wanted, found = tokens * _CHARACTERS_A_TOKEN, ""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += _docstrings(source)
        if len(found) >= wanted:
            break
    if not found:
        hint = "Name a text of your own as calibration.text."
        raise UsageError("calibration.text", None, "a Python with its library's source", hint)
    name = f"docstrings of the standard library of Python {platform.python_version()}"
    return Text(name, found[:wanted])


def _docstrings(source: Path) -> str:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "".join(f"{text}\n\n" for text in texts if text)
