"""Policies: the ways of keeping a KV cache that an evaluation compares.

A policy is either a cache of ours, written as a user writes it in ``kv_cache_config``, or, as a
baseline, one of transformers' own quantized caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ascend_kv.config import CacheConfig, merge_kv_cache_config
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.recipe import SIXTEEN_BIT, name_format, real_format
from ascend_kv.geometry import FORMAT_NAMES
from ascend_kv.registry import did_you_mean
from ascend_kv.user_values import from_mapping

UNQUANTIZED = "unquantized"
"""The reference that every policy is compared with; always there, always first."""

_NOT_HERE = ("kv_cache_memory_bytes", "kv_allocator", "enable_paged_attention")
MADE_FROM_TEXT = {"keys": "key_calibration", "scales": "kv_cache_scales"}
"""What a policy's ``calibrate`` says, and the setting that it makes."""
_NBITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
"""What transformers' caches with these libraries take"""
_GROUPED = {"nbits": 4, "axis_key": 0, "axis_value": 0, "q_group_size": 64}


@dataclass(frozen=True)
class HuggingFaceCache:
    """transformers' ``QuantizedCache``, and how a text is fed to it.

    It answers with what it was given in full precision and quantizes afterwards, so a text goes
    in by chunks: those before the latest are read as they are stored.
    """

    backend: Literal["quanto", "hqq", "fp8"]
    nbits: int | None = None
    axis_key: int | None = None
    axis_value: int | None = None
    q_group_size: int | None = None
    chunk_tokens: int = 32
    """Tokens fed at once, which is also the group-wise backends' ``residual_length``."""

    def check(self, where: str) -> None:
        """Refuse numbers below 1, and group-wise options of a backend that has no groups.

        Raises:
            UsageError: under the name ``where`` and the field.
        """
        for name in ("nbits", "q_group_size", "chunk_tokens"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"{where}.{name}", given, "1 or more")
        legal = _NBITS.get(self.backend, ())
        if self.nbits is not None and legal and self.nbits not in legal:
            raise UsageError(f"{where}.nbits", self.nbits, legal)
        for name in _GROUPED:
            if self.backend == "fp8" and getattr(self, name) is not None:
                raise UsageError(f"{where}.{name}", getattr(self, name), "none with backend fp8")

    @property
    def residual(self) -> str:
        """What is read in full precision all the same."""
        if self.backend == "fp8":  # it reads back what it has just stored, but the first time
            return f"the first {self.chunk_tokens} tokens, by themselves"
        mean = self.chunk_tokens / 2
        return f"up to {self.chunk_tokens} latest tokens, {mean:g} on the average"

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of ``QuantizedCache`` but the backend and the residual."""
        if self.backend == "fp8":
            return {}
        given = {name: getattr(self, name) for name in _GROUPED}
        return {name: _GROUPED[name] if value is None else value for name, value in given.items()}


@dataclass(frozen=True)
class Policy:
    """One row of the comparison."""

    name: str
    kv_cache_config: Mapping[str, Any] = field(default_factory=dict)
    """As ``LLM`` takes it; ``kv_cache_dtype`` may also be ``16-bit``."""
    huggingface: HuggingFaceCache | None = None
    calibrate: tuple[Literal["keys", "scales"], ...] = ()
    """What is made of the calibration text for it: ``key_calibration``, ``kv_cache_scales``."""

    def check(self, where: str) -> None:
        """Refuse what can be refused before a model is loaded.

        Raises:
            UsageError: names the key below ``where``, what was given and what is legal.
        """
        if not self.name.strip():
            raise UsageError(f"{where}.name", self.name, "text")
        if self.huggingface is not None:
            if self.kv_cache_config:
                raise UsageError(f"{where}.kv_cache_config", "beside huggingface", "one of the two")
            if self.calibrate:
                raise UsageError(f"{where}.calibrate", self.calibrate, "none with huggingface")
            self.huggingface.check(f"{where}.huggingface")
            return
        for made in self.calibrate:
            if MADE_FROM_TEXT[made] in self.kv_cache_config:
                legal = f"not beside calibrate: [{made}], which makes it"
                given = self.kv_cache_config[MADE_FROM_TEXT[made]]
                raise UsageError(f"{where}.{MADE_FROM_TEXT[made]}", given, legal)
        for name in _NOT_HERE:
            if name in self.kv_cache_config:
                legal = "none: every policy gets a paged cache with the room that it needs"
                raise UsageError(f"{where}.{name}", self.kv_cache_config[name], legal)
        with name_format(f"{where}.kv_cache_dtype"):
            self.cache_config("auto")

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Errors say which policy they are about."""
        try:
            yield
        except UsageError as error:
            field = f"policy {self.name!r}: {error.field}"
            raise UsageError(field, error.given, error.legal, error.hint) from error

    def options(self, model_dtype: str) -> dict[str, Any]:
        """``kv_cache_config`` with a real type in place of ``16-bit``."""
        values = dict(self.kv_cache_config)
        if values.get("kv_cache_dtype") == SIXTEEN_BIT:
            values["kv_cache_dtype"] = real_format(SIXTEEN_BIT, model_dtype)
        return values

    def cache_config(self, model_dtype: str) -> CacheConfig:
        """The same as a ``CacheConfig``.

        Raises:
            UsageError: an unknown key or an illegal value.
        """
        return merge_kv_cache_config(CacheConfig(), self.options(model_dtype))

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its results, for JSON."""
        if self.huggingface is not None:
            cache = self.huggingface
            fed = {"backend": cache.backend, "chunk_tokens": cache.chunk_tokens}
            return {"huggingface": fed | cache.options}
        settings = {"kv_cache_config": _plain(self.kv_cache_config)}
        return settings | ({"calibrate": list(self.calibrate)} if self.calibrate else {})


REFERENCE = Policy(UNQUANTIZED, {"pair_scaling": False, "key_offset_layers": "none"})


def _ours(name: str, **config: Any) -> Policy:
    return Policy(name, config)


_AS_IT_IS: dict[str, Any] = {"pair_scaling": False, "key_offset_layers": "none"}

DEFAULT_POLICIES = (
    _ours("16-bit", kv_cache_dtype=SIXTEEN_BIT),
    _ours("int8", kv_cache_dtype="int8"),
    _ours("int8, pair scaling alone", kv_cache_dtype="int8", key_offset_layers="none"),
    _ours("int8, keys as they are", kv_cache_dtype="int8", **_AS_IT_IS),
    _ours(
        "int8, keys as they are, first 4 layers kept",
        kv_cache_dtype="int8",
        kv_cache_dtype_skip_layers=[0, 1, 2, 3],
        **_AS_IT_IS,
    ),
    _ours(
        "int8, keys as they are, first and last 2 kept",
        kv_cache_dtype="int8",
        kv_cache_dtype_skip_layers=[0, 1, -2, -1],
        **_AS_IT_IS,
    ),
    Policy(
        "int8, static by channel, keys as they are",
        {
            "kv_cache_dtype": "int8",
            "granularity": "channel",
            "scale_type": "static",
            **_AS_IT_IS,
        },
        calibrate=("scales",),
    ),
    _ours("fp8_e4m3", kv_cache_dtype="fp8_e4m3"),
    _ours("fp8_e4m3, keys as they are", kv_cache_dtype="fp8_e4m3", **_AS_IT_IS),
    _ours("int4/asymmetric", kv_cache_dtype="int4/asymmetric"),
    _ours("int4/asymmetric/hadamard", kv_cache_dtype="int4/asymmetric/hadamard"),
    _ours(
        "int4/asymmetric/hadamard, keys as they are",
        kv_cache_dtype="int4/asymmetric/hadamard",
        **_AS_IT_IS,
    ),
    Policy(
        "int4/asymmetric/hadamard, mean key, pairs as they are",
        {"kv_cache_dtype": "int4/asymmetric/hadamard", "pair_scaling": False},
        calibrate=("keys",),
    ),
    _ours("int4/kivi", kv_cache_dtype="int4/kivi"),
    _ours("k:int8+v:int4/asymmetric", kv_cache_dtype="k:int8+v:int4/asymmetric"),
    Policy("HF quanto int4", huggingface=HuggingFaceCache("quanto", 4)),
    Policy("HF hqq int4", huggingface=HuggingFaceCache("hqq", 4, axis_key=1, axis_value=1)),
    Policy("HF fp8", huggingface=HuggingFaceCache("fp8")),
)
"""What is compared when nothing else is said: what few bits cost, what key conditioning is worth
beside layers that are kept, and the baselines that people have."""


def read_policy(entry: Any, where: str) -> Policy:
    """A policy from what YAML gave.

    Args:
        entry: the name of a default policy, or of a cache format, which is short for a policy of
            that name, or a mapping of ``Policy``'s fields; one without a name is called by its
            values.
        where: how errors call it.

    Raises:
        UsageError: neither of them, an unknown key, or an illegal value.
    """
    if isinstance(entry, str):
        return _named(entry, where)
    if not isinstance(entry, Mapping):
        legal = "a cache format, or a mapping with name and kv_cache_config or huggingface"
        raise UsageError(where, entry, legal)
    unnamed = entry.get("kv_cache_config") or entry.get("huggingface") or {}
    if "name" not in entry and isinstance(unnamed, Mapping):
        name = ", ".join(f"{key}={value}" for key, value in unnamed.items())
        entry = {"name": name, **entry}
    policy = from_mapping(Policy, entry, where)
    policy.check(where)
    return policy


def _named(name: str, where: str) -> Policy:
    for policy in DEFAULT_POLICIES:
        if policy.name == name:
            return policy
    formats = (SIXTEEN_BIT, *FORMAT_NAMES)
    if name.split("/")[0] in formats or ":" in name:  # words after it, or two of them
        policy = Policy(name, {"kv_cache_dtype": name})
        policy.check(where)
        return policy
    names = tuple(policy.name for policy in DEFAULT_POLICIES)
    legal = f"a cache format ({', '.join(formats)}), a default policy ({'; '.join(names)}), "
    known = tuple(dict.fromkeys((*formats, *names)))
    raise UsageError(where, name, legal + "or a mapping", did_you_mean(name, known))


def parse_policy(text: str) -> Policy:
    """A policy from the command line: as ``read_policy``, where cache settings need no frame.

    Raises:
        UsageError: none of them.
    """
    try:
        entry = yaml.safe_load(text) if text.lstrip().startswith("{") else text
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError("--policy", text, "a cache format, or YAML", reason) from error
    if isinstance(entry, Mapping) and not {"kv_cache_config", "huggingface"} & set(entry):
        frame = {key: value for key, value in entry.items() if key in ("name", "calibrate")}
        config = {key: value for key, value in entry.items() if key not in frame}
        entry = frame | {"kv_cache_config": config}
    return read_policy(entry, "--policy")


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them: settings are compared with what was written down."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
