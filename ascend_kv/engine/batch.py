"""What the engine hands to a model for one step, and what it expects back.

Everything is a host list: a model makes device tensors of them once, and no operator ever has
to read a length back from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """Packed tokens of several sequences: T tokens of B sequences, decodes first.

    A sequence that brings one token counts as a decode, whatever its prompt was.
    """

    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T] position of each token in its own sequence"""
    slot_mapping: list[int]
    """[T] where each token's key and value go: block * block_size + offset"""
    block_tables: list[list[int]]
    """[B] rows of the blocks of each sequence, each as long as it is"""
    query_lengths: list[int]
    """[B] tokens of each sequence in this step; they sum to T"""
    kv_lengths: list[int]
    """[B] tokens of each sequence in the cache after this step's were stored"""
    logits_indices: list[int]
    """rows of the T packed tokens whose logits are wanted, ascending"""
    group_tables: list[Mapping[str, list[int]]] = field(default_factory=list)
    """[B] of a cache with several groups: by group the blocks of each sequence"""

    @property
    def num_decodes(self) -> int:
        """Leading sequences that bring one token each."""
        return sum(1 for length in self.query_lengths if length == 1)


class Model(Protocol):
    """A model that keeps its own KV cache tensors and runs packed batches."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the tokens of ``batch``, storing their keys and values.

        Returns:
            Logits ``[len(batch.logits_indices), vocab]``.
        """
        ...
