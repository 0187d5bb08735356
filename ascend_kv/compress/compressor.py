"""What HCA and CSA share: two streams of tokens, one of keys and one of values, to entries."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_kv import ops
from ascend_kv.compress.pooling import Pooling, Tokens
from ascend_kv.compress.rotation import make_rotation
from ascend_kv.compress.weights import SIDES, Source, read_weights
from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES

Tensor = torch.Tensor


class CompressedKV(NamedTuple):
    """Keys and values: entries, or the tokens they are made of, ``[batch, heads, any, dim]``."""

    k: Tensor
    v: Tensor


class Compressor:
    """Compresses keys and values of one batch of sequences; see ``HCACompressor``.

    Holds what its streams need to go on: the tokens that fill no window yet and, where windows
    overlap, the window before them. That is less than ``2 * compression_ratio`` tokens, however
    long the sequences are.
    """

    def __init__(
        self,
        ratios: tuple[int, ...],
        *,
        series: int,
        two_vectors: bool,
        weights: Source,
        norm_eps: float,
        inverse_frequencies: Tensor | None,
        interleaved: bool,
    ) -> None:
        rotation = make_rotation(inverse_frequencies, interleaved)
        key, value = read_weights(weights, len(ratios))
        self.level_ratios = ratios
        self._poolings = (
            Pooling(ratios, key, series, two_vectors, norm_eps, rotation),
            Pooling(ratios, value, series, two_vectors, norm_eps, None),
        )
        self.reset()

    @property
    def compression_ratio(self) -> int:
        """Tokens of one entry."""
        return self._poolings[0].ratio

    @property
    def num_levels(self) -> int:
        """Pooling stages."""
        return len(self.level_ratios)

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence taken since ``compress``, or ``reset``, began it."""
        return self._num_tokens

    @property
    def remainder(self) -> CompressedKV:
        """The tokens that fill no window yet, as they were given, ``[B, H, < ratio, D]``.

        Raises:
            UsageError: nothing has been given yet.
        """
        if self._streams is None:
            raise UsageError("remainder", "no tokens yet", "after compress or append")
        count = self._num_tokens % self.compression_ratio
        rows = [tokens.cut(tokens.length - count).values for tokens in self._streams]
        return CompressedKV(*(row.unflatten(0, self._batch).clone() for row in rows))

    @property
    def state_bytes(self) -> int:
        """Bytes that are held for the streams to go on."""
        return 0 if self._streams is None else sum(tokens.nbytes for tokens in self._streams)

    def reset(self) -> None:
        """Forget the sequences."""
        self._num_tokens = 0
        self._batch = (0, 0)
        self._streams: tuple[Tokens, ...] | None = None

    def compress(
        self, k: Tensor, v: Tensor, *, k_gate: Tensor | None = None, v_gate: Tensor | None = None
    ) -> CompressedKV:
        """Compress sequences from their beginning; what was held of others is forgotten.

        Args:
            k: keys before RoPE, ``[B, H, T, D]``, float32, float16 or bfloat16.
            v: values, alike; its D may be another.
            k_gate: logits of the keys' gates in the first level, ``[B, H, T, C]`` (HCA: C = D),
                where the model computes them from more than the key, as DeepSeek-V4 does; None:
                from the key with the weights that were given, else all alike.
            v_gate: alike for the values.

        Returns:
            ``k`` and ``v``: the entries ``[B, H, T // ratio, E]`` in the types of the arguments.
            The ``T % ratio`` tokens that fill no window are in ``remainder``; ``append`` goes on.

        Raises:
            UsageError: shapes or types that do not fit each other or the weights; the sequences
                held until then are still there.
        """
        sides = self._check(k, v, k_gate, v_gate)
        self.reset()
        return self._append(sides, (k.shape[0], k.shape[1]))

    def append(
        self, k: Tensor, v: Tensor, *, k_gate: Tensor | None = None, v_gate: Tensor | None = None
    ) -> CompressedKV:
        """Go on with the sequences: arguments and errors as ``compress``.

        Returns:
            The entries of the windows that are full now and were not before. All of them, one
            call after another, are what ``compress`` returns for the whole, bit for bit.
        """
        sides = self._check(k, v, k_gate, v_gate)
        if self._streams is not None:
            given = (k.shape[0], k.shape[1])
            if given != self._batch:
                legal = f"{self._batch}, as the sequences that are held"
                raise UsageError("k", given, f"[batch, heads] = {legal}")
            for name, held, new in zip(SIDES, self._streams, sides, strict=True):
                _check_goes_on(name, held, new)
        return self._append(sides, (k.shape[0], k.shape[1]))

    def decompress(self, k_c: Tensor, v_c: Tensor) -> CompressedKV:
        """Give every token of a full window its window's entry, bit for bit.

        This does not bring tokens back: an entry is an average, and a token differs from it by
        as much as from its neighbours. Where they are independent of each other (in the mean,
        over a window of n that weigh alike) the root mean square of the error is
        ``sqrt(1 - 1 / n)`` of the tokens' own; where they are alike it is 0. Keys, moreover, are
        turned by RoPE at the position of their window's first token.

        Args:
            k_c: ``[B, H, entries, E]``. v_c: alike, with as many entries.

        Returns:
            ``[B, H, entries * ratio, E]`` each; what ``remainder`` holds follows after it.

        Raises:
            UsageError: no tensors of that shape.
        """
        for name, x in (("k_c", k_c), ("v_c", v_c)):
            _check_tensor(name, x)
        if k_c.shape[:3] != v_c.shape[:3]:
            legal = f"{tuple(k_c.shape[:3])} and a dim, as k_c"
            raise UsageError("v_c", tuple(v_c.shape), legal)
        return CompressedKV(*(self._decompress(x) for x in (k_c, v_c)))

    def _decompress(self, entries: Tensor) -> Tensor:
        batch, heads, count, dim = entries.shape
        lengths = [count * self.compression_ratio] * (batch * heads)
        rows = ops.hca_decompress(entries.reshape(-1, dim), lengths, self.compression_ratio)
        return rows.view(batch, heads, -1, dim)

    def _append(self, sides: tuple[Tokens, ...], batch: tuple[int, int]) -> CompressedKV:
        done = self._num_tokens // self.compression_ratio
        held = self._streams or tuple(side.cut(0, 0) for side in sides)
        self._num_tokens += sides[0].length
        self._batch = batch
        kept, entries = [], []
        for pooling, old, new in zip(self._poolings, held, sides, strict=True):
            tokens, made = _advance(pooling, old.join(new), done)
            kept.append(tokens)
            entries.append(made.unflatten(0, batch))
        self._streams = tuple(kept)
        return CompressedKV(*entries)

    def _check(
        self, k: Tensor, v: Tensor, k_gate: Tensor | None, v_gate: Tensor | None
    ) -> tuple[Tokens, ...]:
        """The arguments as tokens of batch * heads sequences."""
        for name, x in (("k", k), ("v", v)):
            _check_tensor(name, x)
        if v.shape[:3] != k.shape[:3]:
            raise UsageError("v", tuple(v.shape), f"{tuple(k.shape[:3])} and a dim, as k")
        sides = []
        for side, x, gate in ((0, k, k_gate), (1, v, v_gate)):
            pooling = self._poolings[side]
            _check_side(pooling, SIDES[side], x, gate)
            gates = None if gate is None else gate.flatten(0, 1)
            sides.append(Tokens(x.flatten(0, 1), gates))
        return tuple(sides)


