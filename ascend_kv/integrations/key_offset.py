"""Attention over keys that are stored without a known offset.

A key at position n is ``R(n) (W x + b)``. Stored is ``R(n) W x``; what a query q lacks of its
score is ``q . R(n) b``. With b in pairs (b1, b2) and q likewise, R(n) turning by an angle a::

    q . R(n) b = sum over pairs of  cos a (q1 b1 + q2 b2) + sin a (q2 b1 - q1 b2)

so for all positions at once it is one matrix product of ``[T * H, D]``, made of the query and b
alone, with a table ``[D, P]`` of cosines and sines that every layer and sequence shares. An NPU's
attention takes that product as a bias of its scores, and so does the Python reference. The native
operator of a CPU takes b and the frequencies instead and needs no such product.

``attend`` gives the offset back that way, and that way only, whatever reads the cache: on an NPU
also where the keys are loaded first. ``load_arguments`` and ``give_back`` are for attention that
takes dense keys and no score bias; with both it would count twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ascend_kv.cache.paged import LayerCache
from ascend_kv.ops.kv_cache_load import rotated_offset
from ascend_kv.ops.registration import has_kernel

Tensor = torch.Tensor

# The score bias of one call, in float32 elements: 64 MiB.
SCORE_BIAS_ELEMENTS = 1 << 24
_TABLE_ROWS = 1 << 13
_NATIVE = "paged_attention", "cpu"


class Rotation(NamedTuple):
    """A rotary embedding whose angles grow evenly with the position."""

    frequencies: Tensor
    """``[D / 2]`` float64, radians from a position to the next"""
    factor: float
    """what cosines and sines are multiplied by"""


class KeyOffset:
    """The offsets of a model's layers, and what turns them."""

    def __init__(
        self,
        offsets: Mapping[int, Tensor],
        rotary_table: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Join them.

        Args:
            offsets: by layer ``[N, D]`` float32, what stored keys lack before rotation.
            rotary_table: ``[P, D / 2, 2]`` float32, for every position that will be cached.
            rotation: what the table holds; without it a CPU, too, makes the score bias whole.
        """
        self._offsets = {layer: x.to(rotary_table.device) for layer, x in offsets.items()}
        self._table = rotary_table
        self._operands: dict[int, dict[str, Tensor]] = {}
        if rotation is not None and rotary_table.device.type == "cpu" and has_kernel(*_NATIVE):
            self._operands = {
                layer: {
                    "key_offset": rotation.factor * x.to(torch.float32),
                    "rotary_frequencies": rotation.frequencies,
                }
                for layer, x in self._offsets.items()
            }

    def __contains__(self, layer: int) -> bool:
        return layer in self._offsets

    def load_arguments(self, layer: int) -> dict[str, Tensor]:
        """Keyword arguments of ``kv_cache_load`` that give the offset back; may be none."""
        if layer not in self:
            return {}
        return {"key_offset": self._offsets[layer], "rotary_table": self._table}

    def give_back(self, layer: int, key: Tensor, positions: Tensor) -> Tensor:
        """Fresh keys ``[T, N, D]`` at ``positions`` [T] with the offset, in float32."""
        if layer not in self:
            return key
        turned = rotated_offset(self._offsets[layer], self._table, positions[None, None])
        return key.to(torch.float32) + turned[0].transpose(0, 1)

    def score_bias(
        self,
        layer: int,
        query: Tensor,
        softmax_scale: float,
        length: int,
        first: Tensor | None = None,
    ) -> Tensor:
        """What the scaled scores of ``query`` [T, H, D] lack: ``[T, H, length]`` float32.

        ``first`` [T]: the position of the first key of each query; None: 0.
        """
        offset = self._offsets[layer]
        tokens, heads, dim = query.shape
        kv_heads = offset.shape[0]
        grouped = query.to(torch.float32).view(tokens, kv_heads, heads // kv_heads, dim)
        grouped = grouped * softmax_scale
        q1, q2 = grouped.chunk(2, -1)
        b1, b2 = offset[:, None].chunk(2, -1)
        features = torch.stack((q1 * b1 + q2 * b2, q2 * b1 - q1 * b2), -1)
        features = features.view(tokens, heads, dim)
        if first is None:
            return features @ self._table[:length].view(length, dim).t()
        places = first[:, None] + torch.arange(length, device=first.device)
        turns = self._table[places.clamp_(max=len(self._table) - 1)]  # beyond it there is no key
        return features @ turns.flatten(2).transpose(1, 2)

    def attention_arguments(
        self,
        layer: int,
        query: Tensor,
        softmax_scale: float,
        length: int,
        first: Tensor | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments by which ``paged_attention`` gives the offset back.

        Args:
            layer: one that has an offset.
            query: ``[T, H, D]``, not scaled.
            softmax_scale: of the scores.
            length: of the longest sequence, or of what is read of it.
            first: ``[T]``, the position of the first key that each query reads; None: 0.
        """
        operands = self._operands.get(layer)
        if operands is None:
            return {"score_bias": self.score_bias(layer, query, softmax_scale, length, first)}
        if first is None:
            return operands
        # q . R(first + i) b = (R(-first) q) . R(i) b
        angles = first[:, None, None] * operands["rotary_frequencies"]
        cosine, sine = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        q1, q2 = query.to(torch.float32).chunk(2, -1)
        turned = torch.cat((q1 * cosine + q2 * sine, q2 * cosine - q1 * sine), -1)
        return {**operands, "offset_query": turned}

    def attend(
        self,
        layer: int,
        query: Tensor,
        cache: LayerCache,
        block_tables: Tensor,
        query_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        softmax_scale: float,
        window: int,
    ) -> Tensor:
        """``LayerCache.attend`` with what the scores lack.

        A score bias that has to exist as a whole is made in as many calls as keep it small.
        """
        if layer in self._operands:
            return cache.attend(
                query,
                block_tables,
                query_lengths,
                kv_lengths,
                softmax_scale,
                window=window,
                **self._operands[layer],
            )
        outputs = []
        start = 0
        for pieces in cut_calls(query_lengths, kv_lengths, query.shape[1]):
            rows = [piece.row for piece in pieces]
            queries = [piece.queries for piece in pieces]
            lengths = [piece.kv_length for piece in pieces]
            stop = start + sum(queries)
            part = query[start:stop]
            output = cache.attend(
                part,
                block_tables[rows[0] : rows[-1] + 1],
                queries,
                lengths,
                softmax_scale,
                window=window,
                score_bias=self.score_bias(layer, part, softmax_scale, max(lengths)),
            )
            outputs.append(output)
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Piece(NamedTuple):
    """Consecutive queries of one sequence, and the cached tokens up to the last of them."""

    row: int
    queries: int
    kv_length: int


def cut_calls(
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    heads: int,
    most_elements: int | None = None,
) -> Iterator[list[Piece]]:
    """Cut a batch, in its order, so that queries × heads × longest length stays in bounds.

    One query is never cut. The queries of a sequence that are cut off see the same tokens as
    before, for none of them sees a later one.
    """
    most = SCORE_BIAS_ELEMENTS if most_elements is None else most_elements
    call: list[Piece] = []
    tokens = longest = 0
    for row, (queries, cached) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        step = max(1, most // (heads * max(cached, 1)))
        for low in range(0, max(queries, 1), step):
            high = min(low + step, queries)
            piece = Piece(row, high - low, cached - queries + high)
            reach = max(longest, piece.kv_length)
            same_row = bool(call) and call[-1].row == row
            if call and (same_row or (tokens + piece.queries) * heads * reach > most):
                yield call
                call, tokens, longest = [], 0, 0
            call.append(piece)
            tokens += piece.queries
            longest = max(longest, piece.kv_length)
    if call:
        yield call


@torch.inference_mode()
def make_rotary_table(rotary_embedding: Any, head_dim: int, positions: Sequence[int]) -> Tensor:
    """``[len(positions), D / 2, 2]`` float32 from the model's own rotary embedding.

    So scaled frequencies (linear, llama3, yarn) and the factor that some of them put on cosine
    and sine are in it.
    """
    device = rotary_embedding.inv_freq.device
    like = torch.empty(0, dtype=torch.float32, device=device)
    rows = []
    for first in range(0, len(positions), _TABLE_ROWS):  # it makes twice as much on its way
        index = torch.tensor(list(positions[first : first + _TABLE_ROWS]), device=device)
        cosine, sine = rotary_embedding(like, index[None])
        half = slice(0, head_dim // 2)
        rows.append(torch.stack((cosine[0, :, half], sine[0, :, half]), -1))
    return torch.cat(rows)


def find_rotation(rotary_embedding: Any) -> Rotation:
    """What a model's rotary embedding says of itself."""
    frequencies = rotary_embedding.inv_freq.detach().to(device="cpu", dtype=torch.float64)
    return Rotation(frequencies, float(getattr(rotary_embedding, "attention_scaling", 1.0)))


def holds_rotation(table: Tensor, positions: Sequence[int], rotation: Rotation) -> bool:
    """Whether a table of these positions is that of the rotation, up to angles in float32."""
    places = torch.tensor(list(positions), dtype=torch.float64)
    angles = places[:, None] * rotation.frequencies
    expected = rotation.factor * torch.stack((angles.cos(), angles.sin()), -1)
    allowed = rotation.factor * (1e-6 + angles.abs() * 2.0**-22)
    if table.shape != expected.shape:
        return False
    return bool(((table.cpu() - expected).abs() <= allowed[..., None]).all())
