"""Runs a DeepSeek-V4 on the compressed cache without the engine: the batches are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from packed_runs import PackedRunner

from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.compressed_layers import CompressedFormats, GroupBlocks
from ascend_kv.integrations.deepseek_v4 import DeepseekV4Model
from ascend_kv.integrations.loading import LoadedModel, load_model

Tensor = torch.Tensor
FLOAT32 = CompressedFormats("float32", "float32", "float32")
BLOCKS = GroupBlocks(4, 40, 4, 16)


class Runner(PackedRunner):
    """A compressed cache."""

    def __init__(
        self,
        model: Path | LoadedModel,
        formats: CompressedFormats = FLOAT32,
        blocks: GroupBlocks = BLOCKS,
    ) -> None:
        self.loaded = load_model(model) if isinstance(model, Path) else model
        layers = self.loaded.geometry.compressed
        assert layers is not None
        self.cache = CompressedKVCache(layers, formats, blocks)
        self.tables = GroupTables(layers, blocks)
        self.model = DeepseekV4Model(self.loaded, self.cache)
        super().__init__()
        self.poison()

    def poison(self) -> None:
        """What was never written must have no influence."""
        for layer in self.cache.layers:
            parts = [layer.ring, layer.state, layer.index_state]
            for vectors in (layer.entries, layer.index_keys):
                parts += [] if vectors is None else list(vectors)
            for part in parts:
                if part is not None and part.is_floating_point():
                    part.fill_(torch.nan)

    def in_chunks(self, name: str, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """All logits of one sequence that comes in chunks of these lengths."""
        parts, low = [], 0
        for chunk in chunks:
            parts.append(self.step([(name, tokens[low : low + chunk])])[name])
            low += chunk
        assert low == len(tokens)
        return torch.cat(parts)
