"""How a model is cut over cards: tensor parallel inside a copy, data parallel between copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry
from ascend_kv.user_values import at_least_one


@dataclass(frozen=True)
class Parallel:
    """So many copies of the model, each on so many cards.

    Attributes:
        tensor: cards that share a copy; every layer's heads are dealt out to them.
        data: copies, each with sequences of its own.
        experts: cards that share one set of routed experts, whichever copy they belong to; None
            for the cards of one copy.
    """

    tensor: int = 1
    data: int = 1
    experts: int | None = None

    @property
    def cards(self) -> int:
        return self.tensor * self.data

    @property
    def expert(self) -> int:
        """Cards that share one set of routed experts."""
        return self.experts or self.tensor

    def __str__(self) -> str:
        words = f"{self.tensor} x tensor parallel, {self.data} x data parallel"
        return words if self.experts is None else f"{words}, {self.experts} x expert parallel"


def kv_heads_of_rank(geometry: ModelGeometry, tensor: int) -> int:
    """KV heads that one card keeps: its share, or one whole head where there are too few.

    With fewer KV heads than cards each is kept on several, so that the cache does not shrink any
    further (vllm-ascend issue 17347).
    """
    return max(1, geometry.num_kv_heads // tensor)


def copies_of_heads(geometry: ModelGeometry, tensor: int) -> int:
    """On how many cards of a copy every KV head lies."""
    return tensor * kv_heads_of_rank(geometry, tensor) // geometry.num_kv_heads


def rank_geometry(geometry: ModelGeometry, tensor: int) -> ModelGeometry:
    """The geometry of one card's share; bytes computed from it are one card's."""
    if tensor == 1:
        return geometry
    return replace(
        geometry,
        num_heads=geometry.num_heads // tensor,
        num_kv_heads=kv_heads_of_rank(geometry, tensor),
    )


def divides(geometry: ModelGeometry, tensor: int) -> bool:
    """Whether the query heads can be dealt out evenly, and the KV heads dealt out or repeated."""
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    return heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)


def choose_parallel(
    geometry: ModelGeometry, cards: int | None, tensor: int | None, data: int | None
) -> Parallel:
    """From what the user gave of three numbers, of which two decide.

    ``cards`` alone means one copy over all of them.

    Raises:
        UsageError: numbers below 1, a product that is not ``cards``, or a tensor size that the
            heads do not divide by; names the nearest that do.
    """
    chosen = _chosen(cards, tensor, data, tensor_first=True)
    if not divides(geometry, chosen.tensor):
        raise _refusal(geometry, chosen, "--cards" if tensor is None else "--tensor-parallel")
    return chosen


def choose_sparse_parallel(
    heads: Sequence[int],
    num_experts: int,
    sizes: tuple[int | None, int | None, int | None, int | None],
) -> Parallel:
    """The same for DeepSeek's layers, whose one KV head is kept by every card.

    ``cards`` alone means a copy of the attention on each, and routed experts shared by all, which
    is how cann-recipes-infer deploys V3.2 and V4.

    Args:
        heads: counts that a tensor size has to divide: query heads, groups of the output.
        num_experts: routed experts of a layer.
        sizes: cards, tensor, data and expert parallel, None where not given.

    Raises:
        UsageError: as ``choose_parallel``, and experts that cannot be dealt out.
    """
    cards, tensor, data, expert = sizes
    chosen = _chosen(cards, tensor, data, tensor_first=False)
    whole = gcd(*heads)
    if whole % chosen.tensor:
        legal = [size for size in range(1, whole + 1) if whole % size == 0]
        hint = f"It has to divide {' and '.join(map(str, heads))}: query heads, output groups."
        raise UsageError("--tensor-parallel", chosen.tensor, legal, hint)
    if expert is not None:
        at_least_one("--expert-parallel", expert)
    wanted = chosen.cards if expert is None else expert
    sound = [
        size
        for size in range(chosen.tensor, chosen.cards + 1, chosen.tensor)
        if chosen.cards % size == 0 and num_experts % size == 0
    ]
    if wanted not in sound:
        field = "--cards" if expert is None else "--expert-parallel"
        hint = f"{num_experts} experts are dealt out evenly to whole copies of the attention."
        sizes_said = ", ".join(map(str, sound)) or "none with this --tensor-parallel"
        shared = f"on {chosen.cards} cards, --expert-parallel: {sizes_said}"
        raise UsageError(field, wanted, shared, hint)
    return replace(chosen, experts=wanted)


def _chosen(
    cards: int | None, tensor: int | None, data: int | None, tensor_first: bool
) -> Parallel:
    """Tensor and data parallel; the one that comes first takes the cards where neither is given."""
    sizes = {"--cards": cards, "--tensor-parallel": tensor, "--data-parallel": data}
    for name, given in sizes.items():
        if given is not None:
            at_least_one(name, given)
    if cards is None:
        return Parallel(tensor or 1, data or 1)
    if tensor is not None or not (tensor_first or data):
        tensor = tensor or 1
        chosen = Parallel(tensor, data or max(1, cards // tensor))
    else:
        chosen = Parallel(max(1, cards // (data or 1)), data or 1)
    if chosen.cards != cards:
        raise UsageError(
            "--tensor-parallel and --data-parallel",
            f"{chosen.tensor} x {chosen.data}",
            f"two that make {cards} cards together",
        )
    return chosen


def _refusal(geometry: ModelGeometry, chosen: Parallel, field: str) -> UsageError:
    """Ways to use as many cards, and the nearest sizes for other numbers of cards."""
    legal = [size for size in range(1, geometry.num_heads + 1) if divides(geometry, size)]
    fitting = [Parallel(size, chosen.cards // size) for size in legal if chosen.cards % size == 0]
    below = [size for size in legal if size < chosen.tensor][-1:]
    above = [size for size in legal if size > chosen.tensor][:1]
    ways = ", or ".join(
        f"data parallel {way.data}" if way.tensor == 1 else f"{way.tensor} x {way.data}"
        for way in fitting
    )
    nearest = " and ".join(map(str, below + above))
    return UsageError(
        field,
        chosen.tensor,
        f"on {chosen.cards} cards (tensor x data parallel): {ways}",
        f"{geometry.num_heads} query heads and {geometry.num_kv_heads} KV heads cannot be dealt "
        f"out to {chosen.tensor} cards; the nearest sizes that can: {nearest}.",
    )
