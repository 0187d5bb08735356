"""Asks Linux to keep large caches on a CPU in huge pages.

A decode reads blocks that lie all over the cache. With pages of 4 KiB nearly every block costs
a walk through the page tables; with pages of 2 MiB INT8 attention over 32,768 tokens took 1 to
27 % less time (measured on two Xeon cores, three shapes, two runs of each). It is advice: where
the kernel does not follow it, nothing but that time is lost.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE_PAGE_BYTES = 1 << 21


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself. Call it before anything is written: pages in use stay as they are."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None or tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE_BYTES:
        return tensor
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, stop - start, advice)
    return tensor
