// Host function of kv_cache_load.
#include "../host/device.h"
#include "../host/hosts.h"
#include "../host/paged.h"
#include "../host/reference.h"
#include "kv_cache_load_tiling.h"

#include "aclrtlaunch_kv_cache_load.h"

namespace ascend_kv {
namespace {

// What is read: blocks of B sequences, to [B, N, P, D].
struct LoadPlan {
    at::Tensor tables;
    at::Tensor lengths;  // int32 [B]
    int64_t longest;     // P
};

// What is added to keys; nothing where `rotary_table` is not there.
struct LoadAddend {
    at::Tensor offset;     // float32 [N, D]
    at::Tensor rotary_table;
    at::Tensor positions;  // not there: token n is at position n

    LoadOffset Kind() const
    {
        return !rotary_table.defined() ? OFFSET_NONE
               : positions.defined()   ? OFFSET_AT_POSITIONS
                                       : OFFSET_IN_ORDER;
    }
};

void CheckTables(const at::Tensor &tables, at::IntArrayRef lengths, const at::Tensor &cache)
{
    int64_t batch = static_cast<int64_t>(lengths.size());
    ASCEND_KV_REQUIRE(tables.dim() == 2 && tables.size(0) == batch, "block_tables", tables.sizes(),
                      "[", batch, ", blocks of the longest sequence]");
    CheckIndexType("block_tables", tables);
    CheckDevice("block_tables", tables, cache);
    int64_t longest = CheckLengths("kv_lengths", lengths);
    int64_t room = tables.size(1) * cache.size(2);
    ASCEND_KV_REQUIRE(longest <= room, "kv_lengths", longest, "at most ", room, ", ",
                      tables.size(1), " table entries of ", cache.size(2), " tokens");
}

void CheckOffset(const OptionalTensor &offset, const OptionalTensor &table,
                 const OptionalTensor &positions, int64_t longest, const at::Tensor &cache)
{
    ASCEND_KV_REQUIRE(offset.has_value() == table.has_value(),
                      offset ? "rotary_table" : "key_offset", "None",
                      "a tensor: key_offset and rotary_table come together");
    CheckKeyPositions(positions, cache);
    if (!offset) {
        return;
    }
    int64_t pairs = cache.size(3) / 2;
    CheckShape("key_offset", *offset, {cache.size(1), cache.size(3)});
    CheckFloatType("key_offset", offset->scalar_type());
    CheckDevice("key_offset", *offset, cache);
    ASCEND_KV_REQUIRE(table->dim() == 3 && table->size(0) >= longest && table->size(1) == pairs &&
                          table->size(2) == 2,
                      "rotary_table", table->sizes(), "[", longest, " or more, ", pairs, ", 2]");
    CheckFloatType("rotary_table", table->scalar_type());
    CheckDevice("rotary_table", *table, cache);
}

at::ScalarType ResultType(const at::Tensor &cache, std::optional<at::ScalarType> dtype)
{
    return dtype.value_or(cache.scalar_type() == at::kChar ? at::kFloat : cache.scalar_type());
}

LoadMode ModeOf(const PagedSide &side, const at::Tensor &result, LoadOffset offset)
{
    switch (side.kind) {
        case ScaleKind::NONE:
            return side.cache.scalar_type() == result.scalar_type() && offset == OFFSET_NONE
                       ? LOAD_COPY
                       : LOAD_CONVERT;
        case ScaleKind::TOKEN_HEAD:
            return LOAD_TOKEN_HEAD;
        case ScaleKind::TOKEN:
            return LOAD_TOKEN;
        default:
            return LOAD_STATIC;
    }
}

KvCacheLoadTiling TileLoad(const PagedSide &side, const at::Tensor &result, const LoadPlan &plan,
                           LoadOffset offset, int64_t sides)
{
    const at::Tensor &cache = side.cache;
    return TileKvCacheLoad({plan.tables.size(0), cache.size(1), cache.size(3), cache.size(2),
                            plan.tables.size(1), plan.longest, ModeOf(side, result, offset),
                            ElementOf(result.scalar_type()), ElementOf(cache.scalar_type()),
                            side.Symmetric(), false, plan.tables.scalar_type() == at::kLong, offset,
                            sides},
                           Limits());
}

const char *WhyNoLoadKernel(const PagedSide &side, const at::Tensor &result, const LoadPlan &plan,
                            LoadOffset offset)
{
    if (side.kind == ScaleKind::GROUP) {
        return "scales by group of channels";
    }
    if (side.kind == ScaleKind::BLOCK) {
        return "scales by block";
    }
    if (offset != OFFSET_NONE && side.cache.size(3) % 16 != 0) {
        return "key_offset with a head_dim that is not a multiple of 16";
    }
    if (!side.IsContiguous()) {
        return "a cache or scales that are not contiguous";
    }
    if (plan.longest > INT32_MAX) {
        return "more than 2**31 - 1 tokens";
    }
    bool fits = TileLoad(side, result, plan, offset, 1).tile_tokens > 0;
    return fits ? nullptr : "a token too large for the unified buffer";
}

// One launch: a side alone, with `addend`, or keys and values.
void LaunchLoad(const PagedSide &side, const at::Tensor &result, const PagedSide *value,
                const at::Tensor &value_result, const LoadPlan &plan, const LoadAddend &addend)
{
    KvCacheLoadTiling tiling = TileLoad(side, result, plan, addend.Kind(), value ? 2 : 1);
    at::Tensor scales[2] = {side.ForKernel(side.scale), {}};
    at::Tensor zeros[2] = {side.ForKernel(side.zero_point), {}};
    if (value != nullptr) {
        scales[1] = value->ForKernel(value->scale);
        zeros[1] = value->ForKernel(value->zero_point);
    }
    Launch("kv_cache_load", aclrtlaunch_kv_cache_load, tiling.cores, Address(side.cache),
           value ? Address(value->cache) : nullptr, Address(plan.tables), Address(plan.lengths),
           Address(scales[0]), Address(scales[1]), Address(zeros[0]), Address(zeros[1]),
           Address(addend.offset), Address(addend.rotary_table), Address(addend.positions),
           Address(result), value ? Address(value_result) : nullptr, tiling);
}

// Whether one launch reads both.
bool Alike(const PagedSide &key, const at::Tensor &key_result, const PagedSide &value,
           const at::Tensor &value_result)
{
    return key.kind == value.kind && key.Symmetric() == value.Symmetric() &&
           key.cache.scalar_type() == value.cache.scalar_type() &&
           key_result.scalar_type() == value_result.scalar_type();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> KvCacheLoadHost(
    const at::Tensor &key_cache, const at::Tensor &value_cache, const at::Tensor &block_tables,
    at::IntArrayRef kv_lengths, const OptionalTensor &key_scale, const OptionalTensor &value_scale,
    const OptionalTensor &key_zero_point, const OptionalTensor &value_zero_point,
    const OptionalTensor &key_offset, const OptionalTensor &rotary_table,
    const OptionalTensor &key_positions, std::optional<at::ScalarType> dtype)
{
    auto reference = [&](const char *reason) -> std::tuple<at::Tensor, at::Tensor> {
        auto results = CallReference("kv_cache_load", reason, key_cache, value_cache, block_tables,
                                     kv_lengths, key_scale, value_scale, key_zero_point,
                                     value_zero_point, key_offset, rotary_table, key_positions,
                                     dtype);
        return {results[0].toTensor(), results[1].toTensor()};
    };
    if (!HasKernels(key_cache.scalar_type()) || !HasKernels(value_cache.scalar_type())) {
        return reference(NO_KERNEL);
    }
    CheckCaches(key_cache, value_cache);
    PagedSide key_side = CheckSide("key", key_cache, key_scale, key_zero_point);
    PagedSide value_side = CheckSide("value", value_cache, value_scale, value_zero_point);
    CheckTables(block_tables, kv_lengths, key_cache);
    LoadPlan plan{block_tables.contiguous(), {}, CheckLengths("kv_lengths", kv_lengths)};
    CheckOffset(key_offset, rotary_table, key_positions, plan.longest, key_cache);
    CheckFloatType("dtype", dtype.value_or(at::kFloat));

    c10::DeviceGuard guard(key_cache.device());
    int64_t batch = block_tables.size(0);
    std::array<int64_t, 4> shape{batch, key_cache.size(1), plan.longest, key_cache.size(3)};
    auto make = [&](const at::Tensor &cache) {
        return at::empty(shape, cache.options().dtype(ResultType(cache, dtype)));
    };
    at::Tensor key = make(key_cache);
    at::Tensor value = make(value_cache);
    if (key.numel() == 0) {
        return {key, value};
    }
    LoadAddend addend;
    if (key_offset) {
        addend.offset = key_offset->to(at::kFloat).contiguous();
        addend.rotary_table = rotary_table->to(at::kFloat).contiguous();
        addend.positions = key_positions ? key_positions->contiguous() : at::Tensor();
    }
    const char *reason = WhyNoLoadKernel(key_side, key, plan, addend.Kind());
    if (reason == nullptr) {
        reason = WhyNoLoadKernel(value_side, value, plan, OFFSET_NONE);
    }
    if (reason != nullptr) {
        return reference(reason);
    }
    plan.lengths = ToDevice(kv_lengths, key_cache);
    if (Alike(key_side, key, value_side, value)) {
        LaunchLoad(key_side, key, &value_side, value, plan, addend);
    } else {
        LaunchLoad(key_side, key, nullptr, {}, plan, addend);
        LaunchLoad(value_side, value, nullptr, {}, plan, {});
    }
    return {key, value};
}

}  // namespace ascend_kv
