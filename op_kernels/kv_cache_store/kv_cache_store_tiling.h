// How kv_cache_store cuts key and value [T, N, D] into work: sizes and device limits in, a struct
// out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// What becomes of the values.
enum StoreMode : int32_t {
    STORE_COPY = 0,    // the cache has their type
    STORE_CONVERT,     // the cache has another float type
    STORE_TOKEN_HEAD,  // INT8, a scale for each token and head
    STORE_TOKEN,       // INT8, a scale for each token
    STORE_STATIC,      // INT8, a given scale for each head and channel
};

struct KvCacheStoreTiling {
    int32_t mode;
    int32_t element;         // ElementType of key and value
    int32_t cache_element;   // ElementType of the caches
    int32_t symmetric;
    int32_t nz;              // caches [K, N, D / 32, S, 32], else [K, N, S, D]
    int32_t wide_slots;      // slot_mapping is int64, else int32
    int32_t positions;       // bytes of one position, 4 or 8; 0: key_positions is not written
    int32_t sides;           // 2: key and value. 1: key only
    int32_t cores;
    int32_t stride;          // elements from row to row in UB
    int32_t tile_tokens;     // 0: one head of one token is too large for UB
    int32_t tile_heads;
    int64_t tokens;
    int64_t heads;
    int64_t dim;
    int64_t block_size;
    int64_t token_stride[2]; // elements from token to token in key and in value
    int64_t ub_bytes;        // what the kernel allocates
};

#ifndef ASCEND_KV_ON_DEVICE

struct StoreSizes {
    int64_t tokens, heads, dim, block_size;
    int64_t key_stride, value_stride;
    StoreMode mode;
    ElementType element, cache_element;
    bool symmetric, nz, wide_slots;
    int64_t position_bytes;
    int64_t sides;
};

namespace store_tiling {

// UB of a tile of `tokens` with `heads` heads each; kv_cache_store_kernel.cpp's buffers.
inline int64_t TileBytes(const StoreSizes &s, int64_t tokens, int64_t heads)
{
    constexpr int64_t fixed = 1024;
    constexpr int64_t vectors = 6 * 4 + 1 + 2 * BLOCK_BYTES;  // common/int8.h, Scales
    int64_t rows = tokens * heads;
    int64_t values = rows * RoundUp(s.dim, ROW_ALIGNMENT);
    int64_t in = ElementBytes(s.element);
    int64_t out = ElementBytes(s.cache_element);
    int64_t bytes = fixed + RoundUp<int64_t>(tokens, 8) * 8;  // slots
    if (s.position_bytes != 0) {
        // moving in, as int32, and a block each moving out
        bytes += RoundUp<int64_t>(tokens, 8) * (s.position_bytes + 8 + BLOCK_BYTES);
    }
    if (s.mode == STORE_COPY) {
        return bytes + 2 * values * in;
    }
    if (s.mode == STORE_CONVERT) {
        return bytes + values * (2 * in + 4 + 2 * out);
    }
    // Two input tiles, two code tiles, float values and float scratch (float input: no values).
    bytes += values * (2 * in + 2 + (s.element == FLOAT ? 4 : 8));
    if (s.mode == STORE_STATIC) {
        return bytes + RoundUp(values / tokens, LANES) * 8 + RoundUp(s.dim, LANES) * 4;
    }
    int64_t groups = RoundUp(s.mode == STORE_TOKEN ? tokens : rows, LANES);
    int64_t staged = groups * BLOCK_BYTES * (s.symmetric ? 1 : 2);
    return bytes + groups * vectors + staged + RoundUp<int64_t>(tokens, 8) * 4;
}

// A core reads the static scales of all its heads, whatever its share of the tokens: few heads
// where there are few tokens, until scales are little beside values and codes.
inline int64_t StaticHeads(const StoreSizes &s, int64_t heads, int64_t cores)
{
    int64_t moved = s.sides * s.tokens * s.heads * (ElementBytes(s.element) + 1);
    int64_t scales = cores * (s.symmetric ? 4 : 8);
    while (heads > 1 && scales * heads * 32 > moved) {
        heads = DivUp<int64_t>(heads, 2);
    }
    return heads;
}

}  // namespace store_tiling

// No tokens give cores == 0: nothing to launch.
inline KvCacheStoreTiling TileKvCacheStore(const StoreSizes &s, const DeviceLimits &limits)
{
    using namespace store_tiling;
    KvCacheStoreTiling t{};
    if (s.tokens * s.heads * s.dim == 0) {
        return t;
    }
    t.mode = s.mode;
    t.element = s.element;
    t.cache_element = s.cache_element;
    t.symmetric = s.symmetric ? 1 : 0;
    t.nz = s.nz ? 1 : 0;
    t.wide_slots = s.wide_slots ? 1 : 0;
    t.positions = static_cast<int32_t>(s.position_bytes);
    t.sides = static_cast<int32_t>(s.sides);
    t.tokens = s.tokens;
    t.heads = s.heads;
    t.dim = s.dim;
    t.block_size = s.block_size;
    t.token_stride[0] = s.key_stride;
    t.token_stride[1] = s.value_stride;
    t.stride = static_cast<int32_t>(RoundUp(s.dim, ROW_ALIGNMENT));
    int64_t ub = UsableUb(limits);
    // All heads of a token together, or as few equal parts as fit; a token leaves in one copy.
    int64_t head_blocks = DivUp(t.stride * ElementBytes(s.cache_element), BLOCK_BYTES);
    int64_t most_heads = Smaller(s.heads, MAX_COPY_BLOCKS / head_blocks);
    int64_t fit = Largest(most_heads, [&](int64_t n) { return n > 0 && TileBytes(s, 1, n) <= ub; });
    if (fit == 0) {
        return t;
    }
    int64_t cores = Smaller(limits.cores, MAX_CORES);
    fit = s.mode == STORE_STATIC ? StaticHeads(s, fit, cores) : fit;
    t.tile_heads = static_cast<int32_t>(DivUp(s.heads, DivUp(s.heads, fit)));
    int64_t most_tokens = Smaller(s.tokens, MAX_COPY_BLOCKS);
    t.tile_tokens = static_cast<int32_t>(Largest(most_tokens, [&](int64_t n) {
        return n == 0 || TileBytes(s, n, t.tile_heads) <= ub;
    }));
    int64_t parts = s.mode == STORE_TOKEN ? 1 : DivUp<int64_t>(s.heads, t.tile_heads);
    int64_t units = s.sides * parts * s.tokens;
    t.cores = static_cast<int32_t>(Smaller(cores, units));
    t.ub_bytes = TileBytes(s, t.tile_tokens, t.tile_heads);
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::KvCacheStoreTiling;  // see common/limits.h
