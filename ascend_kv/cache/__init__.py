"""The paged KV cache: block pool, block tables and statistics (no torch), and the tensors.

``ascend_kv.cache.paged`` is the only module here that imports torch.
"""
