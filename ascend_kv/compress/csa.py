"""``CSACompressor``: overlapping windows of a few tokens to one entry each.

Entry w mixes what window w - 1 left for its successor with window w's own: ``2 * ratio`` slots, a
new entry every ``ratio`` tokens; window 0 has its own alone. Weights, norm and RoPE are as in
``HCACompressor``, with one level.

Source: DeepSeek-V4 technical report, 2.3.1, equations 9 to 12 ("compressed sparse attention"),
which has a ratio of 4 and projects two vectors for each token: ``two_vectors=True``.
"""

from __future__ import annotations

import torch

from ascend_kv.compress.compressor import Compressor
from ascend_kv.compress.weights import Source
from ascend_kv.errors import UsageError


class CSACompressor(Compressor):
    """Compresses keys and values by pooling windows that overlap by one.

    It holds the state of the sequences it was given last (``append``, ``remainder``); its settings
    never change.

    Args:
        compression_ratio: tokens between entries.
        two_vectors: the last dimension holds two vectors for each token, the one for the next
            window first; False: one vector serves both.
        weights, norm_eps, inverse_frequencies, interleaved: as ``HCACompressor``; gates have
            twice an entry's channels (C = 2E), those for the next window first.

    Raises:
        UsageError: a ratio below 1, or weights that are not legal.
    """

    def __init__(
        self,
        compression_ratio: int = 4,
        *,
        two_vectors: bool = False,
        weights: Source = None,
        norm_eps: float = 1e-6,
        inverse_frequencies: torch.Tensor | None = None,
        interleaved: bool = True,
    ) -> None:
        ratio = compression_ratio
        if not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 1:
            raise UsageError("compression_ratio", ratio, "a whole number of at least 1")
        if not isinstance(two_vectors, bool):
            raise UsageError("two_vectors", two_vectors, "True, False")
        super().__init__(
            (ratio,),
            series=2,
            two_vectors=two_vectors,
            weights=weights,
            norm_eps=norm_eps,
            inverse_frequencies=inverse_frequencies,
            interleaved=interleaved,
        )
