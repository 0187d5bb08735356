// The arguments of kv_cache_store and the work of one core: tokens of one side (key or value) and
// a part of the heads at a time.
#pragma once
#include "positions.h"

namespace ascend_kv {

struct StoreSide {
    GM_ADDR values;      // [T, N, D]
    GM_ADDR cache;
    GM_ADDR scale;
    GM_ADDR zero_point;
};

struct StoreTensors {
    StoreSide sides[2];  // key, value
    GM_ADDR slots;
    GM_ADDR key_positions;
    GM_ADDR positions;
};

// Tokens first to last of one side, heads first_head and on.
struct StoreSegment {
    int32_t side;
    int64_t first_head;
    uint32_t heads;
    int64_t first;
    int64_t last;
};

// Walks the units (side, part of the heads, token) of this core in segments.
class StoreSegments {
public:
    __aicore__ inline StoreSegments(const KvCacheStoreTiling &tiling, bool all_heads)
        : t_(tiling), heads_(all_heads ? tiling.heads : tiling.tile_heads)
    {
        int64_t parts = t_.sides * DivUp(t_.heads, heads_);
        range_ = PartsRange(t_.tokens, parts, t_.cores, GetBlockIdx());
    }

    __aicore__ inline bool Valid() const { return range_.begin < range_.end; }

    __aicore__ inline StoreSegment Take()
    {
        int64_t parts = DivUp(t_.heads, heads_);
        int64_t part = range_.begin / t_.tokens;
        int64_t first = range_.begin % t_.tokens;
        int64_t last = Smaller(t_.tokens, first + range_.end - range_.begin);
        range_.begin += last - first;
        int64_t head = part % parts * heads_;
        uint32_t heads = Smaller(heads_, t_.heads - head);
        return {static_cast<int32_t>(part / parts), head, heads, first, last};
    }

private:
    const KvCacheStoreTiling &t_;
    int64_t heads_;
    Range range_;
};

// Heads `first_head` and on of `count` tokens: rows of `stride` in UB, token by token.
template <typename T>
__aicore__ inline void LoadTokens(const LocalTensor<T> &tile, const GlobalTensor<T> &values,
                                  const KvCacheStoreTiling &t, int32_t side, int64_t first,
                                  uint32_t count, int64_t first_head, uint32_t heads)
{
    int64_t token_stride = t.token_stride[side];
    int64_t at = first * token_stride + first_head * t.dim;
    uint32_t width = heads * t.stride;
    int64_t gap_bytes = (token_stride - heads * t.dim) * sizeof(T);
    if (t.dim == t.stride && gap_bytes <= UINT32_MAX) {
        LoadRows(tile, values[at], {count, width, width}, static_cast<uint32_t>(gap_bytes));
        return;
    }
    View rows{heads, static_cast<uint32_t>(t.dim), static_cast<uint32_t>(t.stride)};
    for (uint32_t token = 0; token < count; ++token) {
        LoadRows(tile[token * width], values[at + token * token_stride], rows);
    }
}

}  // namespace ascend_kv
