// How kv_cache_quantize cuts x [B, N, T, D] into work: sizes and device limits in, a struct out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// Where the values that share a scale lie.
enum QuantizeMode : int32_t {
    QUANTIZE_ROWS = 0,   // side by side, and a tile holds them: one pass
    QUANTIZE_SPANS,      // side by side, many tiles and cores share the scale
    QUANTIZE_TOKENS,     // N pieces of D, T * D apart: the heads of one token
    QUANTIZE_CHANNELS,   // T values, D apart: one column of a [T, D] matrix
};

struct KvCacheQuantizeTiling {
    int32_t mode;
    int32_t element;      // ElementType of x
    int32_t symmetric;
    int32_t is_static;    // scales are given
    int32_t cores;
    // 1: kv_cache_quantize alone. 3: kv_cache_quantize_reduce (each core leaves the extremes of
    // its part in the workspace), kv_cache_quantize_scales, then kv_cache_quantize reads scales.
    int32_t passes;
    int64_t groups;       // ROWS: rows. SPANS, CHANNELS: scales or rows of scales. TOKENS: B
    int64_t heads;        // TOKENS
    int64_t tokens;       // TOKENS, CHANNELS
    int64_t cols;         // ROWS, SPANS: values of a group. TOKENS, CHANNELS: D
    int32_t stride;       // elements from row to row in UB
    int32_t tile_rows;    // ROWS: rows. TOKENS, CHANNELS: tokens. 0: D is too large for UB
    int32_t tile_cols;    // SPANS: values
    int32_t tile_heads;   // TOKENS
    int64_t granule;      // units that stay on one core, so that their scales fill sectors
    int64_t share;        // partial results a group can have in the workspace
    int64_t workspace_bytes;
    int64_t ub_bytes;     // what the kernel allocates
};

#ifndef ASCEND_KV_ON_DEVICE

// Values of [B, N, T, D] that share a scale, and how.
enum class Granularity : int32_t { LAYER = 0, HEAD, TOKEN, TOKEN_HEAD, CHANNEL, GROUP };

struct QuantizeSizes {
    int64_t batch, heads, tokens, dim;
    Granularity granularity;
    int64_t group_size;   // GROUP: divides dim
    ElementType element;
    bool symmetric;
    bool is_static;
};

