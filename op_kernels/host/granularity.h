// The shapes of the scales of [B, N, T, D], for the host functions of quantize and dequantize.
#pragma once
#include <array>

#include "../kv_cache_quantize/kv_cache_quantize_tiling.h"
#include "checks.h"

namespace ascend_kv {

struct GranularityShape {
    const char *name;
    Granularity granularity;
    bool kept[4];  // the dimensions along which scales differ
};

// From coarse to fine. A group is a part of D, so that D is kept in part.
constexpr GranularityShape GRANULARITIES[] = {
    {"layer", Granularity::LAYER, {true, false, false, false}},
    {"head", Granularity::HEAD, {true, true, false, false}},
    {"token", Granularity::TOKEN, {true, false, true, false}},
    {"token_head", Granularity::TOKEN_HEAD, {true, true, true, false}},
    {"channel", Granularity::CHANNEL, {true, true, false, true}},
    {"group", Granularity::GROUP, {true, true, true, true}},
};

inline void CheckGroupSize(int64_t group_size, int64_t dim)
{
    ASCEND_KV_REQUIRE(group_size > 0 && dim % group_size == 0, "group_size", group_size,
                      "a divisor of head_dim = ", dim);
}

// The shape of the scales of `sizes`.
inline std::array<int64_t, 4> ScaleShape(const GranularityShape &shape, at::IntArrayRef sizes,
                                         int64_t group_size)
{
    std::array<int64_t, 4> result{};
    for (size_t i = 0; i < 4; ++i) {
        result[i] = shape.kept[i] ? sizes[i] : 1;
    }
    if (shape.granularity == Granularity::GROUP) {
        result[3] = sizes[3] / group_size;
    }
    return result;
}

// A scale that broadcasts to `shape`, written out; not there if it was not.
inline at::Tensor WriteOut(const OptionalTensor &scale, at::IntArrayRef shape)
{
    return scale ? scale->expand(shape).contiguous() : at::Tensor();
}

// Why no kernel serves a tiling, or null.
inline const char *WhyNoQuantizeKernel(const KvCacheQuantizeTiling &t)
{
    bool fits = t.mode == QUANTIZE_SPANS ? t.tile_cols > 0 : t.tile_rows > 0;
    return fits ? nullptr : "head_dim too large for the unified buffer";
}

}  // namespace ascend_kv
