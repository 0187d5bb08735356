"""Compression for dense models that never learned it: what is kept of a sequence, in integers.

Below ``csa_from`` tokens nothing is compressed. From there on, by kind of layer:

* the first ``window_layers`` keep the first tokens ("sinks") and the latest ``window``;
* the others keep the sinks, the latest ``window`` to ``window + 3``, and of all between one
  *entry* for every 4 tokens ("csa", its keys and values their means), of which a query attends to
  the ``top_k`` best; beyond ``hca_from`` tokens, 32 such entries become one of 128 tokens ("hca"),
  all of which it attends to.

What a query sees depends on its own position alone, never on how a prompt was cut into chunks.
The query at position n - 1 sees, with s sinks and a window of W::

    fine(n)   = (n - s - W) // 4                          0 while n < csa_from, never below 0
    coarse(n) = fine(n) // 32                             0 while n < hca_from
    tokens      0 .. s - 1  and  s + 4 fine(n) .. n - 1   exact
    csa entries 32 coarse(n) .. fine(n) - 1               the top_k best; entry e is the mean of
                                                          tokens s + 4 e .. s + 4 e + 3
    hca entries 0 .. coarse(n) - 1                        all; entry e is the mean of
                                                          csa entries 32 e .. 32 e + 31

Every token is in exactly one of these, so none is lost or counted twice. Entries of 128 are made of
entries of 4, as they are stored: both switches happen with what the cache holds, during generation
as in a prompt. Windows of tokens begin after the sinks, so that no entry holds one.

Below ``csa_from`` the first layers see everything too: that way nothing changes for sequences that
are short, not even a rounding. A window from the first token on would save next to nothing there.

Four groups of blocks: "window" and "full" hold tokens, "csa" and "hca" entries. Blocks that no
later query reads go back to their pool before the next step; those of the sinks stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ascend_kv.errors import UsageError

CSA_RATIO = 4
"""Tokens of an entry of "csa"."""
HCA_RATIO = 128
"""Tokens of an entry of "hca"."""
FINE_IN_COARSE = HCA_RATIO // CSA_RATIO
_COUNTED = {"csa": ("csa",), "all": ("csa", "hca"), "none": ()}
MEASURED_LOSS = (
    "+27 % of perplexity with entries of 4 tokens and +29 % with entries of 128 (SmolLM2-135M, "
    "windows of 1,536 tokens, from 512 on; recipes/untrained_compression.md)"
)
"""What it costs, for those who have not asked for it in so many words"""


@dataclass(frozen=True)
class Compression:
    """When and how far the layers of a dense model compress.

    Attributes:
        window: W, latest tokens that stay exact. sinks: s, first tokens that stay exact.
        window_layers: how many of the first layers keep nothing else.
        csa_from: sequences of so many tokens are compressed by 4.
        hca_from: sequences of so many tokens are compressed by 128; None: none is.
        top_k: entries of 4 tokens that a query attends to, for each key/value head.
        count_tokens: entries that weigh as much as the tokens they stand for, by log 4 or log 128
            added to their scores: "csa", "all" or "none". Measured: it helps entries of 4 tokens
            and hurts those of 128 (``recipes/untrained_compression.md``).

    Raises:
        UsageError: names the field.
    """

    window: int = 128
    sinks: int = 4
    window_layers: int = 2
    csa_from: int = 4096
    hca_from: int | None = 32_768
    top_k: int = 512
    count_tokens: Literal["csa", "all", "none"] = "csa"

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("window_layers", 0), ("top_k", 1)):
            self._check(name, least, f"{least} or more")
        self._check("csa_from", 1, "1 or more tokens")
        if self.hca_from is not None:
            self._check("hca_from", self.csa_from, f"csa_from = {self.csa_from} or more, or null")
        if self.count_tokens not in _COUNTED:
            raise UsageError("compression.count_tokens", self.count_tokens, tuple(_COUNTED))

    def counts(self, group: str) -> bool:
        """Whether entries of "csa" or "hca" weigh as much as their tokens."""
        return group in _COUNTED[self.count_tokens]

    def _check(self, name: str, least: int, legal: str) -> None:
        given = getattr(self, name)
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise UsageError(f"compression.{name}", given, f"a whole number, {legal}")

    def fine(self, length: int) -> int:
        """Entries of 4 tokens that stand for tokens of a sequence of ``length``."""
        if length < self.csa_from:
            return 0
        return max(0, length - self.sinks - self.window) // CSA_RATIO

    def coarse(self, length: int) -> int:
        """Entries of 128 tokens, each in place of 32 of these."""
        if self.hca_from is None or length < self.hca_from:
            return 0
        return self.fine(length) // FINE_IN_COARSE

    def groups(self, num_layers: int) -> dict[str, int]:
        """Groups of blocks, each with the number of layers that use it.

        Raises:
            UsageError: the model has no layer left to compress.
        """
        others = num_layers - self.window_layers
        if others < 1:
            legal = f"at most {num_layers - 1}, for a model of {num_layers} layers"
            raise UsageError("compression.window_layers", self.window_layers, legal)
        counts = {"window": self.window_layers, "full": others, "csa": others}
        if self.hca_from is not None:
            counts["hca"] = others
        return {group: count for group, count in counts.items() if count}

    def low(self, group: str, start: int) -> int:
        """The first token, or entry, that steps from token ``start`` on need, sinks aside."""
        if group == "window":
            return max(0, start + 1 - self.window) if start + 1 >= self.csa_from else 0
        if group == "full":
            return self.sinks + CSA_RATIO * self.fine(start)
        return FINE_IN_COARSE * self.coarse(start) if group == "csa" else 0

    def high(self, group: str, stop: int) -> int:
        """How many tokens, or entries, there have been once ``stop`` tokens are there."""
        return {"csa": self.fine, "hca": self.coarse}.get(group, int)(stop)

    def sink_blocks(self, group: str, block_size: int) -> int:
        """Blocks that a sequence keeps for its sinks."""
        return -(-self.sinks // block_size) if group in ("window", "full") else 0

    def dropped_blocks(self, group: str, start: int, block_size: int) -> int:
        """Blocks after those of the sinks that no step from token ``start`` on needs."""
        kept = self.sink_blocks(group, block_size)
        return max(0, self.low(group, start) // block_size - kept)

    def held(self, group: str, tokens: int) -> int:
        """Tokens, or entries, that a sequence of ``tokens`` needs in a group, block sizes aside."""
        low, high = self.low(group, tokens), self.high(group, tokens)
        sinks = min(self.sinks, low) if group in ("window", "full") else 0
        return sinks + high - low if high > low else min(sinks, high)

    def most_blocks(self, group: str, start: int, stop: int, step: int, block_size: int) -> int:
        """Blocks with which a sequence gets from ``start`` to ``stop`` tokens; more never help.

        Args:
            step: the most tokens of one step, all of whose blocks are there at once.

        An upper bound that never rises as ``start`` does, so that what is reserved suffices.
        """
        step = min(step, stop - start)
        whole = -(-self.high(group, stop) // block_size)
        entries = group in ("csa", "hca")
        switch = self.hca_from if entries else self.csa_from
        if group == "hca" or switch is None or stop < switch:
            return whole
        growing = 0
        if start < switch:  # a step that begins before the switch still needs everything
            growing = -(-self.high(group, min(stop, switch - 1 + step)) // block_size)
        tail = self.window + CSA_RATIO + step
        if entries:
            tail = FINE_IN_COARSE + step // CSA_RATIO + 1
        settled = self.sink_blocks(group, block_size) + -(-tail // block_size) + 1
        return min(whole, max(growing, settled))


def plan_untrained_blocks(
    policy: Compression,
    block_bytes: Mapping[str, int],
    memory_bytes: int,
    max_model_len: int,
    step: int,
    block_size: int,
    max_num_seqs: int,
) -> dict[str, int]:
    """Blocks of each group that ``memory_bytes`` hold.

    They stand in the proportion in which the longest sequence needs them at most, for one and up
    to ``max_num_seqs`` of these.

    Args:
        policy: when and how far.
        block_bytes: by group, of one block in all its layers.
        memory_bytes: for all groups together.
        max_model_len: longest sequence. step: most tokens of one step.
        block_size: tokens, or entries, a block. max_num_seqs: most sequences at once.

    Raises:
        UsageError: they do not hold one sequence of ``max_model_len``.
    """
    most = most_by_group(policy, block_bytes, max_model_len, step, block_size)
    least = sum(most[group] * size for group, size in block_bytes.items())
    if memory_bytes < least:
        shown = ", ".join(f"{count} of {group}" for group, count in most.items())
        hint = (
            f"One sequence of max_model_len = {max_model_len} tokens takes blocks: {shown}. Give "
            "more memory, or lower max_model_len, csa_from or max_num_batched_tokens."
        )
        raise UsageError("kv_cache_memory_bytes", memory_bytes, f"{least} or more", hint)

    def size(hundredths: int) -> dict[str, int]:  # of sequences; rounded up, for some need few
        return {group: -(-count * hundredths // 100) for group, count in most.items()}

    def taken(hundredths: int) -> int:
        return sum(size(hundredths)[group] * one for group, one in block_bytes.items())

    choices = range(100, 100 * max_num_seqs + 1)
    return size(choices[bisect_right(choices, memory_bytes, key=taken) - 1])


def most_by_group(
    policy: Compression, groups: Mapping[str, int], tokens: int, step: int, block_size: int
) -> dict[str, int]:
    """By group the blocks that a sequence of ``tokens`` needs at most on its way; one at least."""
    return {
        group: max(1, policy.most_blocks(group, 0, tokens, step, block_size)) for group in groups
    }
