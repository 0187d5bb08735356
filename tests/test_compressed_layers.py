"""DeepSeek-V4's bytes against the published ones, its configurations, and how memory is divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ascend_kv.compressed_layers import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    CompressedFormats,
    CompressedLayers,
    GroupBlocks,
    explain_compression,
    layers_from_config,
    plan_groups,
)
from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import FORMATS, geometry_from_config
from ascend_kv.plan.builtin_models import BUILTIN_MODELS

GIB = 2**30
BF16 = CompressedFormats("bfloat16", "bfloat16", "bfloat16")
SMALL = CompressedLayers(("window", "csa", "hca", "csa"), 24, 8, 16, 4, 8, 4, 16)
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 8,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "compress_ratios": [0, 4, 128, 4, 0],
}


def gib(layers: CompressedLayers, tokens: int) -> float:
    kept = layers.kv_bytes(tokens, BF16)
    return sum(count for group, count in kept.items() if group != "state") / GIB


def test_flash_and_pro_take_what_was_published() -> None:
    """9.62 GiB for Pro at 1M was published; the others follow from the same arithmetic."""
    assert gib(DEEPSEEK_V4_FLASH, 2**17) == pytest.approx(0.845, abs=0.0005)
    assert gib(DEEPSEEK_V4_FLASH, 2**20) == pytest.approx(6.72, abs=0.005)
    assert gib(DEEPSEEK_V4_PRO, 2**17) == pytest.approx(1.21, abs=0.005)
    assert gib(DEEPSEEK_V4_PRO, 2**20) == pytest.approx(9.62, abs=0.005)
    assert [DEEPSEEK_V4_FLASH.count(kind) for kind in ("window", "csa", "hca")] == [2, 21, 20]
    assert [DEEPSEEK_V4_PRO.count(kind) for kind in ("window", "csa", "hca")] == [0, 30, 31]
    assert DEEPSEEK_V4_FLASH.kinds[:4] == ("window", "window", "csa", "hca")
    assert DEEPSEEK_V4_PRO.kinds[:4] == ("hca", "hca", "csa", "hca")


@pytest.mark.parametrize(
    ("name", "layers"),
    [("deepseek-v4-flash", DEEPSEEK_V4_FLASH), ("deepseek-v4-pro", DEEPSEEK_V4_PRO)],
)
def test_built_in_configurations_say_the_same(name: str, layers: CompressedLayers) -> None:
    assert layers_from_config(BUILTIN_MODELS[name].config) == layers


def test_bytes_of_an_entry_by_hand() -> None:
    flash = DEEPSEEK_V4_FLASH
    assert flash.entry_bytes("hca", BF16) == 512 * 2
    assert flash.entry_bytes("csa", BF16) == 512 * 2 + 128 * 2
    int8_keys = BF16._replace(index_keys="int8")
    assert flash.entry_bytes("csa", int8_keys) == 512 * 2 + 128 + 4
    assert flash.entry_bytes("hca", int8_keys) == 512 * 2
    int8 = CompressedFormats("bfloat16", "int8", "int8")
    assert flash.entry_bytes("hca", int8) == 448 + 4 + 64 * 2
    assert flash.entry_bytes("csa", int8) == 448 + 4 + 64 * 2 + 128 + 4
    assert flash.entry_bytes("hca", CompressedFormats("float32", "float32", "float32")) == 2048


def test_slots_by_hand() -> None:
    assert DEEPSEEK_V4_FLASH.slot_bytes("window", BF16) == 43 * 128 * 512 * 2
    hca = 20 * 128 * 2 * 512 * 4
    csa = 21 * 8 * 2 * (1024 + 256) * 4
    assert DEEPSEEK_V4_FLASH.slot_bytes("state", BF16) == hca + csa


@pytest.mark.parametrize(
    ("kind", "index_keys", "factor"),
    [("hca", "bfloat16", 64), ("csa", "bfloat16", 3.15), ("csa", "int8", 3.5)],
)
def test_how_much_smaller_a_layer_is_at_128k(kind: str, index_keys: str, factor: float) -> None:
    """Window, entries and indexer keys, with HCA the float32 state too, against every key."""
    layer = dataclasses.replace(DEEPSEEK_V4_FLASH, kinds=(kind,))
    kept = layer.kv_bytes(2**17, BF16._replace(index_keys=index_keys))
    assert 2**17 * 512 * 2 / sum(kept.values()) >= factor


def test_only_full_windows_count() -> None:
    per_entry = 2 * (24 + 16) * 2
    for tokens, csa, hca in ((0, 0, 0), (3, 0, 0), (4, 1, 0), (15, 3, 0), (16, 4, 1), (33, 8, 2)):
        kept = SMALL.kv_bytes(tokens, BF16)
        assert (kept["csa"], kept["hca"]) == (csa * per_entry, hca * 24 * 2)


def test_cache_bytes() -> None:
    sizes = SMALL.cache_bytes(GroupBlocks(3, 5, 2, 16), BF16)
    assert sizes["csa"] == 5 * 16 * 2 * (24 + 16) * 2
    assert sizes["hca"] == 2 * 16 * 24 * 2
    assert sizes["window"] == 3 * 4 * 8 * 24 * 2
    state = 2 * 8 * 2 * 2 * (24 + 16) * 4 + 16 * 2 * 24 * 4
    assert sizes["state"] == 3 * state


@pytest.mark.parametrize("layers", [SMALL, DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO])
@pytest.mark.parametrize("sequences", [1, 7])
@pytest.mark.parametrize("share", [0.0, 0.3, 2.0])
def test_planned_blocks_fill_the_memory_and_no_more(
    layers: CompressedLayers, sequences: int, share: float
) -> None:
    longest, size = 4000, 16
    least = plan_groups(layers, BF16, size, 2**40, longest, sequences)
    all_full = sum(layers.cache_bytes(least, BF16).values())
    one = GroupBlocks(
        sequences,
        -(-(longest // layers.csa_ratio) // 16),
        -(-(longest // layers.hca_ratio) // 16),
        16,
    )
    needed = sum(layers.cache_bytes(one, BF16).values())
    memory = needed + int(share * (all_full - needed))
    blocks = plan_groups(layers, BF16, size, memory, longest, sequences)
    taken = sum(layers.cache_bytes(blocks, BF16).values())
    assert taken <= memory and blocks.slots == sequences
    assert blocks.csa >= one.csa and blocks.hca >= one.hca
    if share >= 1:  # nothing beyond what all sequences at full length can use
        assert taken == all_full
        assert blocks.csa <= sequences * one.csa and blocks.hca <= sequences * (one.hca + 1)
    else:
        step = size * sum(layers.group_entry_bytes(group, BF16) for group in ("csa", "hca"))
        assert memory - taken < step
    with pytest.raises(UsageError, match="max_num_seqs"):
        plan_groups(layers, BF16, size, needed - 1, longest, sequences)


def test_layers_of_one_kind_have_no_blocks_of_the_other() -> None:
    only = dataclasses.replace(SMALL, kinds=("window", "window"))
    assert plan_groups(only, BF16, 16, 2**30, 4000, 3) == GroupBlocks(3, 0, 0, 16)
    only = dataclasses.replace(SMALL, kinds=("csa",))
    assert plan_groups(only, BF16, 16, 2**30, 4000, 3).hca == 0


def test_layers_of_a_config() -> None:
    expected = dataclasses.replace(SMALL, hca_ratio=128)
    assert layers_from_config(CONFIG) == expected
    newer = {
        **CONFIG,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"heavily_compressed_attention": 16},
        "partial_rotary_factor": 8 / 24,
    }
    del newer["compress_ratios"], newer["qk_rope_head_dim"]
    assert layers_from_config(newer) == SMALL
    geometry = geometry_from_config(newer)
    assert geometry.compressed == SMALL and geometry.layer_windows == (8, 8, 8, 8)


def test_bytes_by_token_are_refused_where_there_are_none() -> None:
    geometry = geometry_from_config(CONFIG)
    with pytest.raises(UnsupportedModelError, match="compressed"):
        geometry.token_bytes([FORMATS["bfloat16"]] * 4)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("compress_ratios", {"compress_ratios": [0, 4]}),
        ("compress_ratios", {"compress_ratios": [0, 4, 64, 4]}),
        ("compress_ratios", {"compress_ratios": None}),
        ("layer_types", {"layer_types": ["full_attention"] * 4}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": None}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 7}),
        ("head_dim", {"head_dim": None}),
        ("index_head_dim", {"index_head_dim": 0}),
        ("index_topk", {"index_topk": None}),
        ("sliding_window", {"sliding_window": None}),
        ("heavily_compressed_attention", {"compress_rates": {"heavily_compressed_attention": 0}}),
    ],
)
def test_a_config_that_lacks_something_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        layers_from_config({**CONFIG, **change})
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "formats"),
    [
        ("dtype", CompressedFormats("int8", "int8", "int8")),
        ("kv_cache_dtype", CompressedFormats("bfloat16", "float16", "bfloat16")),
        ("indexer_cache_dtype", CompressedFormats("bfloat16", "int8", "int4")),
    ],
)
def test_formats_that_there_are_not(field: str, formats: CompressedFormats) -> None:
    with pytest.raises(UsageError) as error:
        formats.check()
    assert error.value.field == field
    assert BF16.check() == BF16


def test_explanation_has_the_figures_that_circulate() -> None:
    text = explain_compression(DEEPSEEK_V4_FLASH, 2**17)
    for figure in ("7.391 GiB", "1.848 GiB", "59 MiB", "5.375 GiB", "0.845 GiB"):
        assert figure in text, text
    v32 = explain_compression(DEEPSEEK_V4_PRO, 2**20)
    assert "83.875 GiB" in v32, v32  # as published for DeepSeek-V3.2, 61 layers at 1M
