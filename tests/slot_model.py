"""A stand-in model that reads its tokens back through the cache, and engines that run it.

The model keeps one number a slot. Its next token is a function of every token it finds through
the block tables, so a wrong slot, table, length or order changes what is generated.
"""

from __future__ import annotations

import random

import torch

from ascend_kv.cache.tables import SequenceTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.engine.params import SamplingParams

VOCAB = 101


def next_token(tokens: list[int]) -> int:
    """What the stand-in model says after ``tokens``."""
    return sum((position + 3) * token for position, token in enumerate(tokens)) % VOCAB


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """The same, token by token, without any cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SlotModel:
    """Stores tokens by slot; forgets nothing, so stale slots are found when read."""

    def __init__(self, tables: SequenceTables) -> None:
        self.slots = [-1] * (tables.num_blocks * tables.block_size)
        self.block_size = tables.block_size
        self.batches: list[Batch] = []
        self.poisoned_tokens: frozenset[int] = frozenset()

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        assert len(batch.token_ids) == len(batch.positions) == len(batch.slot_mapping)
        assert sum(batch.query_lengths) == len(batch.token_ids)
        for slot, token in zip(batch.slot_mapping, batch.token_ids, strict=True):
            self.slots[slot] = token
        logits, row = [], 0
        for table, queries, length in zip(
            batch.block_tables, batch.query_lengths, batch.kv_lengths, strict=True
        ):
            assert batch.positions[row : row + queries] == list(range(length - queries, length))
            size = self.block_size
            seen = [self.slots[table[i // size] * size + i % size] for i in range(length)]
            for position in range(length - queries, length):
                if row in batch.logits_indices:
                    logits.append(self.logits(seen[: position + 1]))
                row += 1
        assert len(logits) == len(batch.logits_indices)
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def logits(self, seen: list[int]) -> torch.Tensor:
        if self.poisoned_tokens & set(seen):
            return torch.full((VOCAB,), float("nan"))
        return torch.nn.functional.one_hot(torch.tensor(next_token(seen)), VOCAB).float()


def make_engine(
    tables: SequenceTables, eos: tuple[int, ...] = (), vocab_size: int | None = None, **limits: int
) -> tuple[Engine, SlotModel]:
    config = SchedulerConfig(
        **({"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | limits)  # type: ignore[arg-type]
    )
    model = SlotModel(tables)
    return Engine(model, tables, config, eos, vocab_size), model


def run(engine: Engine) -> dict[str, RequestOutput]:
    finished = {}
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    raise AssertionError("the engine does not come to an end")


def greedy(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **others)  # type: ignore[arg-type]


def random_prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))], rng.randrange(1, 20))
        for _ in range(count)
    ]
