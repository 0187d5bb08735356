"""``kv_cache_move``: blocks, or single slots, to other places, with all that belongs to them.

For swapping, copy on write and compaction, which the engine does not do yet. Nothing is computed:
bytes are copied, scales, zero points and positions like keys and values. In a tensor
``[K, N or 1, S, ...]``::

    unit "block"   indices [n]      destination[to]                 <- source[from]
    unit "slot"    indices [n]      destination[block, :, offset]   <- source[block', :, offset']
                   indices [N, n]   destination[block, h, offset]   <- source[block', h, offset']

where a slot is ``block * S + offset``, and row h of ``[N, n]`` moves the slots of KV head h, so
that heads may keep different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "kv_cache_move(Tensor(a!)[] destination, Tensor[] source, Tensor source_indices, "
    'Tensor destination_indices, *, str unit="block") -> ()'
)

UNITS = ("block", "slot")


def kv_cache_move(
    destination: Sequence[Tensor],
    source: Sequence[Tensor],
    source_indices: Tensor,
    destination_indices: Tensor,
    *,
    unit: str = "block",
) -> None:
    """Copy places of some tensors to places of others; mutates ``destination``.

    Args:
        destination: tensors ``[K, N, S, ...]`` of one layer or of many: keys, values, scales,
            zero points, positions (scales shared by the heads: ``[K, 1, S]``). What belongs to
            the places moves with them only if it is in the list.
        source: for each of them a tensor of the same type and shape but for the number of
            blocks: another cache, one on another device (host memory), or the same tensor.
        source_indices: ``[n]``, or ``[N, n]`` for slots, int32 or int64, on any device.
        destination_indices: as ``source_indices``. Where either is -1, nothing is copied. A
            place named twice holds one of the two copies, no telling which.
        unit: ``block`` or ``slot``.

    Raises:
        UsageError: shapes or types that disagree, an unknown unit, slots by head in a tensor
            that the heads share; for indices on a CPU also one that is out of range. Nothing
            has been written then.

    Within one tensor all is read before anything is written, so source and destination may be
    the same and overlap: blocks 0, 1 to 1, 2 shifts them, 0, 1 to 1, 0 swaps them. Different
    tensors of the list must not share memory. Indices that lie on a device are not checked;
    looking for -1 there synchronises it.
    """
    if unit not in UNITS:
        raise UsageError("unit", unit, UNITS)
    if len(source) != len(destination):
        raise UsageError("source", f"{len(source)} tensors", f"{len(destination)}, as destination")
    _check_indices(source_indices, destination_indices, unit)
    heads = source_indices.shape[0] if source_indices.dim() == 2 else None
    for i, (to, origin) in enumerate(zip(destination, source)):
        _check_pair(i, to, origin, heads)
    _op(destination, source, source_indices, destination_indices, unit=unit)


def _check_indices(source: Tensor, destination: Tensor, unit: str) -> None:
    legal = "[blocks]" if unit == "block" else "[slots] or [kv_heads, slots]"
    if source.dim() != 1 and (unit == "block" or source.dim() != 2):
        raise UsageError("source_indices", tuple(source.shape), legal)
    if destination.shape != source.shape:
        legal = f"{tuple(source.shape)}, as source_indices"
        raise UsageError("destination_indices", tuple(destination.shape), legal)
    for name, indices in (("source_indices", source), ("destination_indices", destination)):
        if indices.dtype not in (torch.int32, torch.int64):
            raise UsageError(name, indices.dtype, (torch.int32, torch.int64))


def _check_pair(i: int, destination: Tensor, source: Tensor, heads: int | None) -> None:
    name, shape = f"destination[{i}]", tuple(destination.shape)
    if len(shape) < 3:
        raise UsageError(name, shape, "[blocks, kv_heads, block_size, ...]")
    if heads not in (None, shape[1]):
        legal = f"[blocks, {heads}, ...], as the indices have a row for each head"
        raise UsageError(name, shape, legal)
    if source.shape[1:] != shape[1:]:
        legal = f"[blocks, {', '.join(str(size) for size in shape[1:])}], as {name}"
        raise UsageError(f"source[{i}]", tuple(source.shape), legal)
    if source.dtype is not destination.dtype:
        raise UsageError(f"source[{i}]", source.dtype, f"{destination.dtype}, as {name}")


def _check_range(name: str, indices: Tensor, tensors: Sequence[Tensor], unit: str) -> None:
    """On a CPU only: elsewhere it would synchronise the device."""
    if indices.device.type != "cpu" or indices.numel() == 0 or not tensors:
        return
    places = min(x.shape[0] * (1 if unit == "block" else x.shape[2]) for x in tensors)
    low, high = (int(bound) for bound in indices.aminmax())
    if low < -1 or high >= places:
        given = low if low < -1 else high
        raise UsageError(name, given, f"0 to {places - 1}, or -1 to copy nothing")


def _reference(
    destination: Sequence[Tensor],
    source: Sequence[Tensor],
    source_indices: Tensor,
    destination_indices: Tensor,
    *,
    unit: str = "block",
) -> None:
    _check_range("source_indices", source_indices, source, unit)
    _check_range("destination_indices", destination_indices, destination, unit)
    origins, targets, heads = _kept(source_indices, destination_indices)
    for to, origin in zip(destination, source):
        if unit == "block":
            taken = origin.index_select(0, origins.to(origin.device))
            to.index_copy_(0, targets.to(to.device), taken.to(to.device))
            continue
        at, there = (_slots(indices, x, heads) for indices, x in ((origins, origin), (targets, to)))
        to[there] = origin[at].to(to.device)


def _kept(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The places to copy, int64 ``[n]``, and for slots by head the head of each."""
    source, destination = source.to(torch.int64), destination.to(torch.int64)
    kept = (source >= 0) & (destination.to(source.device) >= 0)
    heads = None
    if source.dim() == 2:
        heads = torch.arange(source.shape[0], device=source.device)[:, None].expand_as(source)
        heads = heads[kept]
    return source[kept], destination[kept.to(destination.device)], heads


def _slots(indices: Tensor, x: Tensor, heads: Tensor | None) -> tuple[Tensor | slice, ...]:
    """Index of slots ``[n]`` in a tensor ``[K, N, S, ...]``."""
    indices = indices.to(x.device)
    block_size = x.shape[2]
    head = slice(None) if heads is None else heads.to(x.device)
    return indices // block_size, head, indices % block_size


def _fake(*args: object, **kwargs: object) -> None:
    return None


_op = register(SCHEMA, _reference, _fake)