namespace quantize_tiling {

// Two input tiles and two code tiles (double buffering), float values and float scratch. For
// float input the input tile is the float values, but twice as large.
constexpr int64_t VALUE_BYTES = 14;
// Of each scale: six floats and a bit (common/int8.h, Scales), two floats on their way in and two
// on their way out; where scales belong to rows, two blocks more.
constexpr int64_t COLUMN_BYTES = 6 * 4 + 1 + 4 * 4;
constexpr int64_t GROUP_BYTES = COLUMN_BYTES + 2 * BLOCK_BYTES;
constexpr int64_t FIXED_BYTES = 512;
// Below this, three launches cost more than the idle cores of one pass.
constexpr int64_t SMALL_TOTAL = 16 * 1024;
constexpr int64_t EXTREMES = 3;  // high, witness, low

// Rows that lie side by side in x do so in UB, if floats of each row start at a block; other rows
// are copied one by one to where also their int8 codes start at a block.
inline int32_t RowStride(int64_t cols)
{
    return static_cast<int32_t>(cols % 8 == 0 ? cols : RoundUp(cols, ROW_ALIGNMENT));
}

// Groups are rounded up to a vector repeat in UB.
inline int64_t TileBytes(int64_t values, int64_t groups)
{
    return values * VALUE_BYTES + RoundUp(groups, LANES) * GROUP_BYTES + FIXED_BYTES;
}

// Rows of `stride` values, one group each, that a tile holds.
inline int64_t MaxRows(int64_t ub, int64_t stride)
{
    int64_t rows = (ub - FIXED_BYTES - LANES * GROUP_BYTES) / (stride * VALUE_BYTES + GROUP_BYTES);
    return rows < 0 ? 0 : Smaller(rows >= 8 ? RoundDown<int64_t>(rows, 8) : rows, MAX_COPY_BLOCKS);
}

inline int64_t Granule(int64_t units, int64_t cores)
{
    constexpr int64_t per_sector = BLOCK_BYTES / 4;
    return units >= cores * per_sector * per_sector ? per_sector : 1;
}

// Tiles of all groups, numbered through, are dealt to cores; some groups lie on several.
inline void ShareGroups(KvCacheQuantizeTiling &t, int64_t tiles_a_group, int64_t lanes)
{
    int64_t items = t.groups * tiles_a_group;
    t.cores = static_cast<int32_t>(Smaller<int64_t>(t.cores, items));
    int64_t least = items / t.cores;
    t.share = Smaller<int64_t>(t.cores, DivUp(tiles_a_group, least) + 1);
    t.workspace_bytes = EXTREMES * t.groups * t.share * lanes * 4;
}

inline void TileRows(KvCacheQuantizeTiling &t, int64_t ub, int64_t rows, int64_t cols)
{
    t.mode = QUANTIZE_ROWS;
    t.groups = rows;
    t.cols = cols;
    t.stride = RowStride(cols);
    t.tile_rows = static_cast<int32_t>(MaxRows(ub, t.stride));
    t.cores = static_cast<int32_t>(Smaller<int64_t>(t.cores, rows));
    t.granule = Granule(rows, t.cores);
    t.ub_bytes = TileBytes(int64_t{t.tile_rows} * t.stride, t.tile_rows);
}

inline void TileSpans(KvCacheQuantizeTiling &t, int64_t ub, int64_t groups, int64_t span)
{
    int64_t max = RoundDown((ub - TileBytes(0, 1)) / VALUE_BYTES, LANES);
    t.mode = QUANTIZE_SPANS;
    t.passes = t.is_static != 0 ? 1 : 3;
    t.groups = groups;
    t.cols = span;
    t.tile_rows = 1;
    int64_t tile = DivUp(span, EvenTiles(groups, span, t.cores, max, 256));
    // Whole sectors, where rounding up takes no core's work away.
    t.tile_cols = static_cast<int32_t>(
        tile < BLOCK_BYTES * t.cores ? tile : Smaller(max, RoundUp(tile, BLOCK_BYTES)));
    t.stride = t.tile_cols;
    t.ub_bytes = TileBytes(t.tile_cols, 1);
    ShareGroups(t, DivUp<int64_t>(span, t.tile_cols), 1);
}

inline void TileTokens(KvCacheQuantizeTiling &t, int64_t ub, const QuantizeSizes &s)
{
    t.mode = QUANTIZE_TOKENS;
    t.groups = s.batch;
    t.heads = s.heads;
    t.tokens = s.tokens;
    t.cols = s.dim;
    t.stride = static_cast<int32_t>(RoundUp(s.dim, ROW_ALIGNMENT));
    int64_t rows = MaxRows(ub, t.stride);
    t.tile_heads = static_cast<int32_t>(Smaller(s.heads, rows));
    t.tile_rows = t.tile_heads == 0 ? 0
                  : static_cast<int32_t>(MaxRows(ub, int64_t{t.stride} * t.tile_heads));
    t.cores = static_cast<int32_t>(Smaller<int64_t>(t.cores, s.batch * s.tokens));
    t.granule = Granule(s.batch * s.tokens, t.cores);
    t.ub_bytes = TileBytes(int64_t{t.tile_rows} * t.tile_heads * t.stride, t.tile_rows);
}

inline int64_t ChannelBytes(int64_t rows, int64_t stride)
{
    return rows * stride * VALUE_BYTES + RoundUp(stride, LANES) * COLUMN_BYTES + FIXED_BYTES;
}

inline void TileChannels(KvCacheQuantizeTiling &t, int64_t ub, const QuantizeSizes &s)
{
    t.mode = QUANTIZE_CHANNELS;
    t.groups = s.batch * s.heads;
    t.tokens = s.tokens;
    t.cols = s.dim;
    t.stride = RowStride(s.dim);
    int64_t room = ub - ChannelBytes(0, t.stride);
    int64_t max = room < 0 ? 0 : Smaller(room / (t.stride * VALUE_BYTES), MAX_COPY_BLOCKS);
    bool one_tile = s.tokens <= max;
    bool enough_groups = t.groups >= t.cores || t.groups * s.tokens * s.dim <= SMALL_TOTAL;
    t.passes = s.is_static || (one_tile && enough_groups) ? 1 : 3;
    if (max == 0) {
        return;
    }
    bool whole = t.passes == 1 && !s.is_static;
    int64_t tiles = whole ? 1 : EvenTiles(t.groups, s.tokens, t.cores, max, 2);
    t.tile_rows = static_cast<int32_t>(DivUp(s.tokens, tiles));
    t.ub_bytes = ChannelBytes(t.tile_rows, t.stride);
    ShareGroups(t, DivUp<int64_t>(s.tokens, t.tile_rows), t.stride);
}

}  // namespace quantize_tiling

// Empty x gives cores == 0: nothing to launch.
inline KvCacheQuantizeTiling TileKvCacheQuantize(const QuantizeSizes &s, const DeviceLimits &limits)
{
    using namespace quantize_tiling;
    KvCacheQuantizeTiling t{};
    int64_t total = s.batch * s.heads * s.tokens * s.dim;
    if (total == 0) {
        return t;
    }
    t.element = s.element;
    t.symmetric = s.symmetric ? 1 : 0;
    t.is_static = s.is_static ? 1 : 0;
    t.cores = static_cast<int32_t>(Smaller(limits.cores, MAX_CORES));
    t.passes = 1;
    t.granule = 1;
    int64_t ub = UsableUb(limits);
    if (s.granularity == Granularity::TOKEN) {
        TileTokens(t, ub, s);
        return t;
    }
    if (s.granularity == Granularity::CHANNEL) {
        TileChannels(t, ub, s);
        return t;
    }
    int64_t span = s.granularity == Granularity::GROUP        ? s.group_size
                   : s.granularity == Granularity::TOKEN_HEAD ? s.dim
                   : s.granularity == Granularity::HEAD       ? s.tokens * s.dim
                                                              : s.heads * s.tokens * s.dim;
    int64_t groups = total / span;
    bool fits = MaxRows(ub, RoundUp(span, LANES)) > 0;
    bool spread = groups >= t.cores || total <= SMALL_TOTAL || span <= s.dim;
    if (fits && spread) {
        TileRows(t, ub, groups, span);
    } else {
        TileSpans(t, ub, groups, span);
    }
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::KvCacheQuantizeTiling;  // see common/limits.h
