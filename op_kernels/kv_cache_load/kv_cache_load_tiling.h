// How kv_cache_load cuts the dense result [B, N, P, D] into work: sizes and device limits in, a
// struct out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// How the stored values become the result.
enum LoadMode : int32_t {
    LOAD_COPY = 0,    // they have its type
    LOAD_CONVERT,     // they have another float type, or an offset is added
    LOAD_TOKEN_HEAD,  // INT8, a scale for each token and head
    LOAD_TOKEN,       // INT8, a scale for each token
    LOAD_STATIC,      // INT8, a given scale for each head and channel
};

// What is added to keys.
enum LoadOffset : int32_t {
    OFFSET_NONE = 0,
    OFFSET_IN_ORDER,      // R(n) * offset, token n at position n
    OFFSET_AT_POSITIONS,  // the same, at key_positions [K, N, S]
};

// A tile is some heads of tokens of one block. Tiles are numbered side, part of the heads,
// sequence, block, tile of the block; the last changes fastest. Core c takes c, c + cores, ...:
// each gets its share of long and of short sequences.
struct KvCacheLoadTiling {
    int32_t mode;
    int32_t element;        // ElementType of the result
    int32_t cache_element;  // ElementType of the caches
    int32_t symmetric;
    int32_t offset;         // LoadOffset, of keys
    int32_t nz;             // caches [K, N, D / 32, S, 32], else [K, N, S, D]
    int32_t wide_tables;    // block_tables is int64, else int32
    int32_t sides;          // 2: key and value. 1: key only
    int32_t cores;
    int32_t stride;         // elements from row to row in UB
    int32_t tile_tokens;    // the most a tile has; 0: one row is too large for UB
    int32_t tile_heads;
    int32_t tiles_a_block;  // as even as they can be
    int32_t alignment;      // of a tile's first token in its block
    int64_t batch;
    int64_t heads;
    int64_t dim;
    int64_t block_size;
    int64_t table_width;    // M, entries of a row of block_tables
    int64_t length;         // P, the longest sequence
    int64_t zeros;          // elements of the result in the buffer of zeros
    int64_t ub_bytes;       // what the kernel allocates
};

__aicore__ inline int64_t Parts(const KvCacheLoadTiling &t)
{
    return DivUp<int64_t>(t.heads, t.tile_heads);
}

__aicore__ inline int64_t Blocks(const KvCacheLoadTiling &t)
{
    return DivUp(t.length, t.block_size);
}

// Where tile `number` of a block starts in it; the last ends where the next would start.
__aicore__ inline int64_t TileStart(const KvCacheLoadTiling &t, int64_t number)
{
    int64_t tokens = Smaller(t.block_size, t.length);
    return number == t.tiles_a_block
               ? tokens
               : RoundDown<int64_t>(number * tokens / t.tiles_a_block, t.alignment);
}

#ifndef ASCEND_KV_ON_DEVICE

struct LoadSizes {
    int64_t batch, heads, dim, block_size, table_width, length;
    LoadMode mode;
    ElementType element, cache_element;
    bool symmetric, nz, wide_tables;
    LoadOffset offset;  // needs dim to be a multiple of 16
    int64_t sides;
};

