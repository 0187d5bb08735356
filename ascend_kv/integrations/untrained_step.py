"""One step of a dense model's layers over the cache that compresses them: store, pool, attend.

A query that is not early attends to four things in one softmax, each a call of
``paged_attention``, joined by ``merge_attention``: the latest tokens (a window), the sinks and up
to 3 tokens before the window (a list), entries of 4 tokens (all, or the best as a list for each
key/value head) and entries of 128 tokens (all).

The best entries: without an indexer, an entry scores the largest q . k among the query heads of a
key/value head, so that one head that looks for it is enough; ties go to the lowest index.

An entry's weight: a softmax sums exp(score) over tokens. By Jensen's inequality the 4 scores that
an entry stands for add up to at least 4 exp(their mean), and their mean is nearly the entry's own
score. So log 4 is added to it, which is the same as adding it to the log-sum-exp of its part. The
keys of 128 tokens, each turned at its own position, are far from their mean turned at one, the
bound says nothing of the entry's score, and without log 128 the text is predicted better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ascend_kv import ops
from ascend_kv.cache.paged import LayerCache
from ascend_kv.cache.untrained import UntrainedKVCache, UntrainedLayerCache
from ascend_kv.engine.batch import Batch
from ascend_kv.integrations.rotary import turn
from ascend_kv.integrations.untrained_plan import (
    EntriesPlan,
    NewEntries,
    TokensPlan,
    late_rows,
    plan_entries,
    plan_tokens,
    spans_of,
)
from ascend_kv.untrained_compression import CSA_RATIO, FINE_IN_COARSE, HCA_RATIO, Compression

Tensor = torch.Tensor
Part = tuple[Tensor, Tensor]
"""Output [T, H, D] and log-sum-exp [T, H] of one part of an attention"""

_SCORE_ELEMENTS = 1 << 22
"""Scores of entries in memory at once"""


class UntrainedStep:
    """The layers of one forward, each attending to what the cache holds after its tokens."""

    def __init__(
        self,
        cache: UntrainedKVCache,
        policy: Compression,
        batch: Batch,
        rotary_table: Tensor,
        device: torch.device,
    ) -> None:
        """Plan the step.

        Args:
            cache: the tensors. policy: when and how far.
            batch: with ``group_tables``.
            rotary_table: ``[P, D / 2, 2]`` cosine and sine, for every position that is cached.
            device: of the cache.
        """
        self._cache, self._policy, self._table = cache, policy, rotary_table
        spans, size = spans_of(batch), cache.block_size
        self.positions = torch.tensor(batch.positions, dtype=torch.int64, device=device)
        self._tokens: dict[str, TokensPlan] = {
            group: plan_tokens(policy, group, spans, batch, size, device)
            for group in ("window", "full")
            if group in cache.blocks
        }
        self._late = late_rows(policy, spans, device)
        self._fine = self._coarse = None
        if len(self._late):
            self._fine = plan_entries("csa", policy, spans, batch, size, device)
            if "hca" in cache.blocks:
                self._coarse = plan_entries("hca", policy, spans, batch, size, device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
    ) -> Tensor:
        """query [T, H, D], key and value [T, N, D] after RoPE; returns [T, H, D]."""
        cache = self._cache.layers[layer]
        plan = self._tokens[cache.group]
        cache.tokens.store(key, value, plan.slots, self.positions)
        if not len(self._late):  # as without compression
            lengths = plan.early_lengths, plan.early_kv_lengths
            return cache.tokens.attend(query, plan.early_tables, *lengths, scaling, window=window)
        self._make_entries(cache)
        late = self._attend_late(cache, plan, query[self._late], scaling)
        if len(late) == len(query):
            return late
        early = torch.ones(len(query), dtype=torch.bool, device=query.device)
        early[self._late] = False
        output = torch.empty_like(query)
        output[self._late] = late
        output[early] = cache.tokens.attend(
            query[early], plan.early_tables, plan.early_lengths, plan.early_kv_lengths, scaling
        )
        return output

    def _make_entries(self, cache: UntrainedLayerCache) -> None:
        if cache.fine is None or self._fine is None:
            return
        self._pool(cache.tokens, cache.fine, self._fine.new, CSA_RATIO)
        if cache.coarse is not None and self._coarse is not None:
            self._pool(cache.fine, cache.coarse, self._coarse.new, FINE_IN_COARSE)

    def _pool(self, source: LayerCache, target: LayerCache, new: NewEntries, ratio: int) -> None:
        """Entries of ``ratio`` units each: keys turned back, averaged, turned at the entry."""
        if not len(new.targets):
            return
        key, value = (_read(pages, new.sources) for pages in (source.key, source.value))
        key = turn(key, self._table[new.positions], back=True)
        units = torch.cat((key, value), 2).flatten(1)  # [units, N * 2D]
        pooled = ops.hca_compress(units, torch.zeros_like(units), new.lengths, ratio)
        key, value = pooled.view(-1, *value.shape[1:2], 2 * value.shape[2]).chunk(2, 2)
        key = turn(key, self._table[new.target_positions])
        target.store(
            key.to(target.key.dtype),
            value.to(target.value.dtype).contiguous(),
            new.targets,
            new.target_positions,
        )

    def _attend_late(
        self, cache: UntrainedLayerCache, plan: TokensPlan, query: Tensor, scaling: float
    ) -> Tensor:
        tokens = cache.tokens
        batch = plan.late_tables, plan.late_lengths, plan.late_kv_lengths, scaling
        parts = [
            ops.paged_attention(query, tokens.key, tokens.value, *batch, window=self._policy.window)
        ]
        if plan.listed.shape[1]:
            parts.append(
                ops.paged_attention(
                    query, tokens.key, tokens.value, *batch, causal=False, entries=plan.listed
                )
            )
        if cache.fine is not None and self._fine is not None and any(self._fine.lengths):
            part = self._attend_fine(cache.fine, self._fine, plan.late_lengths, query, scaling)
            parts.append(self._counted(part, "csa", CSA_RATIO))
        if cache.coarse is not None and self._coarse is not None and any(self._coarse.lengths):
            coarse = self._coarse
            part = ops.paged_attention(
                query,
                cache.coarse.key,
                cache.coarse.value,
                coarse.tables,
                plan.late_lengths,
                coarse.lengths,
                scaling,
                query_positions=torch.tensor(coarse.end, device=query.device) - 1,
            )
            parts.append(self._counted(part, "hca", HCA_RATIO))
        outputs, log_sum_exps = zip(*parts, strict=True)
        return ops.merge_attention(outputs, log_sum_exps)[0]

    def _counted(self, part: Part, group: str, tokens: int) -> Part:
        """A part of entries that each weigh as ``tokens``, if they do."""
        return (part[0], part[1] + math.log(tokens)) if self._policy.counts(group) else part

    def _attend_fine(
        self,
        cache: LayerCache,
        plan: EntriesPlan,
        query_lengths: Sequence[int],
        query: Tensor,
        scaling: float,
    ) -> Part:
        """Attention to entries of 4 tokens, one key/value head after another."""
        kv_heads = cache.key.shape[1]
        group = query.shape[1] // kv_heads
        listed = self._list(cache, plan, query_lengths, query)
        anywhere = torch.zeros(len(query), dtype=torch.int64, device=query.device)
        parts = [
            ops.paged_attention(
                query[:, head * group : (head + 1) * group].contiguous(),
                cache.key[:, head : head + 1],
                cache.value[:, head : head + 1],
                plan.tables,
                query_lengths,
                plan.lengths,
                scaling,
                causal=False,
                query_positions=anywhere,  # so that there may be more queries than entries
                entries=listed[head],
            )
            for head in range(kv_heads)
        ]
        outputs, log_sum_exps = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(log_sum_exps, 1)

    def _list(
        self, cache: LayerCache, plan: EntriesPlan, query_lengths: Sequence[int], query: Tensor
    ) -> Tensor:
        """The entries that each query attends to, ``[N, T, k]`` int32, -1 for none."""
        kv_heads, top_k = cache.key.shape[1], self._policy.top_k
        most = max(high - low for low, high in zip(plan.first, plan.end, strict=True))
        first = torch.tensor(plan.first, dtype=torch.int32, device=query.device)[:, None]
        count = torch.tensor(plan.end, dtype=torch.int32, device=query.device)[:, None]
        if most <= top_k:
            every = first + torch.arange(most, dtype=torch.int32, device=query.device)
            return torch.where(every < count, every, -1).expand(kv_heads, -1, -1).contiguous()
        listed = query.new_full((kv_heads, len(query), top_k), -1, dtype=torch.int32)
        row = 0
        for queries, length, table in zip(query_lengths, plan.lengths, plan.tables, strict=True):
            if length:
                keys = _keys(cache.key, table, length)
                for low, high in _tiles(row, row + queries, query.shape[1] * length):
                    scores = _scores(query[low:high], keys)  # [N, q, length]
                    outside = torch.arange(length, device=query.device) < first[low:high]
                    scores.masked_fill_(outside, -math.inf)
                    lengths = count[low:high, 0].repeat(kv_heads)
                    best = ops.select_topk(scores.flatten(0, 1), top_k, lengths=lengths)
                    listed[:, low:high] = best.view(kv_heads, high - low, top_k)
            row += queries
        return listed


def _read(pages: Tensor, slots: Tensor) -> Tensor:
    """``[n, N, D]`` float32 at ``slots`` [n] of ``[K, N, S, D]``."""
    size = pages.shape[2]
    return pages[slots // size, :, slots % size].to(torch.float32)


def _keys(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """``[N, length, D]`` float32 of one sequence."""
    size = pages.shape[2]
    blocks = table[: -(-length // size)].to(torch.int64)
    return pages[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(torch.float32)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """``[N, q, E]``: of the query heads of each key/value head the largest q . k."""
    kv_heads = keys.shape[0]
    grouped = query.to(torch.float32).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    return (grouped @ keys.transpose(1, 2)[:, None]).amax(1)


def _tiles(start: int, stop: int, row_elements: int) -> Iterator[tuple[int, int]]:
    step = max(1, _SCORE_ELEMENTS // row_elements)
    return ((low, min(low + step, stop)) for low in range(start, stop, step))
