"""How many sequences a memory budget holds, before anything runs.

Paged, a sequence holds the blocks it has grown into; contiguous, it reserves ``max_model_len``
from its first token to its last. Counts of blocks and bytes are exact integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ascend_kv.config import ALLOCATORS
from ascend_kv.errors import UsageError
from ascend_kv.geometry import LayerFormat, ModelGeometry
from ascend_kv.resolved_cache import plan_blocks
from ascend_kv.user_values import format_bytes


class Capacity(NamedTuple):
    """What one scheme makes of a budget.

    Attributes:
        scheme: allocator and formats, such as "paged int8/token_head".
        token_bytes: keys, values, scales and zero points of one token in all layers; its share
            of what a block has, rounded up.
        block_bytes: the same for a block.
        num_blocks: blocks that can be used; contiguous, whole reservations only.
        kv_bytes: ``num_blocks * block_bytes``.
        sequences_full_length: sequences at once if all were ``max_model_len`` long.
        sequences_mean: sequences at once if all stood at their last token.
        sequences_live: sequences at once on average, when finished ones are replaced as they
            leave, since a paged sequence holds less while it is young.
        residual_bytes: of the partly filled blocks that sequences keep apart, beside these.
    """

    scheme: str
    token_bytes: int
    block_bytes: int
    num_blocks: int
    kv_bytes: int
    sequences_full_length: int
    sequences_mean: float
    sequences_live: float
    residual_bytes: int = 0


def capacity(
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    budget_bytes: int,
    block_size: int,
    allocator: str,
    max_model_len: int,
    lengths: Sequence[tuple[int, int]],
    max_num_seqs: int = 0,
) -> Capacity:
    """Plan one scheme.

    A request of P prompt and O output tokens runs O steps. The first computes the prompt, each
    later one the token before it, so that step i = 0 ... O-1 holds ceil((P + i) / block_size)
    blocks, and the last token is never stored. With memory always full, the mean number of
    sequences is the blocks there are over the blocks one holds, averaged over all steps of all
    requests; with preemption or a short queue it is less. Time to compute a prompt in several
    steps is not counted.

    Args:
        geometry: of the model.
        formats: one for each layer.
        budget_bytes: memory for the KV cache.
        block_size: tokens in a block.
        allocator: "paged" or "contiguous".
        max_model_len: the longest sequence, in tokens.
        lengths: prompt and output tokens of every request of the workload.
        max_num_seqs: sequences at once, where a format keeps something for each.

    Raises:
        UsageError: an unknown allocator, a budget too small for one sequence of
            ``max_model_len``, no requests, or one longer than that.
    """
    if allocator not in ALLOCATORS:
        raise UsageError("allocator", allocator, ALLOCATORS)
    check_lengths(lengths, max_model_len)
    num_blocks = plan_blocks(
        geometry, formats, block_size, budget_bytes, max_model_len, max_num_seqs
    )
    reserved_blocks = -(-max_model_len // block_size)
    full_length = num_blocks // reserved_blocks
    if allocator == "contiguous":
        num_blocks = full_length * reserved_blocks
        mean = live = float(full_length)
    else:
        last = sum(-(-(prompt + output - 1) // block_size) for prompt, output in lengths)
        mean = num_blocks * len(lengths) / last
        live = num_blocks / mean_blocks(lengths, block_size)
    block_bytes = geometry.block_bytes(formats, block_size)
    return Capacity(
        scheme=f"{allocator} {describe_formats(formats)}",
        token_bytes=-(-block_bytes // block_size),
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        residual_bytes=max_num_seqs * geometry.residual_bytes(formats, block_size),
        sequences_full_length=full_length,
        sequences_mean=mean,
        sequences_live=live,
    )


def check_lengths(lengths: Sequence[tuple[int, int]], max_model_len: int) -> None:
    """Refuse requests that could not be served.

    Raises:
        UsageError: no requests, or one longer than ``max_model_len``.
    """
    if not lengths:
        raise UsageError("lengths", list(lengths), "the lengths of one request or more")
    for prompt, output in lengths:
        if prompt < 1 or output < 1 or prompt + output > max_model_len:
            raise UsageError(
                "lengths",
                (prompt, output),
                f"1 prompt and 1 output token or more, at most max_model_len = {max_model_len} "
                "together",
            )


def mean_blocks(lengths: Sequence[tuple[int, int]], block_size: int, ratio: int = 1) -> float:
    """Blocks that a sequence holds, averaged over all steps of all requests.

    Args:
        lengths: prompt and output tokens.
        block_size: entries of a block. ratio: tokens of an entry, which whole ones have.
    """
    held = sum(_block_steps(prompt, output, block_size, ratio) for prompt, output in lengths)
    return held / sum(output for _, output in lengths)


def _block_steps(prompt: int, output: int, block_size: int, ratio: int) -> int:
    """Blocks held, summed over the steps: of ceil((t // r) / S) for t = P ... P + O - 1."""

    def up_to(tokens: int) -> int:
        """For t = 1 ... tokens: block j is held from r * (j * S + 1) tokens on."""
        blocks = (tokens - ratio) // (ratio * block_size) + 1
        return blocks * (tokens + 1 - ratio) - ratio * block_size * blocks * (blocks - 1) // 2

    return up_to(prompt + output - 1) - up_to(prompt - 1)


def describe_formats(formats: Sequence[LayerFormat]) -> str:
    """The layers' formats in few words: "int8/token_head", or "2 x float16, 28 x int8/token"."""
    names = [str(spec) for spec in formats]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    if len(counts) == 1:
        return names[0]
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def explain_memory(
    geometry: ModelGeometry,
    formats: Sequence[LayerFormat],
    tokens: int = 8192,
    sequences: int = 1,
) -> str:
    """Both formulas for the KV cache that are in circulation, with this model's numbers.

    The one with ``hidden_size`` counts a key and a value for every query head. Where query heads
    share key/value heads it is ``group_size`` times too much (Ainslie et al., "GQA", 2023).

    Args:
        geometry: of the model.
        formats: one for each layer; a third line gives their bytes.
        tokens: length of a sequence.
        sequences: how many of them.

    Returns:
        Lines of text, without a newline at the end.
    """
    layers, heads, dim = geometry.num_layers, geometry.num_heads, geometry.head_dim
    kv_heads, group = geometry.num_kv_heads, geometry.group_size
    sixteen_bits = 2 * layers * kv_heads * dim * 2
    ungrouped = geometry.ungrouped_token_bytes(2)

    def total(token_bytes: int) -> str:
        return (
            f"{token_bytes:,} bytes a token, {format_bytes(token_bytes * tokens * sequences)} for "
            f"{sequences} x {tokens:,} tokens"
        )

    lines = [
        f"16 bit: 2 x {layers} layers x {kv_heads} KV heads x {dim} x 2 bytes = "
        f"{total(sixteen_bits)}.",
        f"If every query head kept its own key: 2 x {layers} layers x {heads} heads x {dim} x "
        f"2 bytes = {total(ungrouped)}. "
        + (
            f"That is {group} times too much: {group} query heads share one KV head here."
            if group > 1
            else "Here that is the same: no query heads share a KV head."
        ),
        f"Chosen, {describe_formats(formats)}: {total(geometry.token_bytes(formats))}"
        + (", scales included." if any(spec.quantized for spec in formats) else "."),
    ]
    return "\n".join(lines)