namespace load_tiling {

constexpr int64_t ZERO_BYTES = 4096;

// UB of a tile of `tokens` with `heads` heads each; kv_cache_load_kernel.cpp's buffers.
inline int64_t TileBytes(const LoadSizes &s, int64_t tokens, int64_t heads)
{
    constexpr int64_t fixed = 1024 + ZERO_BYTES;
    int64_t stride = RoundUp(s.dim, ROW_ALIGNMENT);
    int64_t values = tokens * heads * stride;
    int64_t in = ElementBytes(s.cache_element);
    int64_t out = ElementBytes(s.element);
    if (s.mode == LOAD_COPY) {
        return fixed + 2 * values * in;
    }
    // Two stored tiles, two result tiles, halves between codes and floats, floats if not results.
    bool quantized = s.cache_element == INT8;
    int64_t bytes = fixed + values * (2 * in + (quantized ? 2 : 0) + 2 * out +
                                      (s.element == FLOAT ? 0 : 4));
    if (s.offset != OFFSET_NONE) {
        // A piece of the rotary table, cosine and sine, two products; the offset itself.
        bytes += tokens * s.dim * (4 + 4 + 4) + (heads + 1) * s.dim * 4;
        bytes += RoundUp<int64_t>(tokens, 8) * 8;  // positions
    }
    if (!quantized) {
        return bytes;
    }
    if (s.mode == LOAD_STATIC) {
        return bytes + RoundUp(heads * stride, LANES) * 8 + RoundUp(s.dim, LANES) * 4;
    }
    int64_t rows = s.mode == LOAD_TOKEN ? 1 : heads;
    int64_t groups = RoundUp(rows * RoundUp<int64_t>(tokens, 8), LANES);
    return bytes + groups * (2 * 4 + 1 + 2 * BLOCK_BYTES + 2 * 4);
}

}  // namespace load_tiling

// No tokens give cores == 0: nothing to launch.
inline KvCacheLoadTiling TileKvCacheLoad(const LoadSizes &s, const DeviceLimits &limits)
{
    using namespace load_tiling;
    KvCacheLoadTiling t{};
    if (s.batch * s.heads * s.length * s.dim == 0) {
        return t;
    }
    t.mode = s.mode;
    t.element = s.element;
    t.cache_element = s.cache_element;
    t.symmetric = s.symmetric ? 1 : 0;
    t.offset = s.offset;
    t.nz = s.nz ? 1 : 0;
    t.wide_tables = s.wide_tables ? 1 : 0;
    t.sides = static_cast<int32_t>(s.sides);
    t.batch = s.batch;
    t.heads = s.heads;
    t.dim = s.dim;
    t.block_size = s.block_size;
    t.table_width = s.table_width;
    t.length = s.length;
    t.stride = static_cast<int32_t>(RoundUp(s.dim, ROW_ALIGNMENT));
    t.zeros = ZERO_BYTES / ElementBytes(s.element);

    int64_t ub = UsableUb(limits);
    int64_t most_tokens = Smaller(Smaller(s.block_size, s.length), MAX_COPY_BLOCKS);
    int64_t fit = Largest(most_tokens, [&](int64_t n) { return n == 0 || TileBytes(s, n, 1) <= ub; });
    if (fit == 0) {
        return t;
    }
    // Several heads where they all fit with a whole block of tokens, else one.
    int64_t heads = Largest(s.heads, [&](int64_t n) {
        return n <= 1 || TileBytes(s, most_tokens, n) <= ub;
    });
    t.tile_heads = static_cast<int32_t>(DivUp(s.heads, DivUp(s.heads, heads)));
    int64_t cores = Smaller(limits.cores, MAX_CORES);
    int64_t blocks = s.sides * Parts(t) * s.batch * Blocks(t);
    t.tiles_a_block =
        static_cast<int32_t>(EvenTiles(blocks, most_tokens, cores, fit, 4));
    int64_t tile = DivUp<int64_t>(most_tokens, t.tiles_a_block);
    // Tiles that start with a whole sector of scales, where they can be a little longer for it.
    constexpr int64_t sector = 8;
    bool aligned = t.tiles_a_block > 1 && tile >= 4 * sector && tile + sector <= fit;
    t.alignment = static_cast<int32_t>(aligned ? sector : 1);
    t.tile_tokens = static_cast<int32_t>(aligned ? tile + sector : tile);
    t.cores = static_cast<int32_t>(Smaller(cores, blocks * t.tiles_a_block));
    t.ub_bytes = TileBytes(s, t.tile_tokens, t.tile_heads);
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::KvCacheLoadTiling;  // see common/limits.h
