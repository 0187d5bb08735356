"""Many tokens to one entry: HCA (windows in levels) and CSA (overlapping windows).

The classes anyone may call; the attention over compressed caches is the integrations'.
"""

from __future__ import annotations

from ascend_kv.compress.compressor import CompressedKV
from ascend_kv.compress.csa import CSACompressor
from ascend_kv.compress.hca import HCACompressor

__all__ = ["CSACompressor", "CompressedKV", "HCACompressor"]
