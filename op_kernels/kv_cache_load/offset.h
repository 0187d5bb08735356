// values += R(n) * offset: what stored keys lack, rotated to each key's position n. Channel c of
// the first half of a vector turns with channel c of the second half (rotate_half):
//
//     first  += offset_first * cos(n) - offset_second * sin(n)
//     second += offset_second * cos(n) + offset_first * sin(n)
#pragma once
#include "place.h"

namespace ascend_kv {

class RotatedOffset {
public:
    __aicore__ inline void Init(TPipe &pipe, const LoadTensors &tensors,
                                const KvCacheLoadTiling &tiling)
    {
        t_ = &tiling;
        half_ = tiling.dim / 2;
        uint32_t values = tiling.tile_tokens * tiling.dim;
        source_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.offset));
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.rotary_table));
        pipe.InitBuffer(queue_, ONE_BUFFER, values * sizeof(float));
        pipe.InitBuffer(cosine_, values / 2 * sizeof(float));
        pipe.InitBuffer(sine_, values / 2 * sizeof(float));
        pipe.InitBuffer(products_, values * sizeof(float));
        pipe.InitBuffer(offset_, tiling.tile_heads * tiling.dim * sizeof(float));
        vectors_.Init(pipe, tiling.dim, ONE_BUFFER);
        if (tiling.offset == OFFSET_AT_POSITIONS) {
            positions_.Init(pipe, tensors.key_positions, tiling.tile_tokens, false);
        }
    }

    __aicore__ inline void Add(const LocalTensor<float> &values, const LoadPlace &p)
    {
        ReadOffset(p);
        for (uint32_t head = 0; head < p.heads; ++head) {
            if (head == 0 || t_->offset == OFFSET_AT_POSITIONS) {
                LoadTable(p, head);
            }
            AddHead(values[head * p.valid * t_->stride], head, p.valid);
        }
    }

private:
    // Of the heads of the tile, read again only when those change.
    __aicore__ inline void ReadOffset(const LoadPlace &p)
    {
        if (p.first_head == loaded_) {
            return;
        }
        loaded_ = p.first_head;
        for (uint32_t head = 0; head < p.heads; ++head) {
            vectors_.Read(offset_.Get<float>()[head * t_->dim],
                          source_[(p.first_head + head) * t_->dim], t_->dim);
        }
    }

    // Cosine and sine of the tile's tokens, from rows of (cos, sin) pairs.
    __aicore__ inline void LoadTable(const LoadPlace &p, uint32_t head)
    {
        uint32_t dim = t_->dim;
        LocalTensor<float> rows = queue_.AllocTensor<float>();
        if (t_->offset == OFFSET_AT_POSITIONS) {
            int64_t row = p.block * t_->heads + p.first_head + head;
            positions_.Load(row * t_->block_size + p.in_block, p.valid);
            positions_.Wait();
            for (uint32_t token = 0; token < p.valid; ++token) {
                LoadRows(rows[token * dim], table_[positions_.Value(token) * dim], Line(dim));
            }
        } else {
            LoadRows(rows, table_[p.token * dim], Line(p.valid * dim));
        }
        queue_.EnQue(rows);
        rows = queue_.DeQue<float>();
        constexpr uint8_t even = 1;
        constexpr uint8_t odd = 2;
        uint64_t kept = 0;
        GatherMask(cosine_.Get<float>(), rows, even, true, p.valid * dim, {1, 1, 8, 0}, kept);
        GatherMask(sine_.Get<float>(), rows, odd, true, p.valid * dim, {1, 1, 8, 0}, kept);
        VectorDone();
        queue_.FreeTensor(rows);
    }

    __aicore__ inline void AddHead(const LocalTensor<float> &values, uint32_t head,
                                   uint32_t tokens)
    {
        LocalTensor<float> offset = offset_.Get<float>()[head * t_->dim];
        AddHalf<SubOp>(values, offset, offset[half_], tokens);
        AddHalf<AddOp>(values[half_], offset[half_], offset, tokens);
    }

    // values += with_cosine * cos (op) with_sine * sin, for one half of the channels.
    template <typename Op>
    __aicore__ inline void AddHalf(const LocalTensor<float> &values,
                                   const LocalTensor<float> &with_cosine,
                                   const LocalTensor<float> &with_sine, uint32_t tokens)
    {
        View view{tokens, half_, half_};
        LocalTensor<float> first = products_.Get<float>();
        LocalTensor<float> second = first[t_->tile_tokens * half_];
        ApplyByCol<MulOp>(first, cosine_.Get<float>(), with_cosine, view);
        ApplyByCol<MulOp>(second, sine_.Get<float>(), with_sine, view);
        VectorDone();
        ApplyTile<Op>(first, first, second, Flat(view));
        VectorDone();
        ApplyWith<AddOp>(values, {tokens, half_, static_cast<uint32_t>(t_->stride)}, first, half_);
        VectorDone();
    }

    const KvCacheLoadTiling *t_;
    uint32_t half_;
    int64_t loaded_ = -1;
    GlobalTensor<float> source_;
    GlobalTensor<float> table_;
    VectorsIn vectors_;
    IndexTile positions_;
    TQue<TPosition::VECIN, 1> queue_;
    TBuf<TPosition::VECCALC> cosine_;
    TBuf<TPosition::VECCALC> sine_;
    TBuf<TPosition::VECCALC> products_;
    TBuf<TPosition::VECCALC> offset_;
};

}  // namespace ascend_kv
