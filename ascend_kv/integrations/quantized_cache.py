"""transformers' own ``QuantizedCache``, so that it can be measured beside ours.

Its group-wise backends (quanto, hqq) answer every forward with the new keys and values in full
precision and quantize them afterwards, once a residual of so many latest tokens is full. Here a
text is fed by chunks as long as that residual: when a chunk arrives, everything before it has been
quantized and is read back, and only the chunk itself is read in full precision. With chunks of n
tokens a query reads n / 2 keys unquantized on the average. All that is stored is quantized anew
with every chunk.

The fp8 backend answers the first forward that way; later ones read what they have just stored. Its
scales come from the first chunk and stay.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import cache_utils

from ascend_kv.errors import UsageError
from ascend_kv.integrations.loading import LoadedModel

_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq"}
_PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
ATTENTION = "sdpa"
"""Which of transformers' attentions reads these caches."""


def why_not(backend: str) -> str | None:
    """Why a backend cannot run here; None if it can."""
    if not hasattr(cache_utils, "QuantizedCache"):
        return "this transformers has no QuantizedCache"
    if backend == "fp8":
        known = hasattr(cache_utils, "Fp8QuantizedLayer")
        return None if known else "this transformers has no fp8 cache; a newer one has"
    if _is_installed(_MODULES[backend]):
        return None
    return f"{_PACKAGES[backend]} is not installed (pip install {_PACKAGES[backend]})"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


class QuantizedCacheModel:
    """Runs the text of one sequence through transformers' attention and quantized cache."""

    def __init__(
        self, loaded: LoadedModel, backend: str, chunk_tokens: int, options: Mapping[str, int]
    ) -> None:
        """Try the cache on the model; nothing is run yet.

        Args:
            loaded: the weights, which others may share; used as they were loaded.
            backend: quanto, hqq or fp8.
            chunk_tokens: tokens fed at once; the group-wise backends' residual.
            options: nbits, axis_key, axis_value and q_group_size of the group-wise backends.

        Raises:
            UsageError: the backend cannot do that, or not with this model.
        """
        self._loaded, self._backend = loaded, backend
        self._chunk_tokens = chunk_tokens
        self._options = dict(options)
        if backend != "fp8":
            self._options["residual_length"] = chunk_tokens
        self._cache: Any = self._new_cache()

    def forward(self, token_ids: Sequence[int], start: int, rows: Sequence[int]) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` of tokens that follow ``start`` others.

        Args:
            token_ids: go into the cache; with ``start`` 0 it is empty before.
            start: tokens that are in the cache.
            rows: of ``token_ids``, ascending, whose logits are wanted.
        """
        if start == 0:
            self._cache = self._new_cache()
        assert start == self._cache.get_seq_length(), "a sequence goes in from its beginning"
        self._loaded.folding.use(None)
        logits = []
        with _their_attention(self._loaded.hf_model), torch.inference_mode():
            for first in range(0, len(token_ids), self._chunk_tokens):
                chunk = token_ids[first : first + self._chunk_tokens]
                wanted = [row - first for row in rows if first <= row < first + len(chunk)]
                logits.append(self._forward(chunk, start + first, wanted))
        return torch.cat(logits)

    def stored_bytes(self) -> int:
        """Bytes of codes, scales and zero points that the cache holds now."""
        return sum(
            _nbytes(getattr(layer, name))
            for layer in self._cache.layers
            for name in ("_quantized_keys", "_quantized_values")
        )

    def stored_tokens(self) -> int:
        """Tokens that the cache holds now, the residual's among them."""
        return int(self._cache.get_seq_length())

    def residual_tokens(self) -> int:
        """Tokens that it holds in full precision now."""
        keys = self._cache.layers[0].keys
        return 0 if keys is None or keys.dim() < 4 else int(keys.shape[-2])

    def _new_cache(self) -> Any:
        config = self._loaded.hf_model.config
        try:
            return cache_utils.QuantizedCache(self._backend, config, **self._options)
        except (ValueError, ImportError, TypeError) as error:
            given = {"backend": self._backend, **self._options}
            reason = " ".join(str(error).split())
            raise UsageError("huggingface", given, "what QuantizedCache takes", reason) from error

    def _forward(self, chunk: Sequence[int], start: int, wanted: list[int]) -> torch.Tensor:
        model = self._loaded.hf_model
        positions = torch.arange(start, start + len(chunk), device=model.device)
        with warnings.catch_warnings():  # the argument is being renamed, and both names work
            warnings.simplefilter("ignore", FutureWarning)
            output = model(
                input_ids=torch.tensor([list(chunk)], device=model.device),
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=model.device),
            )
        logits: torch.Tensor = output.logits[0]
        return logits


@contextmanager
def _their_attention(hf_model: Any) -> Iterator[None]:
    ours = hf_model.config._attn_implementation
    hf_model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        hf_model.set_attn_implementation(ours)


def _nbytes(stored: Any) -> int:
    """Bytes of all plain tensors inside tuples, mappings and tensor subclasses."""
    if isinstance(stored, Mapping):
        return sum(map(_nbytes, stored.values()))
    if isinstance(stored, tuple | list):
        return sum(map(_nbytes, stored))
    if not isinstance(stored, torch.Tensor):
        return 0
    if hasattr(stored, "__tensor_flatten__"):
        names, _ = stored.__tensor_flatten__()
        return sum(_nbytes(getattr(stored, name)) for name in names)
    return stored.nbytes
