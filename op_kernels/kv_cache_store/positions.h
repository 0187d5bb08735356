// The positions of the tokens of a tile -> key_positions [K, N, S], the same for every head.
#pragma once
#include "slots.h"

namespace ascend_kv {

class PositionWriter {
public:
    __aicore__ inline void Init(TPipe &pipe, GM_ADDR positions, GM_ADDR key_positions,
                                const KvCacheStoreTiling &tiling)
    {
        wide_ = tiling.positions == sizeof(int64_t);
        heads_ = tiling.heads;
        uint32_t padded = RoundUp(static_cast<uint32_t>(tiling.tile_tokens), FLOATS_PER_BLOCK);
        positions32_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(positions));
        positions64_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t *>(positions));
        pipe.InitBuffer(in_, ONE_BUFFER, padded * tiling.positions);
        pipe.InitBuffer(values_, padded * sizeof(int32_t));
        Duplicate(values_.Get<int32_t>(), 0, padded);  // blocks are filled from whole blocks
        VectorDone();
        key_positions_ = key_positions;
        steps_.Init(pipe, tiling.tile_tokens);
        writer_.Init(pipe, tiling, 1);
    }

    // Tokens `first` and on, whose slots are loaded; heads `first_head` and on.
    __aicore__ inline void Write(SlotTile &slots, int64_t first, int64_t first_head,
                                 uint32_t heads)
    {
        uint32_t count = slots.Count();
        LocalTensor<int32_t> values = values_.Get<int32_t>();
        if (wide_) {
            LocalTensor<int64_t> moving = in_.AllocTensor<int64_t>();
            LoadRows(moving, positions64_[first], Line(count));
            in_.EnQue(moving);
            moving = in_.DeQue<int64_t>();
            Cast(values, moving, RoundMode::CAST_NONE, count);
            in_.FreeTensor(moving);
        } else {
            LocalTensor<int32_t> moving = in_.AllocTensor<int32_t>();
            LoadRows(moving, positions32_[first], Line(count));
            in_.EnQue(moving);
            moving = in_.DeQue<int32_t>();
            Adds(values, moving, 0, count);
            in_.FreeTensor(moving);
        }
        VectorDone();
        writer_.Stage(slots, values, steps_, 1);
        writer_.Write(slots, key_positions_, heads_, first_head, heads);
    }

private:
    bool wide_;
    int64_t heads_;
    GM_ADDR key_positions_;
    GlobalTensor<int32_t> positions32_;
    GlobalTensor<int64_t> positions64_;
    TQue<TPosition::VECIN, 1> in_;
    TBuf<TPosition::VECCALC> values_;
    Steps steps_;
    ValueWriter<int32_t> writer_;
};

}  // namespace ascend_kv
