"""``ascend-kv plan``: how many sequences a budget holds, by scheme; loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ascend_kv.config import ALLOCATORS, CacheConfig, resolve_block_size, resolve_formats
from ascend_kv.devices import Device, get_device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.tables import TextTable
from ascend_kv.geometry import FORMATS
from ascend_kv.model_files import load_geometry
from ascend_kv.plan.capacity import capacity, describe_formats, explain_memory
from ascend_kv.user_values import format_bytes

_FLAGS = {
    "kv_cache_dtype": "--formats",
    "kv_cache_memory_bytes": "--memory",
    "kv_cache_dtype_skip_layers": "--skip-layers",
    "granularity": "--granularity",
    "scale_type": "--scale-type",
    "group_size": "--group-size",
    "block_size": "--block-size",
    "device": "--device",
}
"""What the command line calls the fields that an error may name."""


def plan_command(
    model: str,
    memory_bytes: int,
    *,
    max_model_len: int,
    lengths: tuple[int, int],
    formats: Sequence[str],
    granularity: str,
    symmetric: bool,
    scale_type: str,
    group_size: int | None,
    skip_layers: tuple[int, ...],
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
        symmetric: quantized without zero points.
        scale_type: dynamic or static.
        group_size: channels that share a scale, with granularity group.
        skip_layers: layers that quantized formats leave in the model's own type.
        block_size: tokens a block; None: the device's default.
        device: a name that ``devices.get_device`` knows.
        explain: whether to say where the bytes of a token come from.

    Raises:
        UsageError: names the flag of a value that is not legal, of a budget too small for one
            sequence, or of one that the device has not got.
    """
    geometry = load_geometry(model)
    longest = geometry.max_position_tokens
    if not 2 <= max_model_len <= longest:
        raise UsageError("--max-model-len", max_model_len, f"2 to {longest} in this model")
    _check_lengths(*lengths, max_model_len)
    with _named_as_flags():
        kind = get_device(device)
    _check_memory(memory_bytes, kind)
    rows: list[tuple[str, ...]] = []
    explained: list[str] = []
    for name in formats:
        with _named_as_flags():
            cache = CacheConfig(
                kv_cache_dtype=name,
                granularity=granularity,
                symmetric=symmetric,
                scale_type=scale_type,
                group_size=group_size,
                kv_cache_dtype_skip_layers=() if name in ("auto", *FORMATS) else skip_layers,
                block_size=block_size,
            )
            layers = resolve_formats(geometry, cache, geometry.dtype)
            size = resolve_block_size(cache, kind, layers)
        for line in explain_memory(geometry, layers, max_model_len).splitlines():
            if line not in explained:  # what holds for every format is said once
                explained.append(line)
        for allocator in ALLOCATORS:
            with _named_as_flags():
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


def _check_lengths(prompt: int, output: int, max_model_len: int) -> None:
    for flag, given in (("--prompt", prompt), ("--output", output)):
        if given < 1:
            raise UsageError(flag, given, "1 or more")
    if prompt + output > max_model_len:
        legal = f"at most --max-model-len = {max_model_len} together"
        raise UsageError("--prompt and --output", f"{prompt} + {output}", legal)


def _check_memory(memory_bytes: int, device: Device) -> None:
    has = device.memory_bytes
    if has is not None and memory_bytes > has:
        legal = f"at most {format_bytes(has)}, what a {device.name} has for weights and cache"
        raise UsageError("--memory", format_bytes(memory_bytes), legal)


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """Errors name what stands on the command line, not the field that it becomes."""
    try:
        yield
    except UsageError as error:
        if error.field not in _FLAGS:
            raise
        raise UsageError(_FLAGS[error.field], error.given, error.legal, error.hint) from None
