"""The main job's recipe: frozen dataclasses that the commented YAML file mirrors key by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from ascend_kv.config import Allocator, CacheConfig, KeyOffsetLayers, PairScaling
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.workload import WorkloadRecipe
from ascend_kv.geometry import FORMATS
from ascend_kv.user_values import from_mapping

R = TypeVar("R")

SIXTEEN_BIT = "16-bit"
"""In a recipe: the model's own type if that has 16 bits, else float16 (``with_real_formats``).

A cache in the type that the queries have is what an NPU's attention reads as it lies. In another
it would be copied in every step, and whatever is compared with it would look too good.
"""

LEAST_CLUSTERS = 8
"""Fewer clusters would make the confidence interval meaningless."""
WARM_UP_STEPS = 2
"""Steps of the decode sweep before those that are timed."""


@dataclass(frozen=True)
class BudgetRecipe:
    """The KV memory every scheme gets: what this many contiguous sequences of this type take."""

    sequences: int = 4
    kv_cache_dtype: str = SIXTEEN_BIT


@dataclass(frozen=True)
class SchemeRecipe:
    """One way to use the budget."""

    name: str
    allocator: Allocator = "paged"
    kv_cache_dtype: str = "int8"
    batch: Literal["planned", "all"] = "planned"
    """``planned``: as many sequences as the planner says fit; ``all``: every request at once."""


@dataclass(frozen=True)
class WindowRecipe:
    """Which windows of a text are scored, and how the interval is made."""

    windows: int = 8
    window_tokens: int = 1024
    cluster_tokens: int = 128
    chunk_tokens: int = 256

    def check(self) -> None:
        """Refuse numbers that give no interval.

        Raises:
            UsageError: a number out of its range, or fewer than 8 clusters.
        """
        for name, least in (
            ("windows", 1),
            ("window_tokens", 2),
            ("cluster_tokens", 1),
            ("chunk_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"perplexity.{name}", getattr(self, name), f"{least} or more")
        clusters = self.windows * -(-(self.window_tokens - 1) // self.cluster_tokens)
        if clusters < LEAST_CLUSTERS:
            raise UsageError(
                "perplexity",
                f"{clusters} clusters in all windows",
                f"{LEAST_CLUSTERS} or more",
                "Raise windows or lower cluster_tokens.",
            )

    @property
    def method(self) -> str:
        return (
            "the same tokens scored with each cache; ratio of perplexities = exp(mean difference "
            "of the negative log-likelihood per token), 95 % interval from Student's t over "
            f"clusters of {self.cluster_tokens} neighbouring tokens (within a cluster the "
            "differences may be correlated)"
        )


@dataclass(frozen=True)
class PerplexityRecipe(WindowRecipe):
    """The windows, and the formats that score them."""

    formats: tuple[str, ...] = (SIXTEEN_BIT, "int8")


@dataclass(frozen=True)
class PlantedBiasRecipe:
    """The small model with a large key bias that is scored beside the real one."""

    texts: int = 6
    """Texts of 128 tokens that it writes and that every cache scores; 0 leaves the part out."""


@dataclass(frozen=True)
class SampleRecipe:
    """Prompts that are continued greedily with an unquantized and a quantized cache."""

    prompts: tuple[str, ...] = ()
    max_tokens: int = 48
    kv_cache_dtype: str = "int8"


@dataclass(frozen=True)
class SweepRecipe:
    """Decode throughput against batch."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context_tokens: int = 182
    steps: int = 8
    kv_cache_dtype: str = "int8"

    @property
    def longest(self) -> int:
        """Tokens of a sequence after its last step."""
        return self.context_tokens + WARM_UP_STEPS + self.steps


