"""The map of a window and entries onto CANN's SparseFlashMla: rules, arguments, results."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_within
from deepseek_models import make_deepseek
from deepseek_runs import Runner
from sparse_flash_mla_stand_in import StandIn

from ascend_kv.compressed_layers import CompressedFormats, GroupBlocks
from ascend_kv.integrations.loading import load_model
from ascend_kv.ops import platform
from ascend_kv.ops.sparse_flash_mla import FUNCTIONS, Plan, Request, Unserved, plan

CSA = Request(torch.bfloat16, torch.bfloat16, 64, 512, 128, 128, 16, 4, 512, (1, 5), (130, 9))
HCA = dataclasses.replace(CSA, ratio=128, listed=0)
WINDOW = dataclasses.replace(CSA, ratio=0, listed=0)


def planned(request: Request) -> Plan:
    made = plan(request)
    assert isinstance(made, Plan), made
    return made


def test_arguments_of_csa() -> None:
    metadata, attention = planned(CSA)
    shared = {
        "cu_seqlens_q": [0, 1, 6],
        "seqused_ori_kv": [130, 9],
        "seqused_cmp_kv": [32, 2],
        "cmp_residual_kv": [2, 1],
        "cmp_ratio": 4,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 3,
        "ori_win_left": 127,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
    }
    assert attention == {**shared, "topk_value_mode": 1, "return_softmax_lse": False}
    assert metadata == {
        **shared,
        "num_heads_q": 64,
        "num_heads_kv": 1,
        "head_dim": 512,
        "batch_size": 2,
        "max_seqlen_q": 5,
        "max_seqlen_ori_kv": 130,
        "max_seqlen_cmp_kv": 32,
        "ori_topk": 0,
        "cmp_topk": 512,
        "has_ori_kv": True,
        "has_cmp_kv": True,
    }


def test_arguments_of_hca_and_of_a_window() -> None:
    metadata, attention = planned(HCA)
    assert (metadata["cmp_topk"], attention["cmp_ratio"]) == (0, 128)
    assert (attention["seqused_cmp_kv"], attention["cmp_residual_kv"]) == ([1, 0], [2, 9])
    none_yet = dataclasses.replace(HCA, lengths=(100, 9))
    for request in (WINDOW, none_yet):
        metadata, attention = planned(request)
        assert not metadata["has_cmp_kv"] and metadata["cmp_topk"] == 0
        assert (attention["cmp_ratio"], attention["cmp_mask_mode"]) == (1, 0)
        assert not {"seqused_cmp_kv", "cmp_residual_kv"} & set(attention)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("type", {"dtype": torch.float32}),
        ("entries", {"entries_dtype": torch.int8}),
        ("head_dim", {"head_dim": 128}),
        ("heads", {"num_heads": 48}),
        ("heads", {"num_heads": 256}),
        ("window", {"window": 64}),
        ("block_size", {"entry_block_size": 24}),
        ("block_size", {"entry_block_size": 2048}),
        ("block_size", {"window_block_size": 8}),
        ("ratio", {"ratio": 8}),
        ("ratio", {"ratio": 128}),
        ("ratio", {"listed": 0}),
        ("list", {"listed": 2048}),
    ],
)
def test_rules(rule: str, change: dict[str, Any]) -> None:
    made = plan(dataclasses.replace(CSA, **change))
    assert isinstance(made, Unserved) and made.rule == rule
    assert str(made).startswith(f"{rule}: got ")


def test_what_a_layer_without_entries_does_not_have_breaks_no_rule() -> None:
    planned(dataclasses.replace(WINDOW, entries_dtype=torch.int8, entry_block_size=24))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of each kind with DeepSeek-V4's own head and window."""
    return make_deepseek(
        tmp_path_factory.mktemp("wide"), "window", "csa", "hca",
        num_attention_heads=2, head_dim=512, qk_rope_head_dim=64, index_head_dim=128,
        sliding_window=128,
    )  # fmt: skip


def runner(model: Path, dtype: str, library: Any, entries: str = "") -> Runner:
    formats = CompressedFormats(dtype, entries or dtype, dtype)
    made = Runner(load_model(model, dtype), formats, GroupBlocks(3, 12, 3, 16))
    made.model.library = library
    return made


STEPS = [
    {"a": 140, "b": 3},
    {"a": 1, "b": 1},
    {"a": 2, "b": 128, "c": 1},
    {"a": 1, "b": 1, "c": 2},
    {"a": 120, "b": 1, "c": 130},
    {"a": 1, "b": 1, "c": 1},
]


def draw_steps() -> list[list[tuple[str, list[int]]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            (name, torch.randint(3, 97, (n,), generator=generator).tolist())
            for name, n in one.items()
        ]
        for one in STEPS
    ]


def test_the_model_on_it_is_the_model_on_our_operators(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings, chunks and mixed batches, in float32, which only the stand-in takes."""

    def plan_as_half(request: Request) -> Plan | Unserved:
        half = dataclasses.replace(request, dtype=torch.half, entries_dtype=torch.half)
        return plan(half)

    monkeypatch.setattr("ascend_kv.integrations.deepseek_v4_fused.plan", plan_as_half)
    library = StandIn(float32=True)
    fused, ours = runner(wide, "float32", library), runner(wide, "float32", None)
    for work in draw_steps():
        mine, theirs = ours.step(work), fused.step(work)
        for name, _ in work:
            assert_within(theirs[name], mine[name], 1e-5)
    assert fused.model.routes == {"SparseFlashMla": 3 * len(STEPS)}
    assert ours.model.routes == {"operators": 3 * len(STEPS)}
    assert len(library.calls) == 3 * (1 + 1 + 2 + 2 + 2 + 1)
    tables = [call["ori_block_table"] for call in library.calls[3:6]]
    assert all(table.shape == (2, 2) for table in tables)  # positions 0 to 140: the ring twice


def test_half_types_reach_it(wide: Path) -> None:
    library = StandIn()
    made = runner(wide, "bfloat16", library)
    for work in draw_steps()[:2]:
        assert all(torch.isfinite(logits).all() for logits in made.step(work).values())
    assert made.model.routes == {"SparseFlashMla": 6}


def test_what_it_does_not_take_is_left_to_the_operators(wide: Path) -> None:
    made = runner(wide, "bfloat16", StandIn(), entries="int8")
    made.step([("a", [5] * 10)])
    reason = "entries: got torch.int8; legal: of the queries' type, not quantized"
    assert made.model.routes == {"SparseFlashMla": 1, f"operators ({reason})": 2}


def test_it_is_looked_for_on_an_npu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform.sparse_flash_mla_library("cpu") is None
    assert platform.sparse_flash_mla_library("npu") is None  # not installed here
    package: Any = types.ModuleType("cann_ops_transformer")
    package.ops = StandIn()
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(platform.importlib, "import_module", lambda name: package)
    monkeypatch.delenv("ASCEND_KV_OPERATORS", raising=False)
    assert platform.sparse_flash_mla_library("npu") is package.ops
    assert all(hasattr(package.ops, name) for name in FUNCTIONS)
    assert platform.sparse_flash_mla_library("cpu") is None
    monkeypatch.setenv("ASCEND_KV_OPERATORS", "reference")
    assert platform.sparse_flash_mla_library("npu") is None
    monkeypatch.delenv("ASCEND_KV_OPERATORS")
    package.ops = types.SimpleNamespace()
    assert platform.sparse_flash_mla_library("npu") is None
