"""KV-cache toolkit for the Ascend 910B: quantize, page and measure the cache, here or on a CPU.

Importing this package loads nothing heavy: each public name is fetched from its room when it is
first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascend_kv.compress.csa import CSACompressor
    from ascend_kv.compress.hca import HCACompressor
    from ascend_kv.engine.outputs import CompletionOutput, RequestOutput
    from ascend_kv.engine.params import SamplingParams
    from ascend_kv.errors import RunError, UsageError
    from ascend_kv.llm import LLM
    from ascend_kv.llm_engine import LLMEngine
    from ascend_kv.quantize import KVCacheQuantize

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "LLMEngine",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "KVCacheQuantize",
    "HCACompressor",
    "CSACompressor",
    "UsageError",
    "RunError",
    "__version__",
]

_HOMES = {
    "LLM": "ascend_kv.llm",
    "LLMEngine": "ascend_kv.llm_engine",
    "SamplingParams": "ascend_kv.engine.params",
    "RequestOutput": "ascend_kv.engine.outputs",
    "CompletionOutput": "ascend_kv.engine.outputs",
    "KVCacheQuantize": "ascend_kv.quantize",
    "HCACompressor": "ascend_kv.compress.hca",
    "CSACompressor": "ascend_kv.compress.csa",
    "UsageError": "ascend_kv.errors",
    "RunError": "ascend_kv.errors",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from its room, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
