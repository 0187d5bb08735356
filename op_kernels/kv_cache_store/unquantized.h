// kv_cache_store into a float cache: the values as they are, or converted.
#pragma once
#include "work.h"

namespace ascend_kv {

// Tiles of T that leave as C. Of one type they pass through UB untouched.
template <typename T, typename C>
class StoreUnquantized {
public:
    __aicore__ inline StoreUnquantized(TPipe &pipe, const StoreTensors &tensors,
                                       const KvCacheStoreTiling &tiling)
        : t_(tiling), tensors_(tensors)
    {
        uint32_t values = t_.tile_tokens * t_.tile_heads * t_.stride;
        if constexpr (COPY) {
            pipe.InitBuffer(through_, BUFFERS, values * sizeof(T));
        } else {
            pipe.InitBuffer(in_, BUFFERS, values * sizeof(T));
            pipe.InitBuffer(out_, BUFFERS, values * sizeof(C));
            pipe.InitBuffer(floats_, values * sizeof(float));
        }
        slots_.Init(pipe, tensors.slots, t_);
        if (t_.positions != 0) {
            positions_.Init(pipe, tensors.positions, tensors.key_positions, t_);
        }
    }

    __aicore__ inline void Process()
    {
        for (StoreSegments segments(t_, false); segments.Valid();) {
            StoreSegment s = segments.Take();
            source_.SetGlobalBuffer(
                reinterpret_cast<__gm__ T *>(tensors_.sides[s.side].values));
            rows_.Init(tensors_.sides[s.side].cache, t_);
            for (int64_t first = s.first; first < s.last; first += t_.tile_tokens) {
                uint32_t count = Smaller<int64_t>(t_.tile_tokens, s.last - first);
                slots_.Load(first, count);
                Tile(s, first, count);
                if (s.side == 0 && t_.positions != 0) {
                    positions_.Write(slots_, first, s.first_head, s.heads);
                }
            }
        }
    }

private:
    static constexpr bool COPY = std::is_same_v<T, C>;

    __aicore__ inline void Tile(const StoreSegment &s, int64_t first, uint32_t count)
    {
        if constexpr (COPY) {
            LocalTensor<T> tile = through_.template AllocTensor<T>();
            LoadTokens(tile, source_, t_, s.side, first, count, s.first_head, s.heads);
            through_.EnQue(tile);
            tile = through_.template DeQue<T>();
            slots_.Wait();
            rows_.Write(slots_, tile, s.first_head, s.heads);
            through_.FreeTensor(tile);
        } else {
            LocalTensor<T> tile = in_.template AllocTensor<T>();
            LoadTokens(tile, source_, t_, s.side, first, count, s.first_head, s.heads);
            in_.EnQue(tile);
            LocalTensor<C> converted = Convert(View{
                count * s.heads, static_cast<uint32_t>(t_.dim), static_cast<uint32_t>(t_.stride)});
            slots_.Wait();
            rows_.Write(slots_, converted, s.first_head, s.heads);
            out_.FreeTensor(converted);
        }
    }

    __aicore__ inline LocalTensor<C> Convert(const View &view)
    {
        LocalTensor<T> tile = in_.template DeQue<T>();
        LocalTensor<C> converted = out_.template AllocTensor<C>();
        if constexpr (std::is_same_v<C, float>) {
            ToFloat32(converted, tile, view);
        } else if constexpr (std::is_same_v<T, float>) {
            FromFloat32(converted, tile, view);
        } else {
            LocalTensor<float> floats = floats_.Get<float>();
            ToFloat32(floats, tile, view);
            VectorDone();
            FromFloat32(converted, floats, view);
            VectorDone();  // the next tile writes the floats
        }
        in_.FreeTensor(tile);
        out_.EnQue(converted);
        return out_.template DeQue<C>();
    }

    const KvCacheStoreTiling &t_;
    const StoreTensors &tensors_;
    GlobalTensor<T> source_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through_;
    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> floats_;
    SlotTile slots_;
    RowWriter<C> rows_;
    PositionWriter positions_;
};

}  // namespace ascend_kv
