"""Runs a DeepSeek-V4 on the compressed cache without the engine: the batches are the test's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from ascend_kv.cache.compressed import CompressedKVCache
from ascend_kv.cache.group_tables import GroupTables
from ascend_kv.compressed_layers import CompressedFormats, GroupBlocks
from ascend_kv.engine.batch import Batch
from ascend_kv.integrations.deepseek_v4 import DeepseekV4Model
from ascend_kv.integrations.loading import LoadedModel, load_model

Tensor = torch.Tensor
FLOAT32 = CompressedFormats("float32", "float32", "float32")
BLOCKS = GroupBlocks(4, 40, 4, 16)


class Runner:
    """One cache, sequences by name; every call gives the logits of all tokens it ran."""

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
        self.done: dict[str, int] = {}
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

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Run the next tokens of some sequences in one batch; single tokens come first."""
        items = sorted(work, key=lambda item: len(item[1]) != 1)
        batch = Batch([], [], [], [], [], [], [], [])
        for name, tokens in items:
            start = self.done.get(name, 0)
            stop = start + len(tokens)
            assert self.tables.reserve(name, stop)
            batch.token_ids.extend(tokens)
            batch.positions.extend(range(start, stop))
            batch.slot_mapping.extend(self.tables.write(name, start, stop))
            batch.block_tables.append(self.tables.table(name))
            batch.query_lengths.append(len(tokens))
            batch.kv_lengths.append(stop)
            batch.group_tables.append(self.tables.group_tables(name))
            self.done[name] = stop
        batch.logits_indices.extend(range(len(batch.token_ids)))
        logits = self.model.forward(batch).split([len(tokens) for _, tokens in items])
        return {name: part for (name, _), part in zip(items, logits, strict=True)}

    def release(self, name: str) -> None:
        self.tables.release(name)
        del self.done[name]

    def in_chunks(self, name: str, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """All logits of one sequence that comes in chunks of these lengths."""
        parts, low = [], 0
        for chunk in chunks:
            parts.append(self.step([(name, tokens[low : low + chunk])])[name])
            low += chunk
        assert low == len(tokens)
        return torch.cat(parts)

    def mixed(self, sequences: dict[str, list[int]], seed: int = 0) -> dict[str, Tensor]:
        """All logits of sequences that run side by side in chunks of any length."""
        rng, parts = random.Random(seed), {name: [] for name in sequences}  # type: ignore[var-annotated]
        while True:
            left = {n: t[self.done.get(n, 0) :] for n, t in sequences.items()}
            work = [(n, t[: rng.choice([1, 1, 1, 2, 7, 40])]) for n, t in left.items() if t]
            if not work:
                return {name: torch.cat(part) for name, part in parts.items()}
            for name, logits in self.step(work).items():
                parts[name].append(logits)
