"""Stands in for CANN's SparseFlashMla: does, slowly, what its documents say, and refuses the rest.

Written from ops-transformer's attention/sparse_flash_mla/README.md and its torch extension's
docs/zh/sparse_flash_mla.md; float64, one query after another, every cache row by its position.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


class StandIn:
    """Has the two functions; ``calls`` are the arguments it was given.

    ``float32`` lets it take that type too, so that a test sees more digits.
    """

    def __init__(self, float32: bool = False) -> None:
        self._types = (torch.float16, torch.bfloat16, *([torch.float32] if float32 else []))
        self.calls: list[dict[str, Any]] = []
        self._metadata: dict[int, dict[str, Any]] = {}

    def sparse_flash_mla_metadata(self, **given: Any) -> Tensor:
        assert given["num_heads_q"] in (1, 2, 4, 8, 16, 32, 64, 128)
        assert (given["num_heads_kv"], given["head_dim"]) == (1, 512)
        assert given["cmp_topk"] in (0, 512, 1024)
        assert given["batch_size"] == len(given["seqused_ori_kv"])
        assert given["max_seqlen_ori_kv"] == int(given["seqused_ori_kv"].max())
        metadata = torch.full((1024,), len(self._metadata), dtype=torch.int32)
        self._metadata[len(self._metadata)] = given
        return metadata

    def sparse_flash_mla(self, q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        self.calls.append(given)
        earlier = self._metadata[int(given["metadata"][0])]
        for name in ("cu_seqlens_q", "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv",
                     "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left",
                     "ori_win_right", "layout_q", "layout_kv"):  # fmt: skip
            mine, theirs = given.get(name), earlier.get(name)
            same = mine is theirs or (not isinstance(mine, Tensor) and mine == theirs)
            assert same, f"{name} differs from the metadata's"
        self._check(q, given, earlier)
        return _attend(q, given), torch.zeros(())

    def _check(self, q: Tensor, given: dict[str, Any], earlier: dict[str, Any]) -> None:
        assert (given["layout_q"], given["layout_kv"]) == ("TND", "PA_BBND")
        assert (given["ori_mask_mode"], given["ori_win_left"], given["ori_win_right"]) == (
            4,
            127,
            0,
        )
        assert given["topk_value_mode"] == 1 and given["return_softmax_lse"] is False
        assert q.is_contiguous() and q.dtype in self._types
        assert given["sinks"].dtype == torch.float32
        has_entries = given.get("cmp_kv") is not None
        assert earlier["has_cmp_kv"] == has_entries
        caches = [given["ori_kv"], *([given["cmp_kv"]] if has_entries else [])]
        for cache in caches:
            assert cache.dtype == q.dtype and cache.numel()
            assert cache.shape[1] % 16 == 0 and cache.shape[1] <= 1024
            assert cache.shape[2:] == (1, 512)
        for name in ("ori_block_table", "cmp_block_table", "cu_seqlens_q", "cmp_sparse_indices"):
            if given.get(name) is not None:
                assert given[name].dtype == torch.int32 and given[name].numel()
        listed = given.get("cmp_sparse_indices")
        if not has_entries:
            assert given["cmp_ratio"] == 1 and given["cmp_mask_mode"] == 0 and listed is None
            assert earlier["cmp_topk"] == 0
            return
        assert given["cmp_mask_mode"] == 3
        restored = given["seqused_cmp_kv"] * given["cmp_ratio"] + given["cmp_residual_kv"]
        assert torch.equal(restored, given["seqused_ori_kv"])
        if given["cmp_ratio"] == 4:
            assert listed.shape == (len(q), 1, earlier["cmp_topk"])
        else:
            assert given["cmp_ratio"] == 128 and listed is None and earlier["cmp_topk"] == 0


def _attend(q: Tensor, given: dict[str, Any]) -> Tensor:
    output = torch.zeros(q.shape, dtype=torch.float64)
    starts = given["cu_seqlens_q"].tolist()
    for b, length in enumerate(given["seqused_ori_kv"].tolist()):
        for row in range(starts[b], starts[b + 1]):
            position = length - (starts[b + 1] - row)
            seen = range(max(0, position - given["ori_win_left"]), position + 1)
            keys = [_read(given["ori_kv"], given["ori_block_table"][b], i) for i in seen]
            if given.get("cmp_kv") is not None:
                ready = min((position + 1) // given["cmp_ratio"], int(given["seqused_cmp_kv"][b]))
                chosen = list(range(ready))
                if given.get("cmp_sparse_indices") is not None:
                    listed = given["cmp_sparse_indices"][row, 0].tolist()
                    chosen = [entry for entry in listed if 0 <= entry < ready]
                keys += [_read(given["cmp_kv"], given["cmp_block_table"][b], i) for i in chosen]
            kv = torch.stack(keys)
            scores = q[row].double() @ kv.T * given["softmax_scale"]
            sinks = given["sinks"].double()[:, None]
            weights = torch.softmax(torch.cat((scores, sinks), 1), 1)[:, :-1]
            output[row] = weights @ kv
    return output.to(q.dtype)


def _read(cache: Tensor, table: Tensor, position: int) -> Tensor:
    size = cache.shape[1]
    return cache[int(table[position // size]), position % size, 0].double()
