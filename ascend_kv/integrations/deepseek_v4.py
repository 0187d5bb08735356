"""DeepSeek-V4 as the engine's ``Model``: Hugging Face's weights on the compressed cache.

The cache has four groups (``compressed_layers``): rings of the latest tokens, entries of CSA and
of HCA layers in pages, and the float32 state of windows that are filling. A sequence that is
preempted gives all of it back and is computed again, as with any model.

On an Ascend 910B the attention of such layers is CANN's SparseFlashMla where that is installed
(``ops.sparse_flash_mla`` is the map), else, and everywhere else, our own operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.compressed_layers import CompressedFormats, least_bytes, plan_groups
from ascend_kv.engine.batch import Batch
from ascend_kv.integrations.attention import run_packed
from ascend_kv.integrations.deepseek_v4_attention import make_rotary_table
from ascend_kv.integrations.deepseek_v4_step import CompressedStep
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.ops import platform


class DeepseekV4Model:
    """Runs packed batches of many sequences through one forward ``[1, T]``."""

    def __init__(
        self, loaded: LoadedModel, cache: CompressedKVCache, max_model_len: int | None = None
    ) -> None:
        """Join weights and cache; both may be large, neither is copied.

        Args:
            loaded: the weights; other models may share them.
            cache: what keys and entries are stored in.
            max_model_len: positions that may be cached; None: the model's longest sequence. A
                table of angles takes 4 * R bytes for each, once for all layers.
        """
        assert loaded.geometry.compressed is not None, "load_model of a DeepSeek-V4"
        self.loaded = loaded
        self.cache = cache
        self._layers = loaded.geometry.compressed
        self._device = loaded.hf_model.device
        longest = max_model_len or loaded.geometry.max_position_tokens
        self._rotary_table = make_rotary_table(loaded.hf_model, longest)
        self.library = platform.sparse_flash_mla_library(self._device.type)
        """What has SparseFlashMla; None where there is none."""
        self.routes: Counter[str] = Counter()
        """What served the layers' attention, and how often: SparseFlashMla, or our operators"""

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[len(batch.logits_indices), vocab]`` in the model's type."""
        step = CompressedStep(
            self.cache,
            self._layers,
            batch,
            self._rotary_table,
            self._device,
            self.library,
            self.routes,
        )
        return run_packed(self.loaded.hf_model, batch, step)


def make_compressed_cache(
    loaded: LoadedModel,
    formats: CompressedFormats,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    memory_bytes: Callable[[int], int],
) -> tuple[GroupTables, CompressedKVCache, DeepseekV4Model]:
    """Tables, tensors and model for the memory that there is.

    Args:
        loaded: the weights.
        formats: types of the cache.
        block_size: entries of a block.
        max_model_len: longest sequence. max_num_seqs: sequences that have a slot.
        memory_bytes: from the least that is needed to the bytes of the cache.

    Raises:
        UsageError: less memory than that.
    """
    layers = loaded.geometry.compressed
    assert layers is not None, "load_model of a DeepSeek-V4"
    least = least_bytes(layers, formats, block_size, max_model_len, max_num_seqs)
    blocks = plan_groups(
        layers, formats, block_size, memory_bytes(least), max_model_len, max_num_seqs
    )
    cache = CompressedKVCache(layers, formats, blocks, loaded.hf_model.device)
    model = DeepseekV4Model(loaded, cache, max_model_len)
    return GroupTables(layers, blocks), cache, model
