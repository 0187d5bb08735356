// Work where a scale spans tiles: the tiles of all groups numbered through, group by group.
#pragma once
#include "../common/int8.h"
#include "kv_cache_quantize_tiling.h"

namespace ascend_kv {

// A piece of a long group.
struct SpanItem {
    int64_t group;
    int64_t at;  // of the first value in x
    View view;

    __aicore__ inline RowGroups Groups() const { return view; }
    __aicore__ static inline uint32_t TileValues(const KvCacheQuantizeTiling &t)
    {
        return t.tile_cols;
    }
    // Scales of one group, and the place they take in the workspace.
    __aicore__ static inline uint32_t Scales(const KvCacheQuantizeTiling &) { return 1; }
    __aicore__ static inline uint32_t Lanes(const KvCacheQuantizeTiling &) { return 1; }

    __aicore__ static inline int64_t TilesAGroup(const KvCacheQuantizeTiling &t)
    {
        return DivUp<int64_t>(t.cols, t.tile_cols);
    }

    __aicore__ static inline SpanItem Of(const KvCacheQuantizeTiling &t, int64_t item)
    {
        int64_t group = item / TilesAGroup(t);
        int64_t start = item % TilesAGroup(t) * t.tile_cols;
        uint32_t values = Smaller<int64_t>(t.tile_cols, t.cols - start);
        return {group, group * t.cols + start, Line(values)};
    }
};

// Some rows of a [tokens, dim] matrix whose columns have a scale each.
struct ChannelItem {
    int64_t group;
    int64_t at;
    View view;

    __aicore__ inline ColumnGroups Groups() const { return {view}; }
    __aicore__ static inline uint32_t TileValues(const KvCacheQuantizeTiling &t)
    {
        return t.tile_rows * t.stride;
    }
    __aicore__ static inline uint32_t Scales(const KvCacheQuantizeTiling &t) { return t.cols; }
    __aicore__ static inline uint32_t Lanes(const KvCacheQuantizeTiling &t) { return t.stride; }

    __aicore__ static inline int64_t TilesAGroup(const KvCacheQuantizeTiling &t)
    {
        return DivUp<int64_t>(t.tokens, t.tile_rows);
    }

    __aicore__ static inline ChannelItem Of(const KvCacheQuantizeTiling &t, int64_t item)
    {
        int64_t group = item / TilesAGroup(t);
        int64_t row = item % TilesAGroup(t) * t.tile_rows;
        uint32_t rows = Smaller<int64_t>(t.tile_rows, t.tokens - row);
        return {group, (group * t.tokens + row) * t.cols,
                View{rows, static_cast<uint32_t>(t.cols), static_cast<uint32_t>(t.stride)}};
    }
};

template <typename Item>
__aicore__ inline Range ItemsOfCore(const KvCacheQuantizeTiling &t)
{
    return CoreRange(t.groups * Item::TilesAGroup(t), t.cores, GetBlockIdx(), 1);
}

}  // namespace ascend_kv
