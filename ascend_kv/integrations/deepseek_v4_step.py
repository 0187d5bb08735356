"""One step of DeepSeek-V4's layers over the compressed cache: store, compress, attend.

In a layer of a window only the ring is all. In the others a query attends to the ring and to
entries in one softmax, which is two calls of ``paged_attention`` joined by ``merge_attention``:
the sink counts once, there. HCA attends to all entries it may see, CSA to those that the indexer
scores best, ties to the lowest index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ascend_kv import ops
from ascend_kv.cache.compressed import CompressedKVCache, CompressedLayerCache, PagedVectors
from ascend_kv.compressed_layers import CompressedLayers
from ascend_kv.engine.batch import Batch
from ascend_kv.integrations.deepseek_v4_fused import FusedAttention
from ascend_kv.integrations.deepseek_v4_indexer import select_entries
from ascend_kv.integrations.deepseek_v4_layer import LayerInput, project
from ascend_kv.integrations.deepseek_v4_plan import (
    CompressPlan,
    EntriesPlan,
    plan_compression,
    plan_entries,
    plan_window,
    spans_of,
)

Tensor = torch.Tensor
Part = tuple[Tensor, Tensor]
"""Output [T, H, D] and log-sum-exp [T, H] of one part of an attention"""

_PAGE_ELEMENTS = 1 << 23
"""Numbers of the entries that were selected for some queries, in memory at once"""


class CompressedStep:
    """The layers of one forward, each attending to what the cache holds after its tokens."""

    def __init__(
        self,
        cache: CompressedKVCache,
        layers: CompressedLayers,
        batch: Batch,
        rotary_table: Tensor,
        device: torch.device,
        library: Any = None,
        routes: Counter[str] | None = None,
    ) -> None:
        """Plan the step.

        Args:
            cache: the tensors. layers: their geometry.
            batch: its block tables are the slots of the sequences.
            rotary_table: ``[max_model_len, R / 2, 2]``, of the compressed layers.
            device: of the cache.
            library: what has SparseFlashMla, if anything.
            routes: counts what served the layers' attention, if given.
        """
        self._cache, self._layers = cache, layers
        self._rotary_table = rotary_table
        spans = spans_of(batch)
        size = cache.blocks.block_size
        self._query_lengths = batch.query_lengths
        self.window = plan_window(spans, layers.window_tokens, device)
        groups = [group for group in ("csa", "hca") if layers.count(group)]
        self._compression = {
            group: plan_compression(spans, batch, group, layers, size, device) for group in groups
        }
        self.entries = {
            group: plan_entries(spans, batch, group, layers.ratio(group), size, device)
            for group in groups
        }
        self._fused = None
        if library is not None:
            self._fused = FusedAttention(library, layers, cache, spans, self.window, self.entries)
        self._routes: Counter[str] = Counter() if routes is None else routes

    def attend(self, layer: int, given: LayerInput) -> Tensor:
        """Store a layer's tokens and attend: ``[T, H, D]``, RoPE still on its last channels."""
        cache, kind = self._cache.layers[layer], self._layers.kinds[layer]
        pages = self._store(cache, given.key)
        if kind != "window":
            self._compress(kind, cache, given)
        if self._fused is not None and self._fused.serves(kind, given.query):
            self._routes["SparseFlashMla"] += 1
            listed = self._list(kind, cache, given)
            return self._fused.attend(kind, cache, pages, given, listed)
        reason = "" if self._fused is None else f" ({self._fused.reason(kind)})"
        self._routes[f"operators{reason}"] += 1
        sinks = given.module.sinks
        if kind == "window":
            return self._attend_window(cache, pages, given, sinks)[0]
        window = self._attend_window(cache, pages, given, None)
        compressed = self._attend_entries(kind, cache, given)
        parts = [window] if compressed is None else [window, compressed]
        outputs, log_sum_exps = zip(*parts, strict=True)
        return ops.merge_attention(outputs, log_sum_exps, sinks=sinks)[0]

    def _store(self, cache: CompressedLayerCache, key: Tensor) -> Tensor | None:
        """Write to the ring; returns the pages that the prefills attend to."""
        plan = self.window
        ring = cache.ring.view(-1, cache.ring.shape[3])
        old = ring[plan.old_places]  # before they are overwritten
        ring[plan.written_places] = key[plan.written_rows]
        if not plan.page_count:
            return None
        # zeros, for no rubbish may stand where a page begins before the window
        pages = cache.ring.new_zeros((plan.page_count, *cache.ring.shape[1:]))
        rows = pages.view(-1, ring.shape[1])
        rows[plan.old_targets] = old
        rows[plan.new_targets] = key[plan.num_decodes :]
        return pages

    def _attend_window(
        self,
        cache: CompressedLayerCache,
        pages: Tensor | None,
        given: LayerInput,
        sinks: Tensor | None,
    ) -> Part:
        plan, scale = self.window, given.module.scaling
        parts = []
        count = plan.num_decodes
        if count:
            parts.append(
                ops.paged_attention(
                    given.query[:count],
                    cache.ring,
                    cache.ring,
                    plan.decode_tables,
                    [1] * count,
                    plan.decode_lengths,
                    scale,
                    causal=False,  # all that the ring holds is in the window
                    sinks=sinks,
                )
            )
        if pages is not None:
            parts.append(
                ops.paged_attention(
                    given.query[count:],
                    pages,
                    pages,
                    plan.page_tables,
                    plan.query_lengths,
                    plan.page_lengths,
                    scale,
                    window=self._layers.window_tokens,
                    sinks=sinks,
                )
            )
        return _join(parts)

    def _list(self, kind: str, cache: CompressedLayerCache, given: LayerInput) -> Tensor | None:
        """The entries of each query ``[T, k]`` where a layer has lists of them, -1 for none."""
        if kind != "csa":
            return None
        plan, columns = self.entries[kind], self._layers.index_topk
        if max(plan.counts) > columns:
            return self._select(cache, given)
        every = torch.arange(columns, dtype=torch.int32, device=given.query.device)
        return torch.where(every <= plan.last_seen[:, None], every, -1)

    def _compress(self, kind: str, cache: CompressedLayerCache, given: LayerInput) -> None:
        plan, compressor = self._compression[kind], given.module.compressor
        dtype = given.key.dtype
        assert cache.entries is not None and cache.state is not None
        self._fill(kind, plan, compressor, cache.state, cache.entries, given.hidden, dtype)
        if kind == "csa":
            assert cache.index_keys is not None and cache.index_state is not None
            self._fill(
                kind,
                plan,
                compressor.indexer,
                cache.index_state,
                cache.index_keys,
                given.hidden,
                dtype,
            )

    def _fill(
        self,
        kind: str,
        plan: CompressPlan,
        compressor: Any,
        state: Tensor,
        target: PagedVectors,
        hidden: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Compress the windows that are full now into ``target``; keep the others' tokens."""
        projected = [project(compressor.kv_proj, hidden), project(compressor.gate_proj, hidden)]
        tokens = torch.stack(projected, 1).to(torch.float32)  # [T, 2, C]
        if plan.lengths:
            rows = torch.cat((state[plan.kept_places], tokens))[plan.order]
            previous = {}
            if kind == "csa":
                before = state[plan.previous_places][..., : target_dim(target)]
                previous = {"previous_kv": before[:, :, 0], "previous_gate": before[:, :, 1]}
            entries = ops.hca_compress(
                rows[:, 0],
                rows[:, 1],
                plan.lengths,
                self._layers.ratio(kind),
                position_bias=compressor.position_bias,
                overlap=kind == "csa",
                first_windows=plan.first_windows,
                norm_weight=compressor.kv_norm.weight,
                norm_eps=compressor.kv_norm.variance_epsilon,
                rotary_table=self._rotary_table,
                rotary_dim=self._layers.rotary_dim,
                dtype=dtype,
                **previous,
            )
            target.store(entries, plan.entry_slots)
        state[plan.written_places] = tokens[plan.written_rows]

    def _attend_entries(
        self, kind: str, cache: CompressedLayerCache, given: LayerInput
    ) -> Part | None:
        """Attention to entries; None where no query sees any."""
        plan = self.entries[kind]
        assert cache.entries is not None
        if not any(plan.counts):
            return None
        if kind == "csa" and max(plan.counts) > self._layers.index_topk:
            return self._attend_listed(cache.entries, plan, given, self._select(cache, given))
        entries, tables = cache.entries.codes, plan.tables
        if cache.entries.quantized:
            entries, tables = self._load(cache.entries, plan, given.query.dtype)
        return ops.paged_attention(
            given.query,
            entries,
            entries,
            tables,
            self._query_lengths,
            plan.lengths,
            given.module.scaling,
            query_positions=plan.last_seen,
        )

    def _attend_listed(
        self, entries: PagedVectors, plan: EntriesPlan, given: LayerInput, listed: Tensor
    ) -> Part:
        """Attention to the entries ``listed`` [T, k] for each query, best first, -1 for none.

        What was selected is read, and no more: a page of its own for each query.
        """
        size, device = entries.codes.shape[2], listed.device
        tables = plan.tables[self._row_of_query(device)]
        known = listed.clamp(min=0).to(torch.int64)
        blocks = tables.gather(1, known // size).clamp(min=0).to(torch.int64)
        slots = blocks * size + known % size
        columns = listed.shape[1]
        step = max(1, _PAGE_ELEMENTS // (columns * given.query.shape[2]))
        parts = []
        for low in range(0, len(listed), step):
            query, part = given.query[low : low + step], slice(low, low + step)
            pages = entries.read(slots[part], query.dtype)[:, None]
            parts.append(
                ops.paged_attention(
                    query,
                    pages,
                    pages,
                    torch.arange(len(query), dtype=torch.int32, device=device)[:, None],
                    [1] * len(query),
                    [min(count, columns) for count in plan.counts[part]],
                    given.module.scaling,
                    causal=False,
                    query_positions=plan.last_seen[part],  # so that a query may have no entries
                )
            )
        return _join(parts)

    def _load(
        self, entries: PagedVectors, plan: EntriesPlan, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """All entries of the batch's sequences, dequantized, and their tables."""
        size = entries.codes.shape[2]
        used = plan.tables >= 0
        blocks = plan.tables[used].to(torch.int64)
        offsets = torch.arange(size, device=blocks.device)
        pages = entries.read(blocks[:, None] * size + offsets, dtype)[:, None]
        numbers = (used.flatten().cumsum(0) - 1).view(used.shape)
        return pages, numbers.masked_fill_(~used, -1).to(torch.int32)

    def _select(self, cache: CompressedLayerCache, given: LayerInput) -> Tensor:
        assert cache.index_keys is not None
        topk, lengths = self._layers.index_topk, self._query_lengths
        return select_entries(cache.index_keys, given, self.entries["csa"], lengths, topk)

    def _row_of_query(self, device: torch.device) -> Tensor:
        rows = [row for row, count in enumerate(self._query_lengths) for _ in range(count)]
        return torch.tensor(rows, dtype=torch.int64, device=device)


def target_dim(target: PagedVectors) -> int:
    """Channels of a vector in pages."""
    return target.codes.shape[3] + (0 if target.exact is None else target.exact.shape[3])


def _join(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    outputs, log_sum_exps = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(log_sum_exps)
