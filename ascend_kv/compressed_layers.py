"""DeepSeek-V4's KV cache: what its kinds of layers keep, exact integers of bytes, no guesses.

Every layer keeps the latest W tokens as they are ("window"), in a ring. On top of that

    csa   one entry of D numbers every 4 tokens, and an indexer key of I numbers beside it
    hca   one entry of D numbers every 128 tokens

and, while windows of tokens fill, their projections in float32 ("state"). A key is also the
value, so an entry is kept once. INT8 entries have one float32 scale over the D - R channels that
RoPE leaves alone; the R that it turns stay in the model's type. INT8 indexer keys have one
float32 scale each.

So there are four groups of memory. A sequence has one slot of "window" and one of "state" from
its first token to its last, and takes blocks of "csa" and of "hca" as it grows.

Source: DeepSeek-V4 technical report, 2.3, and the configurations that ``transformers`` reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.model_config import MOST_LAYERS, need_count

PAGED_GROUPS = ("csa", "hca")
GROUPS = ("window", *PAGED_GROUPS, "state")
_KINDS = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_DEFAULT_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT32_BYTES = 4


class CompressedFormats(NamedTuple):
    """The types of a cache: "float32", "float16" or "bfloat16", and for two of them "int8" too."""

    dtype: str
    """Of the window and of what RoPE turns: the model's."""
    entries: str
    index_keys: str

    def check(self) -> CompressedFormats:
        """Refuse types that there are not.

        Raises:
            UsageError: names the field.
        """
        for field, given, legal in (
            ("dtype", self.dtype, tuple(_VALUE_BYTES)),
            ("kv_cache_dtype", self.entries, (self.dtype, "int8")),
            ("indexer_cache_dtype", self.index_keys, (self.dtype, "int8")),
        ):
            if given not in legal:
                raise UsageError(field, given, legal, "Entries are kept in the model's type.")
        return self


@dataclass(frozen=True)
class CompressedLayers:
    """The layers of one model.

    Attributes:
        kinds: of each layer, "window", "csa" or "hca".
        head_dim: D, numbers of an entry. rotary_dim: R of them, the last, that RoPE turns.
        index_dim: I, numbers of an indexer key. index_topk: entries that a query attends to.
        window_tokens: W.
        csa_ratio: tokens of an entry in the layers of kind "csa". hca_ratio: alike.
    """

    kinds: tuple[str, ...]
    head_dim: int
    rotary_dim: int
    index_dim: int
    index_topk: int
    window_tokens: int
    csa_ratio: int = 4
    hca_ratio: int = 128

    def count(self, kind: str) -> int:
        """Layers of that kind."""
        return self.kinds.count(kind)

    def ratio(self, kind: str) -> int:
        """Tokens of an entry of a kind that is compressed."""
        return {"csa": self.csa_ratio, "hca": self.hca_ratio}[kind]

    def state_tokens(self, kind: str) -> int:
        """Tokens whose projections a layer keeps: a window, with "csa" the one before it too."""
        return {"csa": 2 * self.csa_ratio, "hca": self.hca_ratio}[kind]

    def entry_bytes(self, kind: str, formats: CompressedFormats) -> int:
        """Bytes of one entry of one layer, its indexer key included."""
        value = _VALUE_BYTES[formats.dtype]
        total = self.head_dim * value
        if formats.entries == "int8":
            total = self.head_dim - self.rotary_dim + _FLOAT32_BYTES + self.rotary_dim * value
        if kind == "csa":
            int8 = formats.index_keys == "int8"
            total += self.index_dim + _FLOAT32_BYTES if int8 else self.index_dim * value
        return total

    def group_entry_bytes(self, group: str, formats: CompressedFormats) -> int:
        """Bytes of one entry of "csa" or "hca" in all layers of that kind."""
        return self.count(group) * self.entry_bytes(group, formats)

    def slot_bytes(self, group: str, formats: CompressedFormats) -> int:
        """Bytes of a sequence's slot of "window" or "state" in all layers."""
        if group == "window":
            token = self.head_dim * _VALUE_BYTES[formats.dtype]
            return len(self.kinds) * self.window_tokens * token
        series = {"csa": 2 * (self.head_dim + self.index_dim), "hca": self.head_dim}
        return sum(  # values and gates
            self.count(kind) * self.state_tokens(kind) * 2 * channels * _FLOAT32_BYTES
            for kind, channels in series.items()
        )

    def kv_bytes(self, tokens: int, formats: CompressedFormats) -> dict[str, int]:
        """Bytes by group that a sequence of ``tokens`` has filled, its window counted as full."""
        filled = {
            group: tokens // self.ratio(group) * self.group_entry_bytes(group, formats)
            for group in PAGED_GROUPS
        }
        slots = {group: self.slot_bytes(group, formats) for group in ("window", "state")}
        return {group: {**filled, **slots}[group] for group in GROUPS}

    def cache_bytes(self, blocks: GroupBlocks, formats: CompressedFormats) -> dict[str, int]:
        """Bytes by group that a cache allocates."""
        entries = {"csa": blocks.csa, "hca": blocks.hca}
        return {
            group: entries[group] * blocks.block_size * self.group_entry_bytes(group, formats)
            if group in entries
            else blocks.slots * self.slot_bytes(group, formats)
            for group in GROUPS
        }


