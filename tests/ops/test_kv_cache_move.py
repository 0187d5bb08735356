"""kv_cache_move: the bytes it copies, the order it reads them in, and the bytes it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ascend_kv import ops
from ascend_kv.errors import UsageError

N, S, D = 2, 4, 6
Tensor = torch.Tensor


def draw(blocks: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bytes, so NaN of every kind among the floats."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.randint(0, 256, (blocks, *shape[:-1], shape[-1] * size), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def layer(blocks: int = 7, shared: bool = True) -> list[Tensor]:
    """All that may belong to a block: keys, values, scales, zero points, positions."""
    tensors = [
        draw(blocks, torch.int8, N, S, D),
        draw(blocks, torch.bfloat16, N, S, D),
        draw(blocks, torch.float32, N, S),
        draw(blocks, torch.float32, N, S, 3),
        draw(blocks, torch.int32, N, S),
    ]
    return [*tensors, draw(blocks, torch.float16, 1, S)] if shared else tensors


def bytes_of(x: Tensor) -> np.ndarray:
    """With an axis for the bytes of an element."""
    return x.contiguous()[..., None].view(torch.uint8).numpy()


def expect(
    destination: list[Tensor], source: list[Tensor], pairs: list[tuple[int, ...]], unit: str
) -> list[np.ndarray]:
    """What the bytes must be: pairs of (from, to) blocks, or (head or -1, from, to) slots."""
    results = []
    for to, origin in zip(destination, source, strict=True):
        after, before = bytes_of(to).copy(), bytes_of(origin).copy()
        for pair in pairs:
            if unit == "block":
                after[pair[1]] = before[pair[0]]
                continue
            head, a, b = pair
            for h in range(to.shape[1]) if head < 0 else (head,):
                after[b // S, h, b % S] = before[a // S, h, a % S]
        results.append(after)
    return results


def assert_are(tensors: list[Tensor], wanted: list[np.ndarray]) -> None:
    for tensor, after in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(bytes_of(tensor), after)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_to_another_cache_and_back(dtype: torch.dtype) -> None:
    """As a swap to the host does; the other cache has another number of blocks."""
    cache, host = layer(7), layer(3)
    blocks, places = torch.tensor([5, 0, 6], dtype=dtype), torch.tensor([2, 0, 1], dtype=dtype)
    before = [x.clone() for x in cache]
    wanted = expect(host, cache, [(5, 2), (0, 0), (6, 1)], "block")
    ops.kv_cache_move(host, cache, blocks, places)
    assert_are(host, wanted)
    assert_are(cache, [bytes_of(x) for x in before])
    for x in cache:
        x[[5, 0, 6]] = 0
    ops.kv_cache_move(cache, host, places, blocks)
    assert_are(cache, [bytes_of(x) for x in before])


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (1, 2), (2, 3)],  # a shift, downwards and up
        [(3, 2), (2, 1), (1, 0)],
        [(0, 1), (1, 0)],  # swapped
        [(4, 1), (4, 2), (4, 5)],  # one block for several
        [(2, 2), (6, 3)],
        [],
    ],
)
def test_overlapping_moves_read_before_they_write(pairs: list[tuple[int, int]]) -> None:
    cache = layer()
    wanted = expect(cache, cache, [*pairs], "block")
    origins, targets = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    ops.kv_cache_move(cache, cache, origins, targets)
    assert_are(cache, wanted)


def test_source_and_destination_are_views_of_one_tensor() -> None:
    whole = layer(7)
    upper, lower = [x[1:] for x in whole], [x[:6] for x in whole]
    wanted = expect(lower, upper, [(0, 2), (1, 3), (4, 0)], "block")
    ops.kv_cache_move(lower, upper, torch.tensor([0, 1, 4]), torch.tensor([2, 3, 0]))
    assert_are(lower, wanted)


def test_minus_one_copies_nothing() -> None:
    cache = layer()
    wanted = expect(cache, cache, [(3, 5)], "block")
    ops.kv_cache_move(cache, cache, torch.tensor([-1, 3, 2, -1]), torch.tensor([1, 5, -1, -1]))
    assert_are(cache, wanted)


@pytest.mark.parametrize("same", [True, False])
def test_slots(same: bool) -> None:
    """Compaction: the kept tokens of a sequence move together, over block borders too."""
    cache = layer()
    other = cache if same else layer(5)
    pairs = [(2, 0), (5, 1), (6, 2), (19, 3), (1, 19)]
    wanted = expect(other, cache, [(-1, a, b) for a, b in pairs], "slot")
    origins, targets = torch.tensor([*pairs, (3, -1), (-1, 6)]).unbind(1)
    ops.kv_cache_move(other, cache, origins, targets, unit="slot")
    assert_are(other, wanted)


def test_slots_of_each_head() -> None:
    cache = layer(shared=False)
    pairs = {0: [(2, 0), (5, 1), (-1, 2)], 1: [(0, 5), (5, 0), (9, 27)]}
    moves = [(head, a, b) for head, rows in pairs.items() for a, b in rows if a >= 0]
    wanted = expect(cache, cache, moves, "slot")
    origins, targets = torch.tensor([pairs[0], pairs[1]]).unbind(2)
    ops.kv_cache_move(cache, cache, origins, targets, unit="slot")
    assert_are(cache, wanted)


def test_compaction_keeps_what_attention_sees() -> None:
    """Scores of the kept tokens are the same before and after, positions included."""
    cache = torch.randn(4, N, S, 8)
    positions = torch.full((4, N, S), 2**30, dtype=torch.int32)
    table = torch.tensor([[2, 0, 3]])
    slots = [8, 9, 10, 11, 0, 1, 2, 3, 12, 13]
    for token, slot in enumerate(slots):
        positions[slot // S, :, slot % S] = token
    kept = torch.tensor([[1, 4, 7, 9], [0, 5, 8, 9]])
    query, where = torch.randn(1, 4, 8), torch.tensor([9])
    bias = torch.full((1, 4, 10), -torch.inf)
    for head in range(4):
        bias[0, head, kept[head // 2]] = 0.0
    options: dict[str, Any] = {"key_positions": positions, "query_positions": where}
    wanted = ops.paged_attention(
        query, cache, cache, table, [1], [10], 1.0, score_bias=bias, **options
    )
    moved = [cache, positions]
    ops.kv_cache_move(
        moved, moved, torch.tensor(slots)[kept], torch.tensor([slots[:4]] * 2), unit="slot"
    )
    given = ops.paged_attention(query, cache, cache, table, [1], [4], 1.0, **options)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)


def test_strided_tensors() -> None:
    cache = layer()
    wide = [torch.stack((x, x), 1) for x in cache]
    narrow = [x[:, 1] for x in wide]
    assert not narrow[0].is_contiguous()
    for unit, pairs in (("block", [(0, 1), (1, 4)]), ("slot", [(0, 9), (9, 3)])):
        moves = pairs if unit == "block" else [(-1, a, b) for a, b in pairs]
        wanted = expect(narrow, narrow, [*moves], unit)
        origins, targets = torch.tensor(pairs).unbind(1)
        ops.kv_cache_move(narrow, narrow, origins, targets, unit=unit)
        assert_are(narrow, wanted)
    assert_are([x[:, 0] for x in wide], [bytes_of(x) for x in cache])


def test_no_tensors_and_no_indices() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    ops.kv_cache_move([], [], torch.tensor([1]), torch.tensor([2]))
    empty = [torch.empty(0, N, S, D)]
    ops.kv_cache_move(empty, empty, nothing, nothing)
    ops.kv_cache_move(empty, empty, nothing.view(N, 0), nothing.view(N, 0), unit="slot")


def test_opcheck(opcheck: Any) -> None:
    def tensors(blocks: int) -> list[Tensor]:
        floats = [torch.randn(blocks, N, S, D), torch.rand(blocks, N, S)]
        return [torch.randint(-128, 128, (blocks, N, S, D), dtype=torch.int8), *floats]

    pairs = torch.tensor([0, 1]), torch.tensor([1, 2])
    opcheck("kv_cache_move", tensors(4), tensors(3), *pairs)
    opcheck("kv_cache_move", tensors(4), tensors(3), *pairs, unit="slot")
    heads = torch.tensor([[0, 1], [2, -1]]), torch.tensor([[5, 3], [4, 4]])
    opcheck("kv_cache_move", tensors(4), tensors(3), *heads, unit="slot")


def legal() -> dict[str, Any]:
    return {
        "destination": [torch.zeros(7, N, S, D), torch.zeros(7, 1, S)],
        "source": [torch.ones(5, N, S, D), torch.ones(5, 1, S)],
        "source_indices": torch.tensor([4, 0]),
        "destination_indices": torch.tensor([6, 1]),
    }


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("unit", {"unit": "token"}),
        ("source", {"source": [torch.ones(5, N, S, D)]}),
        ("source[0]", {"source": [torch.ones(5, N, S, 5), torch.ones(5, 1, S)]}),
        ("source[1]", {"source": [torch.ones(5, N, S, D), torch.ones(5, 1, S).half()]}),
        ("destination[1]", {"destination": [torch.zeros(7, N, S, D), torch.zeros(7, S)]}),
        ("source_indices", {"source_indices": torch.tensor([4, 5])}),
        ("source_indices", {"source_indices": torch.tensor([4, -2])}),
        ("source_indices", {"source_indices": torch.tensor([4.0, 1.0])}),
        ("source_indices", {"source_indices": torch.tensor([[4, 1]])}),
        ("source_indices", {"source_indices": torch.tensor(4), "unit": "slot"}),
        ("destination_indices", {"destination_indices": torch.tensor([7, 1])}),
        ("destination_indices", {"destination_indices": torch.tensor([6])}),
        ("source_indices", {"source_indices": torch.tensor([20, 1]), "unit": "slot"}),
        ("destination_indices", {"destination_indices": torch.tensor([28, 1]), "unit": "slot"}),
        (
            "destination[1]",  # the heads share it, so it cannot follow them
            {
                "source_indices": torch.zeros(N, 3, dtype=torch.int64),
                "destination_indices": torch.zeros(N, 3, dtype=torch.int64),
                "unit": "slot",
            },
        ),
        (
            "destination[0]",
            {
                "source_indices": torch.zeros(3, 1, dtype=torch.int64),
                "destination_indices": torch.zeros(3, 1, dtype=torch.int64),
                "unit": "slot",
            },
        ),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    arguments = {**legal(), **change}
    with pytest.raises(UsageError) as error:
        ops.kv_cache_move(**arguments)
    assert error.value.field == field
    assert not any(x.any() for x in arguments["destination"])
    ops.kv_cache_move(**legal())
