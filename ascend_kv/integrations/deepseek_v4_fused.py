"""DeepSeek-V4's attention by CANN's SparseFlashMla: which calls a step makes for a layer.

``ops.sparse_flash_mla`` says what it takes. A step makes up to two calls a layer: for the
sequences with one token, whose window is the ring, and for the others, whose window is the pages
of the step. The tables and the task lists are made once and serve all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ascend_kv.cache.compressed import CompressedKVCache, CompressedLayerCache
from ascend_kv.compressed_layers import CompressedLayers
from ascend_kv.integrations.deepseek_v4_layer import LayerInput
from ascend_kv.integrations.deepseek_v4_plan import EntriesPlan, Span, WindowPlan, pad_rows
from ascend_kv.ops.sparse_flash_mla import PreparedCall, Request, Unserved, plan

Tensor = torch.Tensor


class _Part(NamedTuple):
    """The sequences of one call."""

    rows: slice  # of the packed tokens
    sequences: slice
    window_table: Tensor  # [b, M] by position // W
    call: PreparedCall


class FusedAttention:
    """The calls of one step, by kind of layer."""

    def __init__(
        self,
        library: Any,
        layers: CompressedLayers,
        cache: CompressedKVCache,
        spans: Sequence[Span],
        window: WindowPlan,
        entries: dict[str, EntriesPlan],
    ) -> None:
        self._library, self._layers, self._cache = library, layers, cache
        self._spans, self._window, self._entries = spans, window, entries
        self._parts: dict[str, list[_Part] | Unserved] = {}

    def serves(self, kind: str, query: Tensor) -> bool:
        """Whether SparseFlashMla takes the layers of that kind; asked once a step."""
        if kind not in self._parts:
            self._parts[kind] = self._prepare(kind, query)
        return isinstance(self._parts[kind], list)

    def reason(self, kind: str) -> str:
        """Why it does not take them."""
        return str(self._parts[kind])

    def attend(
        self,
        kind: str,
        cache: CompressedLayerCache,
        pages: Tensor | None,
        given: LayerInput,
        listed: Tensor | None,
    ) -> Tensor:
        """Output ``[T, H, D]``; ``pages`` and ``listed`` as the step has made them."""
        outputs = []
        parts = self._parts[kind]
        assert isinstance(parts, list), "serves() comes first"
        for part in parts:
            entries = None if cache.entries is None else cache.entries.codes
            table = None if entries is None else self._entries[kind].tables[part.sequences]
            window = cache.ring if part.rows.start == 0 and self._window.num_decodes else pages
            assert window is not None
            outputs.append(
                part.call.attend(
                    given.query[part.rows],
                    window,
                    part.window_table,
                    entries,
                    table,
                    None if listed is None else listed[part.rows],
                    given.module.sinks,
                    given.module.scaling,
                )
            )
        return torch.cat(outputs)

    def _prepare(self, kind: str, query: Tensor) -> list[_Part] | Unserved:
        count, total, width = self._window.num_decodes, len(query), self._layers.window_tokens
        pieces = [
            (slice(0, count), slice(0, count), [[s.slot] * -(-s.stop // width) for s in
                                                self._spans[:count]]),
            (slice(count, total), slice(count, len(self._spans)), self._page_rows()),
        ]  # fmt: skip
        parts: list[_Part] = []
        for rows, sequences, tables in pieces:
            if not tables:
                continue
            made = plan(self._request(kind, query, self._spans[sequences]))
            if isinstance(made, Unserved):
                return made
            call = PreparedCall(made, self._library, query.device)
            parts.append(_Part(rows, sequences, pad_rows(tables, query.device), call))
        return parts

    def _page_rows(self) -> list[list[int]]:
        """Tables of the prefills by position: columns before their pages name any block."""
        rows, page = [], 0
        size = self._layers.window_tokens
        for first, length in zip(self._window.first_pages, self._window.page_lengths, strict=True):
            count = -(-length // size)
            rows.append([0] * first + list(range(page, page + count)))
            page += count
        return rows

    def _request(self, kind: str, query: Tensor, spans: Sequence[Span]) -> Request:
        layers, formats = self._layers, self._cache.formats
        dtype = torch.int8 if formats.entries == "int8" else getattr(torch, formats.dtype)
        return Request(
            dtype=query.dtype,
            entries_dtype=dtype,
            num_heads=query.shape[1],
            head_dim=query.shape[2],
            window=layers.window_tokens,
            window_block_size=layers.window_tokens,
            entry_block_size=self._cache.blocks.block_size,
            ratio=0 if kind == "window" else layers.ratio(kind),
            listed=layers.index_topk if kind == "csa" else 0,
            query_lengths=tuple(span.length for span in spans),
            lengths=tuple(span.stop for span in spans),
        )
