// Host function of kv_cache_store.
#include "../host/device.h"
#include "../host/hosts.h"
#include "../host/paged.h"
#include "../host/reference.h"
#include "kv_cache_store_tiling.h"

#include "aclrtlaunch_kv_cache_store.h"

namespace ascend_kv {
namespace {

// New values [T, N, D] of one side, and where they go.
struct StoreJob {
    at::Tensor values;  // a token's N * D values lie together
    const PagedSide &side;

    StoreMode Mode() const
    {
        switch (side.kind) {
            case ScaleKind::NONE:
                return values.scalar_type() == side.cache.scalar_type() ? STORE_COPY : STORE_CONVERT;
            case ScaleKind::TOKEN_HEAD:
                return STORE_TOKEN_HEAD;
            case ScaleKind::TOKEN:
                return STORE_TOKEN;
            default:
                return STORE_STATIC;
        }
    }

    // Whether one launch stores both.
    bool Like(const StoreJob &other) const
    {
        return Mode() == other.Mode() && values.scalar_type() == other.values.scalar_type() &&
               side.cache.scalar_type() == other.side.cache.scalar_type() &&
               side.Symmetric() == other.side.Symmetric();
    }

    int64_t TokenStride() const
    {
        return values.size(0) == 1 ? values.size(1) * values.size(2) : values.stride(0);
    }
};

struct StorePlaces {
    at::Tensor slots;
    at::Tensor key_positions;  // not there: none are written
    at::Tensor positions;
};

void CheckNewTokens(const at::Tensor &key, const at::Tensor &value, const at::Tensor &slot_mapping,
                    const at::Tensor &cache)
{
    CheckDim("key", key, 3, "[tokens, kv_heads, head_dim]");
    CheckShape("key", key, {key.size(0), cache.size(1), cache.size(3)});
    CheckShape("value", value, key.sizes());
    CheckFloatType("key", key.scalar_type());
    CheckFloatType("value", value.scalar_type());
    CheckShape("slot_mapping", slot_mapping, {key.size(0)});
    CheckIndexType("slot_mapping", slot_mapping);
    CheckDevice("key", key, cache);
    CheckDevice("value", value, cache);
    CheckDevice("slot_mapping", slot_mapping, cache);
}

void CheckNewPositions(const OptionalTensor &key_positions, const OptionalTensor &positions,
                       const at::Tensor &cache, int64_t tokens)
{
    ASCEND_KV_REQUIRE(key_positions.has_value() == positions.has_value(),
                      key_positions ? "positions" : "key_positions", "None",
                      "a tensor: positions and key_positions come together");
    CheckKeyPositions(key_positions, cache);
    if (positions) {
        CheckShape("positions", *positions, {tokens});
        CheckIndexType("positions", *positions);
        CheckDevice("positions", *positions, cache);
    }
}

void CheckDynamic(const char *field, const PagedSide &side, bool dynamic)
{
    ASCEND_KV_REQUIRE(side.kind != ScaleKind::BLOCK, field, side.scale->sizes(),
                      "scales of tokens: those of a block are made of all of its tokens at once");
    ASCEND_KV_REQUIRE(!dynamic || side.kind != ScaleKind::STATIC, "dynamic", true, "False, ", field,
                      " is static, no slot has its own");
}

// The values as they are where the N * D of a token lie together, else a copy.
at::Tensor TokensTogether(const at::Tensor &values)
{
    int64_t row = values.size(1) * values.size(2);
    bool together = (values.size(2) == 1 || values.stride(2) == 1) &&
                    (values.size(1) == 1 || values.stride(1) == values.size(2)) &&
                    (values.size(0) == 1 || values.stride(0) >= row);
    return together ? values : values.contiguous();
}

const char *WhyNoStoreKernel(const PagedSide &side, bool dynamic)
{
    if (side.kind == ScaleKind::GROUP) {
        return "scales by group of channels";
    }
    if (!dynamic && (side.kind == ScaleKind::TOKEN || side.kind == ScaleKind::TOKEN_HEAD)) {
        return "static scales read at the slots";
    }
    return side.IsContiguous() ? nullptr : "a cache or scales that are not contiguous";
}

KvCacheStoreTiling TileStore(const StoreJob &job, const StoreJob &other, const StorePlaces &places,
                             int64_t sides)
{
    const at::Tensor &cache = job.side.cache;
    int64_t position_bytes = places.positions.defined() ? places.positions.element_size() : 0;
    return TileKvCacheStore({job.values.size(0), cache.size(1), cache.size(3), cache.size(2),
                             job.TokenStride(), other.TokenStride(), job.Mode(),
                             ElementOf(job.values.scalar_type()), ElementOf(cache.scalar_type()),
                             job.side.Symmetric(), false, places.slots.scalar_type() == at::kLong,
                             position_bytes, sides},
                            Limits());
}

// One launch: `key` alone, or with `value`.
void LaunchStore(const StoreJob &key, const StoreJob *value, const StorePlaces &places)
{
    KvCacheStoreTiling tiling = TileStore(key, value ? *value : key, places, value ? 2 : 1);
    at::Tensor scales[2] = {key.side.ForKernel(key.side.scale), {}};
    at::Tensor zeros[2] = {key.side.ForKernel(key.side.zero_point), {}};
    if (value != nullptr) {
        scales[1] = value->side.ForKernel(value->side.scale);
        zeros[1] = value->side.ForKernel(value->side.zero_point);
    }
    Launch("kv_cache_store", aclrtlaunch_kv_cache_store, tiling.cores, Address(key.values),
           value ? Address(value->values) : nullptr, Address(key.side.cache),
           value ? Address(value->side.cache) : nullptr, Address(places.slots), Address(scales[0]),
           Address(scales[1]), Address(zeros[0]), Address(zeros[1]), Address(places.key_positions),
           Address(places.positions), tiling);
}

}  // namespace

void KvCacheStoreHost(const at::Tensor &key, const at::Tensor &value, const at::Tensor &key_cache,
                      const at::Tensor &value_cache, const at::Tensor &slot_mapping,
                      const OptionalTensor &key_scale, const OptionalTensor &value_scale,
                      const OptionalTensor &key_zero_point, const OptionalTensor &value_zero_point,
                      const OptionalTensor &key_positions, const OptionalTensor &positions,
                      bool dynamic)
{
    if (!HasKernels(key_cache.scalar_type()) || !HasKernels(value_cache.scalar_type())) {
        CallReference("kv_cache_store", NO_KERNEL, key, value, key_cache, value_cache, slot_mapping,
                      key_scale, value_scale, key_zero_point, value_zero_point, key_positions,
                      positions, dynamic);
        return;
    }
    CheckCaches(key_cache, value_cache);
    PagedSide key_side = CheckSide("key", key_cache, key_scale, key_zero_point);
    PagedSide value_side = CheckSide("value", value_cache, value_scale, value_zero_point);
    CheckNewTokens(key, value, slot_mapping, key_cache);
    CheckDynamic("key_scale", key_side, dynamic);
    CheckDynamic("value_scale", value_side, dynamic);
    CheckNewPositions(key_positions, positions, key_cache, key.size(0));
    if (key.numel() == 0) {
        return;
    }

    c10::DeviceGuard guard(key_cache.device());
    StoreJob keys{TokensTogether(key), key_side};
    StoreJob values{TokensTogether(value), value_side};
    StorePlaces places{slot_mapping.contiguous(), key_positions.value_or(at::Tensor()),
                       positions ? positions->contiguous() : at::Tensor()};
    const char *reason = WhyNoStoreKernel(key_side, dynamic);
    if (reason == nullptr) {
        reason = WhyNoStoreKernel(value_side, dynamic);
    }
    if (reason == nullptr && key_positions && !key_positions->is_contiguous()) {
        reason = "a cache or scales that are not contiguous";
    }
    if (reason == nullptr && (TileStore(keys, keys, places, 1).tile_tokens == 0 ||
                              TileStore(values, values, places, 1).tile_tokens == 0)) {
        reason = "a token too large for the unified buffer";
    }
    if (reason != nullptr) {
        CallReference("kv_cache_store", reason, key, value, key_cache, value_cache, slot_mapping,
                      key_scale, value_scale, key_zero_point, value_zero_point, key_positions,
                      positions, dynamic);
        return;
    }
    if (keys.Like(values)) {
        LaunchStore(keys, &values, places);
    } else {
        LaunchStore(keys, nullptr, places);
        LaunchStore(values, nullptr, {places.slots, {}, {}});
    }
}

}  // namespace ascend_kv
