"""From a policy to a cache that scores: opened on shared weights, with what it costs in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ascend_kv.cache.untrained import sequence_bytes
from ascend_kv.cache.untrained_tables import UntrainedTables
from ascend_kv.devices import get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.quality.policies import UNQUANTIZED, Policy
from ascend_kv.evaluate.quality.results import Cost
from ascend_kv.evaluate.schemes import llm_with_room
from ascend_kv.evaluate.single_sequence import sequence_in_tables, single_sequence
from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.integrations.quantized_cache import QuantizedCacheModel, why_not
from ascend_kv.integrations.untrained import check_model, least_untrained_bytes
from ascend_kv.llm import LLM
from ascend_kv.ops import platform
from ascend_kv.plan.capacity import describe_formats
from ascend_kv.resolved_cache import resolve_block_size, resolve_formats, resolve_untrained_format
from ascend_kv.untrained_compression import Compression


class PagedScorer:
    """A paged cache of ours, for one sequence."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def forward(self, token_ids: Sequence[int], start: int, rows: Sequence[int]) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` of ``token_ids`` that follow ``start`` others."""
        if isinstance(self.llm.tables, UntrainedTables):
            batch = sequence_in_tables(self.llm.tables, token_ids, start)
        else:
            batch = single_sequence(token_ids, self.llm.block_size, start)
        return self.llm.model.forward(replace(batch, logits_indices=list(rows)))