@dataclass(frozen=True)
class BenchRecipe:
    """Everything ``ascend-kv bench`` does, in the order of the YAML file."""

    model: str | None = None
    dtype: str = "auto"
    device: Literal["auto", "cpu", "npu"] = "auto"
    max_model_len: int = 1024
    max_num_batched_tokens: int = 512
    block_size: int | None = None
    granularity: str = "token_head"
    symmetric: bool = True
    scale_type: str = "dynamic"
    group_size: int | None = None
    kv_cache_scales: str | None = None
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    pair_scaling: PairScaling = "auto"
    key_offset_layers: KeyOffsetLayers = "auto"
    prefill_reads: str = "cache"
    seed: int = 0
    budget: BudgetRecipe = field(default_factory=BudgetRecipe)
    workload: WorkloadRecipe = field(default_factory=WorkloadRecipe)
    schemes: tuple[SchemeRecipe, ...] = ()
    sweep: SweepRecipe = field(default_factory=SweepRecipe)
    perplexity: PerplexityRecipe = field(default_factory=PerplexityRecipe)
    planted_bias: PlantedBiasRecipe = field(default_factory=PlantedBiasRecipe)
    samples: SampleRecipe = field(default_factory=SampleRecipe)

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded.

        Raises:
            UsageError: names the key, what was given and what is legal.
        """
        for name in ("max_model_len", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 2)
        _at_least("seed", self.seed, 0)
        if self.dtype not in ("auto", *FORMATS):
            raise UsageError("dtype", self.dtype, ("auto", *FORMATS))
        _at_least("budget.sequences", self.budget.sequences, 1)
        unquantized = (SIXTEEN_BIT, *FORMATS)
        if self.budget.kv_cache_dtype not in unquantized:
            raise UsageError("budget.kv_cache_dtype", self.budget.kv_cache_dtype, unquantized)
        self.workload.check(self.max_model_len)
        self._check_schemes()
        for batch in self.sweep.batches:
            _at_least("sweep.batches", batch, 1)
        _at_least("sweep.context_tokens", self.sweep.context_tokens, 1)
        _at_least("sweep.steps", self.sweep.steps, 1)
        self.perplexity.check()
        _at_least("planted_bias.texts", self.planted_bias.texts, 0)
        _at_least("samples.max_tokens", self.samples.max_tokens, 1)
        if not all(self.samples.prompts):
            raise UsageError("samples.prompts", list(self.samples.prompts), "texts of some length")
        if self.scale_type == "static" and self.kv_cache_scales is None:
            raise UsageError("kv_cache_scales", None, "a file or checkpoint, with static scales")
        for key, kv_cache_dtype in self.formats():
            with name_format(key):
                CacheConfig(
                    kv_cache_dtype=real_format(kv_cache_dtype, "auto"),
                    granularity=self.granularity,
                    symmetric=self.symmetric,
                    scale_type=self.scale_type,
                    group_size=self.group_size,
                    kv_cache_scales=self.kv_cache_scales,
                    kv_cache_dtype_skip_layers=self.kv_cache_dtype_skip_layers,
                    pair_scaling=self.pair_scaling,
                    key_offset_layers=self.key_offset_layers,
                    block_size=self.block_size,
                    prefill_reads=self.prefill_reads,
                )

    def check_lengths(self, longest: int, sample_prompts: Sequence[Sequence[int]]) -> None:
        """Refuse what is longer than the model can go.

        Args:
            longest: the model's longest sequence, in tokens.
            sample_prompts: ``samples.prompts`` as token ids.

        Raises:
            UsageError: names the key of the first part that could not run.
        """
        window = self.perplexity.window_tokens
        lengths: list[tuple[str, object, int]] = [
            ("max_model_len", self.max_model_len, self.max_model_len),
            ("perplexity.window_tokens", window, window),
        ]
        if self.sweep.batches:
            given = f"context_tokens + {WARM_UP_STEPS} + steps = {self.sweep.longest}"
            lengths.append(("sweep", given, self.sweep.longest))
        for number, prompt in enumerate(sample_prompts):
            tokens = len(prompt) + self.samples.max_tokens
            given = f"{len(prompt)} tokens of prompts[{number}] + max_tokens = {tokens}"
            lengths.append(("samples", given, tokens))
        for key, shown, needed in lengths:
            if needed > longest:
                raise UsageError(key, shown, f"at most {longest}, the model's longest sequence")

    def _check_schemes(self) -> None:
        if not self.schemes:
            raise UsageError("schemes", "none", "one scheme or more; the first is the baseline")
        names = [scheme.name for scheme in self.schemes]
        if len(set(names)) < len(names):
            raise UsageError("schemes", names, "names that differ")

    def formats(self) -> list[tuple[str, str]]:
        """Every cache format that the job will make, after the key that asks for it."""
        schemes, quality = enumerate(self.schemes), enumerate(self.perplexity.formats)
        return [
            *((f"schemes[{i}].kv_cache_dtype", scheme.kv_cache_dtype) for i, scheme in schemes),
            ("sweep.kv_cache_dtype", self.sweep.kv_cache_dtype),
            *((f"perplexity.formats[{i}]", name) for i, name in quality),
            ("samples.kv_cache_dtype", self.samples.kv_cache_dtype),
        ]


def with_real_formats(recipe: BenchRecipe, model_dtype: str) -> BenchRecipe:
    """The recipe with the name of a type wherever it says ``16-bit``.

    Args:
        recipe: as it was read.
        model_dtype: what the model computes in.
    """

    def real(kv_cache_dtype: str) -> str:
        return real_format(kv_cache_dtype, model_dtype)

    formats = tuple(dict.fromkeys(map(real, recipe.perplexity.formats)))
    return replace(
        recipe,
        budget=replace(recipe.budget, kv_cache_dtype=real(recipe.budget.kv_cache_dtype)),
        schemes=tuple(
            replace(scheme, kv_cache_dtype=real(scheme.kv_cache_dtype)) for scheme in recipe.schemes
        ),
        sweep=replace(recipe.sweep, kv_cache_dtype=real(recipe.sweep.kv_cache_dtype)),
        perplexity=replace(recipe.perplexity, formats=formats),
        samples=replace(recipe.samples, kv_cache_dtype=real(recipe.samples.kv_cache_dtype)),
    )


def real_format(kv_cache_dtype: str, model_dtype: str) -> str:
    """The name of the type that ``16-bit`` stands for; any other name is what it says."""
    if kv_cache_dtype != SIXTEEN_BIT:
        return kv_cache_dtype
    own = FORMATS.get(model_dtype)
    return model_dtype if own is not None and own.value_bits == 16 else "float16"


@contextmanager
def name_format(key: str) -> Iterator[None]:
    """Errors about a ``kv_cache_dtype`` name the recipe's ``key``, of which there are many."""
    try:
        yield
    except UsageError as error:
        if error.field != "kv_cache_dtype":
            raise
        raise UsageError(key, error.given, error.legal, error.hint) from None