class GroupBlocks(NamedTuple):
    """The size of a cache: slots for sequences, and blocks of ``block_size`` entries."""

    slots: int
    csa: int
    hca: int
    block_size: int


def least_bytes(
    layers: CompressedLayers,
    formats: CompressedFormats,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Bytes of slots for ``max_num_seqs`` and the blocks of one sequence of ``max_model_len``."""
    blocks = _blocks(layers, block_size, max_model_len, max_num_seqs)
    return sum(layers.cache_bytes(blocks, formats).values())


def plan_groups(
    layers: CompressedLayers,
    formats: CompressedFormats,
    block_size: int,
    memory_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
) -> GroupBlocks:
    """What ``memory_bytes`` hold: slots for ``max_num_seqs``, then blocks for as many tokens.

    The groups share the memory in the proportion in which tokens use them. Blocks of "hca" hold
    many tokens, so if there is room it has one more for each further sequence, whose last block
    is partly empty.

    Raises:
        UsageError: less than ``least_bytes``.
    """
    least = least_bytes(layers, formats, block_size, max_model_len, max_num_seqs)
    if memory_bytes < least:
        empty = GroupBlocks(max_num_seqs, 0, 0, block_size)
        slots = sum(layers.cache_bytes(empty, formats).values())
        raise UsageError(
            "kv_cache_memory_bytes",
            memory_bytes,
            f"{least} or more",
            f"Windows and state for max_num_seqs = {max_num_seqs} take {slots} bytes, one sequence "
            f"of max_model_len = {max_model_len} tokens {least - slots}: give more memory, or "
            "lower one of the two.",
        )
    block_bytes = block_size * layers.group_entry_bytes("hca", formats)
    extra = min((memory_bytes - least) // block_bytes, max_num_seqs - 1) if block_bytes else 0

    def size(tokens: int) -> GroupBlocks:
        blocks = _blocks(layers, block_size, tokens, max_num_seqs)
        return blocks._replace(hca=blocks.hca + extra)

    # more than all sequences at full length can never be used
    choices = range(max_model_len, max_num_seqs * max_model_len + 1)
    fitting = bisect_right(
        choices, memory_bytes, key=lambda n: sum(layers.cache_bytes(size(n), formats).values())
    )
    return size(choices[fitting - 1])


def _blocks(
    layers: CompressedLayers, block_size: int, tokens: int, max_num_seqs: int
) -> GroupBlocks:
    """As many blocks as one sequence of ``tokens`` takes."""
    csa, hca = (
        -(-(tokens // layers.ratio(group)) // block_size) if layers.count(group) else 0
        for group in PAGED_GROUPS
    )
    return GroupBlocks(max_num_seqs, csa, hca, block_size)


def layers_from_config(config: Mapping[str, Any]) -> CompressedLayers:
    """The layers that a DeepSeek-V4 ``config.json`` describes; nothing is guessed.

    Raises:
        UnsupportedModelError: names the field that is missing or not legal.
    """
    head_dim = need_count(config, "head_dim")
    rates = {**_DEFAULT_RATES, **(config.get("compress_rates") or {})}
    csa, hca = (need_count(rates, name) for name in _DEFAULT_RATES)
    return CompressedLayers(
        kinds=_kinds(config, need_count(config, "num_hidden_layers", MOST_LAYERS)),
        head_dim=head_dim,
        rotary_dim=_rotary_dim(config, head_dim),
        index_dim=need_count(config, "index_head_dim"),
        index_topk=need_count(config, "index_topk"),
        window_tokens=need_count(config, "sliding_window"),
        csa_ratio=csa,
        hca_ratio=hca,
    )


def _kinds(config: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """Of each layer; from ``layer_types``, or older checkpoints' ratios, 0 for a window only."""
    field, known = "layer_types", dict(_KINDS)
    given = config.get(field)
    if given is None:
        field, given = "compress_ratios", config.get("compress_ratios")
        known = {0: "window", 4: "csa", 128: "hca"}  # type: ignore[dict-item]
        given = given[:number] if isinstance(given, list | tuple) else given  # more: for drafts
    if not isinstance(given, list | tuple) or len(given) != number:
        legal = f"layer_types (or compress_ratios), one for each of {number} layers"
        raise UnsupportedModelError(field, given, legal)
    for kind in given:
        if not isinstance(kind, str | int) or kind not in known:
            raise UnsupportedModelError(field, kind, known)
    return tuple(known[kind] for kind in given)


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    factor = config.get("partial_rotary_factor")
    given = config.get("qk_rope_head_dim")
    if factor is not None:
        given = int(head_dim * factor)
    if not isinstance(given, int) or not 0 < given < head_dim or given % 2:
        legal = f"an even number below head_dim = {head_dim}, or partial_rotary_factor"
        raise UnsupportedModelError("qk_rope_head_dim", given, legal)
    return given


DEEPSEEK_V4_FLASH = CompressedLayers(
    ("window", "window", *(("csa", "hca") * 21)[:41]), 512, 64, 128, 512, 128
)
"""43 layers: 2 with a window only, 21 CSA, 20 HCA."""
DEEPSEEK_V4_PRO = CompressedLayers(
    ("hca", "hca", *(("csa", "hca") * 30)[:59]), 512, 64, 128, 1024, 128
)
"""61 layers: 30 CSA, 31 HCA."""

_V32_TOKEN_BYTES = (512 + 64 + 128) * 2
"""DeepSeek-V3.2's latent, its part with RoPE and an indexer key, a layer in 16 bits."""


def explain_compression(layers: CompressedLayers, tokens: int) -> str:
    """Where the figures that circulate come from: 16 bit, one sequence of ``tokens``, no state.

    Articles give 7.3 GB, 1.8 GB ("CSA, 4x") and 57 MB ("HCA, 128x") for DeepSeek-V4 Flash at
    128K. The last two are the first divided by 4 and by 128, as if all layers were of one kind
    and the window took nothing. What the first counts is not said; a cache as DeepSeek-V3.2's
    with as many layers comes near.
    """
    formats = CompressedFormats("bfloat16", "bfloat16", "bfloat16")
    number = len(layers.kinds)
    v32 = number * _V32_TOKEN_BYTES * tokens
    whole = number * layers.head_dim * 2 * tokens
    kept = layers.kv_bytes(tokens, formats)
    del kept["state"]

    def gib(value: int) -> str:
        return f"{value / 2**30:.3f} GiB"

    parts = ", ".join(f"{group} {gib(value)}" for group, value in kept.items())
    return "\n".join(
        [
            f"A DeepSeek-V3.2-style cache of {number} layers: {gib(v32)}; divided by 4 "
            f"{gib(v32 // 4)}, by 128 {v32 / 128 / 2**20:.0f} MiB. That is no model's cache.",
            f"Every token's key, which is its value, in {number} layers: {gib(whole)}.",
            f"What these layers keep: {gib(sum(kept.values()))} ({parts}).",
        ]
    )
