"""Runs dense models on the cache that compresses them, and the definition of what they attend to.

``Runner`` gives batches of the test's making to the product. ``Oracle`` stands in the same modules
of the model and computes each query by itself, in float64, from all keys and values of its
sequence: no cache, no blocks, no operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from packed_runs import PackedRunner

from ascend_kv.cache.untrained import UntrainedKVCache
from ascend_kv.cache.untrained_tables import UntrainedTables
from ascend_kv.geometry import FORMATS
from ascend_kv.integrations.attention import STEP_KEYWORD
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.integrations.untrained import UntrainedModel
from ascend_kv.untrained_compression import Compression, most_by_group

Tensor = torch.Tensor
POLICY = Compression(
    window=9, sinks=3, window_layers=1, csa_from=41, hca_from=190, top_k=6, count_tokens="csa"
)


class Runner(PackedRunner):
    """A cache that compresses."""

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Compression = POLICY,
        block_size: int = 5,
        sequences: int = 3,
        step: int = 700,
    ) -> None:
        self.loaded, self.policy = loaded, policy
        groups = policy.groups(loaded.geometry.num_layers)
        most = most_by_group(policy, groups, 700, step, block_size)
        blocks = {group: sequences * count for group, count in most.items()}
        spec = FORMATS[loaded.dtype]
        self.cache = UntrainedKVCache(loaded.geometry, policy, spec, blocks, block_size)
        self.tables = UntrainedTables(policy, blocks, block_size, step)
        self.model = UntrainedModel(loaded, self.cache, policy, 700)
        super().__init__()
        self.poison()

    def poison(self) -> None:
        """What was never written must have no influence."""
        for layer in self.cache.layers:
            for part in (layer.tokens, layer.fine, layer.coarse):
                if part is not None:
                    part.key.fill_(torch.nan)
                    part.value.fill_(torch.nan)

    def poison_free_blocks(self) -> None:
        """Nor must what went back to a pool."""
        for name, group in self.tables._groups.items():
            used = {block for held in group.holdings.values() for block in held.table}
            free = [block for block in range(group.pool.num_blocks) if block not in used]
            for layer in self.cache.layers:
                parts = {layer.group: layer.tokens, "csa": layer.fine, "hca": layer.coarse}
                part = parts.get(name)
                if part is not None:
                    part.key[free] = torch.nan
                    part.value[free] = torch.nan

    def reserved(self) -> None:
        self.poison_free_blocks()

    def in_chunks(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """All logits of one sequence that comes in chunks of these lengths, over and over."""
        parts, low, number = [], 0, 0
        while low < len(tokens):
            high = low + chunks[number % len(chunks)]
            parts.append(self.step([("it", tokens[low:high])])["it"])
            low, number = high, number + 1
        self.release("it")
        return torch.cat(parts)


def expected(loaded: LoadedModel, policy: Compression, tokens: Sequence[int]) -> Tensor:
    """The logits ``[T, vocab]`` of one sequence, by definition."""
    with torch.inference_mode():
        output = loaded.hf_model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
            **{STEP_KEYWORD: Oracle(loaded, policy)},
        )
    logits: Tensor = output.logits[0]
    return logits


class Oracle:
    """Attention of one whole sequence, query by query."""

    def __init__(self, loaded: LoadedModel, policy: Compression) -> None:
        self._frequencies = loaded.hf_model.base_model.rotary_emb.inv_freq.double()
        self._policy = policy

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
    ) -> Tensor:
        query, key, value = query.double(), key.double(), value.double()
        self._entries: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        rows = [self._query(layer, t, query[t], key, value, scaling) for t in range(len(query))]
        return torch.stack(rows).float()

    def _query(
        self, layer: int, t: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """``[H, D]`` of the query at position ``t``, head by head."""
        p, n = self._policy, t + 1
        heads, kv_heads = query.shape[0], key.shape[1]
        if n < p.csa_from:
            exact, fine, coarse = list(range(n)), [], []
        elif layer < p.window_layers:
            exact = [i for i in range(n) if i < p.sinks or i > t - p.window]
            fine, coarse = [], []
        else:
            # entries of 4 begin after the sinks and end before the window
            starts = [i for i in range(p.sinks, n, 4) if i + 4 <= n - p.window]
            wide = len(starts) // 32 if p.hca_from is not None and n >= p.hca_from else 0
            coarse = [starts[32 * i] for i in range(wide)]
            fine = starts[32 * wide :]
            pooled = {i + j for i in starts for j in range(4)}
            exact = [i for i in range(n) if i not in pooled]
            covered = len(coarse) * 128 + len(fine) * 4 + len(exact)
            assert covered == n, "a token is lost or counted twice"
        counted = {"csa": (4,), "all": (4, 128), "none": ()}[p.count_tokens]
        result = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            group = range(kv * (heads // kv_heads), (kv + 1) * (heads // kv_heads))
            entries = [self._entry(i, 4, kv, key, value) for i in fine]
            if len(entries) > p.top_k:
                best = [max(float(query[other] @ k) for other in group) for k, _ in entries]
                order = sorted(range(len(best)), key=lambda e: (-best[e], e))[: p.top_k]
                entries = [entries[e] for e in order]
            parts = [(key[i, kv], value[i, kv], 1) for i in exact]
            parts += [(k, v, 4) for k, v in entries]
            parts += [(*self._entry(i, 128, kv, key, value), 128) for i in coarse]
            scores = torch.stack(
                [
                    scaling * (query[head] @ k) + (math.log(tokens) if tokens in counted else 0.0)
                    for k, _, tokens in parts
                ]
            )
            result.append(scores.softmax(0) @ torch.stack([v for _, v, _ in parts]))
        return torch.stack(result)

    def _entry(
        self, first: int, tokens: int, kv: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        if (first, tokens, kv) not in self._entries:
            span = range(first, first + tokens)
            mean = torch.stack([self._turn(key[i, kv], -i) for i in span]).mean(0)
            entry = self._turn(mean, first), value[first : first + tokens, kv].mean(0)
            self._entries[first, tokens, kv] = entry
        return self._entries[first, tokens, kv]

    def _turn(self, x: Tensor, position: int) -> Tensor:
        angle = position * self._frequencies
        a, b = x.chunk(2)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))
