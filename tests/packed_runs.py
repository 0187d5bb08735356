"""Packed batches of a test's making, for models that serve sequences without the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.engine.batch import Batch, Model

Tensor = torch.Tensor


class PackedRunner:
    """One cache, sequences by name; every call gives the logits of all tokens it ran."""

    tables: SequenceTables
    model: Model

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def reserved(self) -> None:
        """Called when a step has its blocks, before it writes."""

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Run the next tokens of some sequences in one batch; single tokens come first."""
        items = sorted(work, key=lambda item: len(item[1]) != 1)
        batch = Batch([], [], [], [], [], [], [], [])
        for name, tokens in items:
            assert self.tables.reserve(name, self.done.get(name, 0) + len(tokens))
        self.reserved()
        for name, tokens in items:
            start = self.done.get(name, 0)
            stop = start + len(tokens)
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
        """Give the sequence's blocks back."""
        self.tables.release(name)
        del self.done[name]

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
