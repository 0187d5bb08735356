// How kv_cache_dequantize cuts codes [B, N, T, D] into work: as kv_cache_quantize does with given
// scales. `element` is the type of the result. A tile takes 12 bytes a value there (codes moving
// in and values out in two buffers each, half and float in between), which its 14 cover.
#pragma once
#include "../kv_cache_quantize/kv_cache_quantize_tiling.h"

namespace ascend_kv {

using KvCacheDequantizeTiling = KvCacheQuantizeTiling;

#ifndef ASCEND_KV_ON_DEVICE

inline KvCacheDequantizeTiling TileKvCacheDequantize(QuantizeSizes sizes,
                                                     const DeviceLimits &limits)
{
    sizes.is_static = true;
    return TileKvCacheQuantize(sizes, limits);
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv
