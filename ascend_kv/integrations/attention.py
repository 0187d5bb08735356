"""Our attention function inside Hugging Face's models, and the proof that it is reached.

transformers looks an attention function up by name (``AttentionInterface``). Ours is registered
there and *not* in ``AttentionMaskInterface``: so no mask is built, and the packed tokens of many
sequences stay apart by their block tables alone. The step's tensors travel as a keyword argument
through the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from ascend_kv.cache.paged import LayerCache
from ascend_kv.cache.residual import ResidualLayer, cut_step
from ascend_kv.cache.residual_tables import RESIDUAL
from ascend_kv.engine.batch import Batch
from ascend_kv.errors import RunError, UnsupportedModelError
from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.key_offset import KeyOffset

ATTENTION_NAME = "ascend_kv"
STEP_KEYWORD = "ascend_kv_step"
_REFUSED = {"softcap": "logit soft-capping", "s_aux": "attention sinks of its own"}


class Step(Protocol):
    """Receives every layer's queries, keys and values of one forward."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        """query [T, H, D], key and value [T, N, D] after RoPE; returns [T, H, D]."""
        ...


def run_packed(hf_model: Any, batch: Batch, step: object) -> torch.Tensor:
    """One forward of packed sequences, of which the step does the attention.

    Args:
        hf_model: whose attention looks for ``STEP_KEYWORD``.
        batch: what runs.
        step: a ``Step``, or what a model's own attention takes in its place.

    Returns:
        Logits ``[len(batch.logits_indices), vocab]`` in the model's type.
    """
    device = hf_model.device
    output = hf_model(
        input_ids=torch.tensor([batch.token_ids], device=device),
        position_ids=torch.tensor([batch.positions], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(batch.logits_indices, dtype=torch.int64, device=device),
        **{STEP_KEYWORD: step},
    )
    logits: torch.Tensor = output.logits[0]
    return logits


class CacheStep:
    """Stores a batch's keys and values in the paged cache and attends to what is stored."""

    def __init__(
        self,
        layers: Sequence[LayerCache | ResidualLayer],
        batch: Batch,
        block_size: int,
        device: torch.device,
        offset: KeyOffset | None = None,
    ) -> None:
        self._layers = layers
        self._offset = offset
        self._query_lengths = batch.query_lengths
        self._kv_lengths = batch.kv_lengths
        self._slot_mapping = torch.tensor(batch.slot_mapping, dtype=torch.int64, device=device)
        self.positions = torch.tensor(batch.positions, dtype=torch.int64, device=device)
        self._block_tables = _pad_tables(batch, block_size).to(device)
        if any(isinstance(layer, ResidualLayer) for layer in layers):
            slots = [tables[RESIDUAL][0] for tables in batch.group_tables]
            lengths = self._query_lengths, self._kv_lengths
            self._pieces = cut_step(slots, self._block_tables, *lengths, block_size)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        cache = self._layers[layer]
        if isinstance(cache, ResidualLayer):
            lacking = None
            if self._offset is not None and layer in self._offset:
                lacking = partial(self._offset.attention_arguments, layer)
            return cache.attend(query, key, value, self._pieces, scaling, window, lacking)
        cache.store(key, value, self._slot_mapping, self.positions)
        if self._offset is not None and layer in self._offset:
            return self._offset.attend(
                layer,
                query,
                cache,
                self._block_tables,
                self._query_lengths,
                self._kv_lengths,
                scaling,
                window,
            )
        lengths = self._query_lengths, self._kv_lengths
        return cache.attend(query, self._block_tables, *lengths, scaling, window=window)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface over the paged cache.

    Args:
        module: the attention layer; its ``layer_idx`` picks the cache.
        query: [1, H, T, D] after RoPE; key, value: [1, N, T, D].
        attention_mask: None, for no mask is built (see the module's docstring).
        scaling: factor of the scores, D ** -0.5 when None.
        sliding_window: latest tokens that a query sees, itself included; None sees all.
        options: whatever else the model passes; ``ascend_kv_step`` is the step.

    Returns:
        [1, T, H, D] and None in place of the attention weights.
    """
    step: Step | None = options.get(STEP_KEYWORD)
    if step is None:
        raise RunError(
            "this model was loaded for the paged cache and runs through ascend_kv's engine only; "
            "call LLM.generate, or load it with transformers for a plain forward"
        )
    for option, meaning in _REFUSED.items():
        if options.get(option) is not None:
            raise UnsupportedModelError(
                type(module).__name__, f"{option} ({meaning})", "softmax attention without it"
            )
    output = step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


class _Probe:
    """Notes what each layer brings, and computes nothing."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, int]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        self.seen[layer] = (query.shape[1], key.shape[1], key.shape[2], window)
        return torch.zeros_like(query)


@torch.inference_mode()
def probe_attention(hf_model: Any, geometry: ModelGeometry) -> None:
    """Run one token and see that every layer's attention comes to us as ``geometry`` says.

    Raises:
        UnsupportedModelError: a layer's attention is not intercepted or has other shapes.
    """
    name = type(hf_model).__name__
    probe = _Probe()
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=hf_model.device)
        hf_model(input_ids=token, position_ids=token, use_cache=False, **{STEP_KEYWORD: probe})
    except (TypeError, KeyError) as error:
        raise UnsupportedModelError(
            "model", name, "a causal LM that uses transformers' attention interface", str(error)
        ) from error
    heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
    for layer, window in enumerate(geometry.layer_windows):
        expected = (*heads, window or 0)
        if probe.seen.get(layer) != expected:
            raise UnsupportedModelError(
                "model",
                f"{name}: layer {layer} brings {probe.seen.get(layer, 'nothing')}",
                f"attention through transformers' attention interface with "
                f"(heads, kv_heads, head_dim, window) = {expected}",
            )


def _pad_tables(batch: Batch, block_size: int) -> torch.Tensor:
    """Block tables as [B, M] int32; rows hold the blocks in use and are padded with -1."""
    needed = [-(-length // block_size) for length in batch.kv_lengths]
    width = max(needed, default=0)
    rows = [
        row[:count] + [-1] * (width - count)
        for row, count in zip(batch.block_tables, needed, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)