def _advance(pooling: Pooling, tokens: Tokens, done: int) -> tuple[Tokens, Tensor]:
    """What to hold on to, and the entries of the windows from number ``done`` on.

    ``tokens`` begin with the last of the windows that are done where they overlap.
    """
    ratio = pooling.ratio
    previous = None
    if pooling.series == 2 and done:
        previous, tokens = tokens.cut(0, ratio), tokens.cut(ratio)
    full = tokens.length // ratio * ratio
    entries = pooling.pool(tokens.cut(0, full), done, previous)
    start = full
    if pooling.series == 2 and full:
        start -= ratio
    elif previous is not None:
        tokens = previous.join(tokens)
    kept = tokens.cut(start)
    gates = None if kept.gates is None else kept.gates.clone()
    return Tokens(kept.values.clone(), gates), entries  # clones, not views of a long input


def _check_side(pooling: Pooling, side: str, x: Tensor, gate: Tensor | None) -> None:
    name, channels = side[0], x.shape[3]
    if pooling.two_vectors and channels % 2:
        raise UsageError(name, tuple(x.shape), "[batch, heads, tokens, 2 * dim]")
    dim = pooling.entry_dim(channels)
    pooling.weights.check(side, pooling.ratios, channels, pooling.series, dim)
    if pooling.rotation is not None:
        turned = 2 * len(pooling.rotation.inverse_frequencies)
        if turned > dim:
            raise UsageError("inverse_frequencies", f"{turned // 2} pairs", f"at most {dim // 2}")
    if gate is None:
        return
    if pooling.weights.levels[0].gate is not None:
        hint = "Give the logits, or the weights that make them."
        raise UsageError(f"{name}_gate", tuple(gate.shape), f"None: {side}.levels.0.gate is", hint)
    _check_tensor(f"{name}_gate", gate)
    legal = (*x.shape[:3], pooling.series * dim)
    if gate.shape != legal:
        raise UsageError(f"{name}_gate", tuple(gate.shape), f"{legal}")


def _check_goes_on(side: str, held: Tokens, new: Tokens) -> None:
    name = side[0]
    for what in ("dtype", "device"):
        theirs, ours = getattr(new.values, what), getattr(held.values, what)
        if theirs != ours:
            raise UsageError(name, f"{what} {theirs}", f"{ours}, as the tokens that are held")
    if new.values.shape[2] != held.values.shape[2]:
        legal = f"{held.values.shape[2]}, as the tokens that are held"
        raise UsageError(name, f"dim {new.values.shape[2]}", legal)
    if (new.gates is None) != (held.gates is None):
        given = "None" if new.gates is None else "a tensor"
        raise UsageError(f"{name}_gate", given, "with every call or with none")
    if new.gates is not None and held.gates is not None and new.gates.dtype != held.gates.dtype:
        raise UsageError(f"{name}_gate", new.gates.dtype, f"{held.gates.dtype}, as those held")


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4:
        shown = tuple(x.shape) if isinstance(x, Tensor) else x
        raise UsageError(name, shown, "a tensor [batch, heads, tokens, dim]")
    if x.dtype not in FLOAT_DTYPES:
        raise UsageError(name, x.dtype, FLOAT_DTYPES)
