// One side (key or value) of the paged cache, for the host functions of store and load.
#pragma once
#include "checks.h"

namespace ascend_kv {

// Where the scales of an INT8 cache [K, N, S, D] lie.
enum class ScaleKind {
    NONE,        // a float cache
    TOKEN_HEAD,  // [K, N, S]
    TOKEN,       // [K, 1, S]
    GROUP,       // [K, N, S, D / g]
    BLOCK,       // [K, N, 1, D], K not 1
    STATIC,      // [1, N or 1, 1, D or 1]
};

struct PagedSide {
    const at::Tensor &cache;
    const OptionalTensor &scale;
    const OptionalTensor &zero_point;
    ScaleKind kind;

    bool Symmetric() const { return !zero_point.has_value(); }

    // Memory that a kernel can take as it is.
    bool IsContiguous() const
    {
        bool scales = kind == ScaleKind::STATIC ||
                      ((!scale || scale->is_contiguous()) &&
                       (!zero_point || zero_point->is_contiguous()));
        return cache.is_contiguous() && scales;
    }

    // A scale or zero point as kernels take it: static ones [N, D], written out.
    at::Tensor ForKernel(const OptionalTensor &values) const
    {
        if (!values) {
            return {};
        }
        if (kind != ScaleKind::STATIC) {
            return *values;
        }
        int64_t heads = cache.size(1);
        int64_t dim = cache.size(3);
        return values->expand({1, heads, 1, dim}).reshape({heads, dim}).contiguous();
    }
};

namespace paged {

inline ScaleKind KindOf(const char *field, const at::Tensor &scale, const at::Tensor &cache)
{
    int64_t blocks = cache.size(0);
    int64_t heads = cache.size(1);
    int64_t block_size = cache.size(2);
    int64_t dim = cache.size(3);
    ScaleKind kind = ScaleKind::NONE;
    if (scale.dim() == 3 && scale.size(0) == blocks && scale.size(2) == block_size) {
        kind = scale.size(1) == heads ? ScaleKind::TOKEN_HEAD
               : scale.size(1) == 1   ? ScaleKind::TOKEN
                                      : ScaleKind::NONE;
    } else if (scale.dim() == 4 && scale.size(0) != 1 && scale.size(2) == 1 && dim > 1 &&
               scale.size(3) == dim) {
        bool fits = scale.size(0) == blocks && scale.size(1) == heads;
        kind = fits ? ScaleKind::BLOCK : ScaleKind::NONE;
    } else if (scale.dim() == 4 && scale.size(3) != 1 && scale.size(3) != dim) {
        bool fits = scale.sizes().slice(0, 3) == cache.sizes().slice(0, 3) && scale.size(3) > 0 &&
                    dim % scale.size(3) == 0;
        kind = fits ? ScaleKind::GROUP : ScaleKind::NONE;
    } else if (scale.dim() == 4 && scale.size(0) == 1 && scale.size(2) == 1 &&
               (scale.size(1) == 1 || scale.size(1) == heads)) {
        kind = ScaleKind::STATIC;
    }
    ASCEND_KV_REQUIRE(kind != ScaleKind::NONE, field, scale.sizes(), "paged [", blocks, ", ", heads,
                      " or 1, ", block_size, "], grouped [", blocks, ", ", heads, ", ", block_size,
                      ", ", dim, " / group], by block [", blocks, ", ", heads, ", 1, ", dim,
                      "] or static [1, ", heads, " or 1, 1, ", dim, " or 1]");
    CheckType(field, scale, at::kFloat);
    CheckDevice(field, scale, cache);
    return kind;
}

}  // namespace paged

// `side`: "key" or "value".
inline PagedSide CheckSide(const std::string &side, const at::Tensor &cache,
                           const OptionalTensor &scale, const OptionalTensor &zero_point)
{
    std::string scale_field = side + "_scale";
    std::string zero_field = side + "_zero_point";
    if (cache.scalar_type() != at::kChar) {
        ASCEND_KV_REQUIRE(IsFloatType(cache.scalar_type()), side + "_cache", cache.scalar_type(),
                          "Char, Half, BFloat16, Float");
        ASCEND_KV_REQUIRE(!scale, scale_field, "a tensor", "None, the cache is not int8");
        ASCEND_KV_REQUIRE(!zero_point, zero_field, "a tensor", "None, the cache is not int8");
        return {cache, scale, zero_point, ScaleKind::NONE};
    }
    ASCEND_KV_REQUIRE(scale.has_value(), scale_field, "None", "a float32 tensor, the cache is int8");
    ScaleKind kind = paged::KindOf(scale_field.c_str(), *scale, cache);
    if (zero_point) {
        CheckShape(zero_field.c_str(), *zero_point, scale->sizes());
        CheckType(zero_field.c_str(), *zero_point, at::kFloat);
        CheckDevice(zero_field.c_str(), *zero_point, cache);
    }
    return {cache, scale, zero_point, kind};
}

inline void CheckCaches(const at::Tensor &key_cache, const at::Tensor &value_cache)
{
    CheckDim("key_cache", key_cache, 4, "[blocks, kv_heads, block_size, head_dim]");
    CheckShape("value_cache", value_cache, key_cache.sizes());
    CheckDevice("value_cache", value_cache, key_cache);
}

// Int32 [K, N, S], beside the cache.
inline void CheckKeyPositions(const OptionalTensor &positions, const at::Tensor &cache)
{
    if (positions) {
        CheckShape("key_positions", *positions, cache.sizes().slice(0, 3));
        CheckType("key_positions", *positions, at::kInt);
        CheckDevice("key_positions", *positions, cache);
    }
}

}  // namespace ascend_kv
