"""DeepSeek-V4's indexer: which entries a query of a CSA layer attends to.

Entry j scores sum over heads of weight_h * ReLU(q_h . k_j), in float32; the best are taken, ties to
the lowest index (``select_topk``). Source: DeepSeek-V4 technical report, 2.3.1, equations 13 to 17.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv import ops
from ascend_kv.cache.compressed import PagedVectors
from ascend_kv.integrations.deepseek_v4_layer import LayerInput, project, turn_last
from ascend_kv.integrations.deepseek_v4_plan import EntriesPlan

Tensor = torch.Tensor

_SCORE_ELEMENTS = 1 << 22
"""Scores, and products of queries and indexer keys, in memory at once; to select the best of them
takes tens of bytes a score"""
_KEY_TILE = 4096
"""Indexer keys that are read at once: they stay in the caches of a CPU"""


def select_entries(
    index_keys: PagedVectors,
    given: LayerInput,
    plan: EntriesPlan,
    query_lengths: Sequence[int],
    topk: int,
) -> Tensor:
    """The entries of each query, ``[T, topk]`` int32, best first, -1 where there are fewer."""
    indexer = given.module.compressor.indexer
    scorer = indexer.scorer
    cosine, sine = given.rotation
    query = indexer.q_b_proj(given.residual).unflatten(1, (indexer.num_heads, -1))
    query = turn_last(query, cosine[0], sine[0]).to(torch.float32)
    weights = project(scorer.weights_proj, given.hidden).to(torch.float32)
    weights = weights * scorer.weights_scaling
    columns = max(plan.lengths)
    step = max(1, _SCORE_ELEMENTS // max(columns, indexer.num_heads * min(columns, _KEY_TILE)))
    selected = []
    for low in range(0, len(query), step):
        part = slice(low, low + step)
        scores = query.new_full((len(query[part]), columns), -torch.inf)
        first = 0
        for queries, count, table in zip(query_lengths, plan.lengths, plan.tables, strict=True):
            rows = slice(max(first, low), min(first + queries, low + step))
            first += queries
            if rows.start < rows.stop:
                target = scores[rows.start - low : rows.stop - low, :count]
                _score(index_keys, table, query[rows], weights[rows] * scorer.softmax_scale, target)
        selected.append(ops.select_topk(scores, topk, lengths=plan.last_seen[part] + 1))
    return torch.cat(selected)


def _score(
    index_keys: PagedVectors, table: Tensor, query: Tensor, weights: Tensor, scores: Tensor
) -> None:
    """Write to ``scores`` [n, E] the sums over heads of weight * ReLU(q . k), a tile at a time."""
    size, count = index_keys.codes.shape[2], scores.shape[1]
    for low in range(0, count, _KEY_TILE):
        high = min(low + _KEY_TILE, count)
        places = torch.arange(low, high, device=table.device)
        slots = table[places // size].to(torch.int64) * size + places % size
        keys, scales = index_keys.read_codes(slots)
        found = (torch.relu(query @ keys.T) * weights[..., None]).sum(1)
        if scales is not None:  # not negative, so ReLU does not mind
            found *= scales
        scores[:, low:high] = found
