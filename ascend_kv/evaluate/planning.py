"""``ascend-kv plan``: how many sequences a budget holds, by scheme; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_kv.config import CacheConfig, format_bytes, resolve_block_size, resolve_formats
from ascend_kv.devices import get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.tables import TextTable
from ascend_kv.model_files import load_geometry
from ascend_kv.plan.capacity import capacity, describe_formats, explain_memory

ALLOCATORS = ("contiguous", "paged")


def plan_command(
    model: str,
    memory_bytes: int,
    *,
    max_model_len: int,
    lengths: tuple[int, int],
    formats: Sequence[str],
    granularity: str,
    scale_type: str,
    group_size: int | None,
    block_size: int | None,
    device: str,
    explain: bool,
) -> tuple[TextTable, str]:
    """A table of every allocator with every format, and the explanation when it is wanted.

    Args:
        model: directory, ``config.json``, hub id or ``.gguf`` file.
        memory_bytes: the KV budget.
        max_model_len: longest sequence, in tokens.
        lengths: mean prompt and output, in tokens.
        formats: names of cache formats; ``auto`` is the model's own type.
        granularity: what shares a scale in quantized formats.
        scale_type: dynamic or static.
        group_size: channels that share a scale, with granularity group.
        block_size: tokens a block; None: the device's default.
        device: a name that ``devices.get_device`` knows.
        explain: whether to say where the bytes of a token come from.

    Raises:
        UsageError: a value that is not legal, or a budget too small for one sequence.
    """
    geometry = load_geometry(model)
    if not 1 <= max_model_len <= geometry.max_position_tokens:
        raise UsageError(
            "--max-model-len", max_model_len, f"1 to {geometry.max_position_tokens} in this model"
        )
    rows: list[tuple[str, ...]] = []
    explained: list[str] = []
    for name in formats:
        cache = CacheConfig(
            kv_cache_dtype=name,
            granularity=granularity,
            scale_type=scale_type,
            group_size=group_size,
            block_size=block_size,
        )
        layers = resolve_formats(geometry, cache, geometry.dtype)
        size = resolve_block_size(cache, get_device(device), layers)
        for line in explain_memory(geometry, layers, max_model_len).splitlines():
            if line not in explained:  # what holds for every format is said once
                explained.append(line)
        for allocator in ALLOCATORS:
            plan = capacity(
                geometry, layers, memory_bytes, size, allocator, max_model_len, [lengths]
            )
            rows.append(
                (
                    f"{allocator} {describe_formats(layers)}",
                    f"{plan.token_bytes:,}",
                    f"{plan.num_blocks:,} of {size}",
                    format_bytes(plan.kv_bytes),
                    f"{plan.sequences_full_length:,}",
                    f"{plan.sequences_mean:,.1f}",
                    f"{plan.sequences_live:,.1f}",
                )
            )
    table = TextTable(
        f"Sequences at once in {format_bytes(memory_bytes)} (predicted from geometry)",
        (
            "scheme",
            "bytes a token",
            "blocks",
            "KV memory",
            f"all {max_model_len:,} tokens long",
            f"all {sum(lengths):,} long",
            "while growing",
        ),
        rows,
        [
            f"Requests of {lengths[0]:,} prompt and {lengths[1]:,} output tokens. While growing: "
            "a paged sequence holds fewer blocks at its beginning than at its end."
        ],
    )
    return table, "\n".join(explained) if explain else ""
