// How hca_decompress cuts its entries into work: sizes and device limits in, a struct out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// An item is one entry, or a part of its copies where there are fewer entries than cores.
struct HcaDecompressTiling {
    int32_t element_bytes;
    int32_t cores;
    int32_t stride;       // elements from row to row in UB
    int32_t copies;       // of the row in UB, written at once; 0: the row is too large for UB
    int32_t parts;        // items an entry is cut into
    int64_t entries;
    int64_t dim;
    int64_t ratio;
    int64_t ub_bytes;
};

// The first copy of part `number`; the last part ends where the next would start.
__aicore__ inline int64_t PartStart(const HcaDecompressTiling &t, int64_t number)
{
    return number * t.ratio / t.parts;
}

#ifndef ASCEND_KV_ON_DEVICE

// No entries give cores == 0: nothing to launch.
inline HcaDecompressTiling TileHcaDecompress(int64_t entries, int64_t dim, int64_t ratio,
                                             int64_t element_bytes, const DeviceLimits &limits)
{
    constexpr int64_t MAX_COPIES = 16;
    HcaDecompressTiling t{};
    if (entries * dim == 0) {
        return t;
    }
    t.element_bytes = static_cast<int32_t>(element_bytes);
    t.entries = entries;
    t.dim = dim;
    t.ratio = ratio;
    t.stride = static_cast<int32_t>(RoundUp(dim, ROW_ALIGNMENT));
    int64_t row = t.stride * element_bytes;
    // Two rows moving in, two sets of copies moving out.
    int64_t copies = Largest(Smaller(MAX_COPIES, ratio), [&](int64_t n) {
        return n == 0 || 2 * row * (n + 1) <= UsableUb(limits);
    });
    t.copies = static_cast<int32_t>(copies);
    int64_t cores = Smaller(limits.cores, MAX_CORES);
    t.parts = static_cast<int32_t>(entries >= cores ? 1 : Smaller(ratio, DivUp(cores, entries)));
    t.cores = static_cast<int32_t>(Smaller(cores, entries * t.parts));
    t.ub_bytes = 2 * row * (copies + 1);
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::HcaDecompressTiling;  // see common/limits.h
