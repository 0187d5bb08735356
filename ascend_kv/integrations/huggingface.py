"""A Hugging Face causal LM as the engine's ``Model``: no model code of our own."""

from __future__ import annotations

import torch

from ascend_kv.cache.paged import PagedKVCache
from ascend_kv.engine.batch import Batch
from ascend_kv.integrations.attention import CacheStep, run_packed
from ascend_kv.integrations.key_conditioning import ConditionedKeys
from ascend_kv.integrations.loading import LoadedModel


class HuggingFaceModel:
    """Runs packed batches of many sequences through one forward ``[1, T]``."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PagedKVCache,
        keys: ConditionedKeys | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Join weights and cache; both may be large, neither is copied.

        Args:
            loaded: the weights; other models may share them.
            cache: what keys and values are stored in.
            keys: how keys are conditioned; None: as the model makes them.
            max_positions: positions that may be cached; None: the model's longest sequence.
        """
        self.loaded = loaded
        self._folds = None if keys is None else keys.folds
        self._offset = None
        if keys is not None:
            longest = max_positions or loaded.geometry.max_position_tokens
            self._offset = keys.make_offset(loaded, longest)
        self.cache = cache
        self._device = loaded.hf_model.device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[len(batch.logits_indices), vocab]`` in the model's type."""
        self.loaded.folding.use(self._folds)
        step = CacheStep(
            self.cache.layers, batch, self.cache.block_size, self._device, self._offset
        )
        return run_packed(self.loaded.hf_model, batch, step)
