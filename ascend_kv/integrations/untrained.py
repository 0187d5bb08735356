"""A dense Hugging Face model as the engine's ``Model``, with its layers compressed.

For models that never learned to read entries of many tokens: it loses quality, so nothing turns it
on but the user's ``untrained_compression: true``. What is kept, and what a query sees, is in
``ascend_kv.untrained_compression``; how attention to it is computed in ``untrained_step``.

Why this design: entries are means, so nothing has to be learned or calibrated; they lie in pages
like any key and value, so every part is a call of an operator that is there already; and what a
query sees follows from its position, so chunks, batches and preemption cannot change it. A query
reads about 140 tokens and ``top_k`` entries, and of the rest one entry for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_kv.cache.untrained import UntrainedKVCache, group_block_bytes
from ascend_kv.cache.untrained_tables import UntrainedTables
from ascend_kv.engine.batch import Batch
from ascend_kv.errors import UsageError
from ascend_kv.geometry import FormatSpec
from ascend_kv.integrations.attention import run_packed
from ascend_kv.integrations.key_offset import make_rotary_table
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.integrations.untrained_step import UntrainedStep
from ascend_kv.untrained_compression import Compression, most_by_group, plan_untrained_blocks


class UntrainedModel:
    """Runs packed batches of many sequences through one forward ``[1, T]``."""

    def __init__(
        self, loaded: LoadedModel, cache: UntrainedKVCache, policy: Compression, max_positions: int
    ) -> None:
        """Join weights and cache; both may be large, neither is copied.

        Args:
            loaded: the weights; other models may share them.
            cache: what keys, values and entries are stored in.
            policy: when and how far.
            max_positions: positions that may be cached; a table of angles takes 4 D bytes each.
        """
        self.loaded, self.cache = loaded, cache
        self._policy = policy
        self._device = loaded.hf_model.device
        embedding = loaded.hf_model.base_model.rotary_emb
        dim = loaded.geometry.head_dim
        self._rotary_table = make_rotary_table(embedding, dim, range(max_positions))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[len(batch.logits_indices), vocab]`` in the model's type."""
        self.loaded.folding.use(None)
        step = UntrainedStep(self.cache, self._policy, batch, self._rotary_table, self._device)
        return run_packed(self.loaded.hf_model, batch, step)


def check_model(loaded: LoadedModel) -> None:
    """Refuse models and devices that cannot be compressed this way.

    Raises:
        UsageError: with the reason.
    """
    model, geometry = loaded.hf_model, loaded.geometry
    if any(window is not None for window in geometry.layer_windows):
        hint = "Layers with a sliding window forget tokens already; entries of them have no sense."
        raise UsageError("compression", f"for {geometry.model_type} with windows", "none", hint)
    embedding = getattr(model.base_model, "rotary_emb", None)
    turned = 0 if embedding is None else 2 * len(embedding.inv_freq)
    if turned != geometry.head_dim:
        hint = "Keys are pooled before RoPE, which has to be known for all channels and layers."
        given = f"a model that turns {turned} of {geometry.head_dim} channels"
        raise UsageError("compression", given, "one that turns all", hint)
    if model.device.type != "cpu":
        hint = (
            "Attention to lists of entries has no kernel on an NPU (CANN's fused attention takes "
            "no lists), and nothing of this was tried there."
        )
        raise UsageError("compression", f"on {model.device.type}", "device cpu", hint)


def least_untrained_bytes(
    loaded: LoadedModel,
    policy: Compression,
    spec: FormatSpec,
    block_size: int,
    max_model_len: int,
    step: int,
) -> int:
    """Bytes of a cache for one sequence of ``max_model_len``, ``step`` tokens at a time."""
    by_block = group_block_bytes(loaded.geometry, policy, spec, block_size)
    most = most_by_group(policy, by_block, max_model_len, step, block_size)
    return sum(most[group] * size for group, size in by_block.items())


def make_untrained_cache(
    loaded: LoadedModel,
    policy: Compression,
    spec: FormatSpec,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step: int,
    memory_bytes: Callable[[int], int],
) -> tuple[UntrainedTables, UntrainedKVCache, UntrainedModel]:
    """Tables, tensors and model for the memory that there is.

    Args:
        loaded: the weights. policy: when and how far.
        spec: the format of everything.
        block_size: tokens, or entries, a block.
        max_model_len: longest sequence. max_num_seqs: most sequences at once.
        step: most tokens of one step.
        memory_bytes: from the least that is needed to the bytes of the cache.

    Raises:
        UsageError: less memory than that, or a model that cannot be compressed.
    """
    check_model(loaded)
    by_block = group_block_bytes(loaded.geometry, policy, spec, block_size)
    least = least_untrained_bytes(loaded, policy, spec, block_size, max_model_len, step)
    given = memory_bytes(least)
    blocks = plan_untrained_blocks(
        policy, by_block, given, max_model_len, step, block_size, max_num_seqs
    )
    cache = UntrainedKVCache(
        loaded.geometry, policy, spec, blocks, block_size, loaded.hf_model.device
    )
    tables = UntrainedTables(policy, blocks, block_size, step)
    return tables, cache, UntrainedModel(loaded, cache, policy, max_model_len)