def load_recipe(path: Path, quick: bool = False) -> BenchRecipe:
    """Read a YAML recipe.

    Its ``quick`` section holds keys that replace the others for a short run; it is checked in
    every run, so that a mistake in it does not wait for the first quick one.

    Raises:
        UsageError: no such file, not YAML, an unknown key or an illegal value.
    """

    def read(mapping: Mapping[str, Any]) -> BenchRecipe:
        _refuse_compression(mapping)
        recipe = from_mapping(BenchRecipe, mapping, str(path))
        recipe.check()
        return recipe

    return checked_versions(read_versions(path), read)[quick]


def _refuse_compression(mapping: Mapping[str, Any]) -> None:
    """Say more of it than that it is no key here: elsewhere it is one."""
    schemes = mapping.get("schemes")
    places = [mapping, *(schemes if isinstance(schemes, list) else [])]
    for place in places:
        for name in ("compression", "untrained_compression"):
            if isinstance(place, Mapping) and name in place:
                hint = (
                    "Schemes are planned for caches that keep every token. What compressing them "
                    "costs, `ascend-kv eval recipes/untrained_compression.yaml` measures."
                )
                raise UsageError(name, place[name], "left out of a bench recipe", hint)


def read_versions(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a YAML recipe says, and what it says with its ``quick`` section in place.

    Raises:
        UsageError: no such file, not YAML, or not keys and values.
    """
    content = read_yaml(path)
    shorter = content.pop("quick", None) or {}
    if not isinstance(shorter, Mapping):
        raise UsageError(f"{path}: quick", shorter, "keys of the recipe and their values")
    return content, merge(content, shorter)


def checked_versions(
    versions: tuple[dict[str, Any], dict[str, Any]], read: Callable[[Mapping[str, Any]], R]
) -> tuple[R, R]:
    """What ``read`` makes of both versions; what only the shorter has wrong is told as ``quick``'s.

    Raises:
        UsageError: as ``read``.
    """
    whole = read(versions[0])
    try:
        return whole, read(versions[1])
    except UsageError as error:
        raise UsageError(f"quick: {error.field}", error.given, error.legal, error.hint) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        UsageError: no such file, not YAML, or not keys and values.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("recipe", str(path), f"a readable file ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError("recipe", str(path), "a YAML file", reason) from error
    if not isinstance(content, dict):
        raise UsageError("recipe", str(path), "a YAML file of keys and values")
    return content


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in place of its own, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def _at_least(name: str, given: int, least: int) -> None:
    if given < least:
        raise UsageError(name, given, f"{least} or more")