@dataclass(frozen=True)
class PolicyRunner:
    """A policy on one model, checked and ready to be opened."""

    policy: Policy
    loaded: LoadedModel
    device: str
    formats: tuple[LayerFormat, ...] = ()
    """of the layers; none where the cache is transformers'"""
    block_size: int = 0
    compression: Compression | None = None
    calibrated: Mapping[str, Any] = field(default_factory=dict)
    """settings of the cache that were made from the calibration text"""

    def open(self, length: int) -> PagedScorer | QuantizedCacheModel:
        """A cache with room for a sequence of ``length`` tokens.

        Raises:
            UsageError: there is no such memory, or transformers' cache cannot hold this model.
        """
        other = self.policy.huggingface
        if other is not None:
            return QuantizedCacheModel(
                self.loaded, other.backend, other.chunk_tokens, other.options
            )
        return PagedScorer(self.open_llm(length))

    def open_llm(self, length: int, sequences: int = 1, texts: bool = False) -> LLM:
        """A cache of ours as an ``LLM`` for so many sequences, with its tokenizer if ``texts``.

        Raises:
            UsageError: names the policy.
        """
        with self.policy.named_in_errors():
            return self._make_llm(length, sequences, texts)

    def _make_llm(self, length: int, sequences: int, texts: bool) -> LLM:
        options = {**self.policy.options(self.loaded.dtype), **self.calibrated}
        options.pop("block_size", None)
        if self.compression is not None:
            return LLM(
                str(self.loaded.path),
                max_model_len=length,
                max_num_batched_tokens=max(length, _MOST_SEQUENCES),
                max_num_seqs=_MOST_SEQUENCES,
                kv_cache_memory_bytes=sequences * self.cache_bytes(length),
                block_size=self.block_size,
                skip_tokenizer_init=not texts,
                device=self.device,
                weights=self.loaded,
                kv_cache_config=options,
            )
        return llm_with_room(
            self.loaded,
            self.formats,
            self.block_size,
            sequences,
            length,
            self.device,
            skip_tokenizer_init=not texts,
            kv_cache_config=options,
        )

    def cache_bytes(self, length: int) -> int:
        """Bytes of the cache that ``open`` makes; transformers' grows, and counts as 16-bit."""
        geometry = self.loaded.geometry
        if not self.formats:
            return length * geometry.token_bytes([_HALF] * geometry.num_layers)
        if self.compression is not None:  # which a whole text at once never exceeds
            spec, step = self.formats[0].key, max(length, _MOST_SEQUENCES)
            return least_untrained_bytes(
                self.loaded, self.compression, spec, self.block_size, length, step
            )
        blocks = -(-length // self.block_size)
        return geometry.cache_bytes(self.formats, blocks, self.block_size, length, 1)


_HALF = FormatSpec("float16", 16)
_MOST_SEQUENCES = 64
MEASURED_TOKENS = 512
"""At which transformers' caches are measured."""


def make_runner(
    policy: Policy, loaded: LoadedModel, device: str, block_size: int | None, named: bool = True
) -> PolicyRunner | str:
    """Check a policy against a model.

    Args:
        policy: what was asked for.
        loaded: the weights.
        device: cpu or npu.
        block_size: tokens a block where the policy does not say; None: the device's default.
        named: whether the user asked for it; else formats that do not fit the model leave it out.

    Returns:
        The runner, or why the policy is left out.

    Raises:
        UsageError: the model or the device cannot have it; names the policy.
    """
    if policy.huggingface is not None:
        reason = why_not(policy.huggingface.backend)
        if any(window is not None for window in loaded.geometry.layer_windows):
            reason = "transformers' QuantizedCache takes no model with sliding windows"
        runner = PolicyRunner(policy, loaded, device)
        if reason is None:
            runner.open(0)  # its options are tried here, before anything has run
        return reason or runner
    try:
        cache = policy.cache_config(loaded.dtype)
        try:
            formats = resolve_formats(loaded.geometry, cache, loaded.dtype)
        except UsageError as error:
            if named:
                raise
            return f"not with this model: {error}"
        if cache.block_size is None:
            cache = replace(cache, block_size=block_size)
        figures = get_device(platform.device_name(device))
        for name in dict.fromkeys(side.name for spec in formats for side in (spec.key, spec.value)):
            if name not in figures.formats:  # so that one list of policies serves every device
                return f"{name} on {figures.name}: {figures.refused.get(name) or 'it cannot'}"
        size = resolve_block_size(cache, figures, formats)
        if cache.compression is not None:
            resolve_untrained_format(formats)
            check_model(loaded)
            return PolicyRunner(policy, loaded, device, formats, size, cache.compression)
    except UsageError as error:
        field = f"policy {policy.name!r}: {error.field}"
        raise UsageError(field, error.given, error.legal, error.hint) from error
    if policy.name != UNQUANTIZED and {str(spec) for spec in formats} == {loaded.dtype}:
        return f"it is the unquantized reference: the model computes in {loaded.dtype}"
    return PolicyRunner(policy, loaded, device, formats, size)


def paged_cost(runner: PolicyRunner, llm: LLM) -> Cost:
    """Bytes of a cache of ours, from the geometry; static scales for the model's longest text.

    So are the bytes of layers that are compressed, which are no multiple of the tokens.
    """
    geometry, positions = runner.loaded.geometry, runner.loaded.geometry.max_position_tokens
    token_bytes = geometry.block_bytes(runner.formats, runner.block_size) / runner.block_size
    formats, residual = describe_formats(runner.formats), "none"
    if open_block := geometry.residual_bytes(runner.formats, runner.block_size):
        mean = (runner.block_size + 1) / 2
        residual = f"up to {runner.block_size} latest tokens, {mean:g} on the average, "
        residual += f"{open_block:,} bytes a sequence"
    if runner.compression is not None:
        held = sequence_bytes(geometry, runner.compression, runner.formats[0].key, positions)
        token_bytes = sum(held.values()) / positions
        formats += f", compressed from {runner.compression.csa_from:,} tokens"
        residual = f"{runner.compression.sinks} first and {runner.compression.window} latest tokens"
    conditioning = llm.conditioning
    return Cost(
        formats=formats,
        block_size=runner.block_size,
        bytes_per_token=token_bytes,
        bits_per_value=8 * token_bytes / values_per_token(geometry),
        tokens=positions,
        residual=residual,
        static_bytes=geometry.static_bytes(runner.formats, positions) + conditioning.offset_bytes,
        key_conditioning=str(conditioning),
    )


def other_cost(runner: PolicyRunner, model: QuantizedCacheModel) -> Cost:
    """Bytes that transformers' cache holds after a sequence, over its quantized tokens.

    Groups are filled up and scales counted whole, so the length matters: it is the same whatever
    runs first, 512 tokens or as many as the model takes. Which tokens they are does not matter.
    """
    other = runner.policy.huggingface
    assert other is not None
    length = min(MEASURED_TOKENS, runner.loaded.geometry.max_position_tokens)
    model.forward([0] * length, 0, [length - 1])
    quantized = model.stored_tokens() - model.residual_tokens()
    token_bytes = model.stored_bytes() / max(1, quantized)
    return Cost(
        formats=", ".join([other.backend, *(f"{k} {v}" for k, v in other.options.items())]),
        block_size=0,
        bytes_per_token=token_bytes,
        bits_per_value=8 * token_bytes / values_per_token(runner.loaded.geometry),
        tokens=length,
        residual=other.residual,
        static_bytes=0,
        key_conditioning="keys as the model makes them",
    )


def values_per_token(geometry: ModelGeometry) -> int:
    """Numbers in the keys and values of one token, all layers together."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
