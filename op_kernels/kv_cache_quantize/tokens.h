// A scale belongs to all heads of a token. A tile holds some tokens with all their heads, head by
// head; where one token's heads do not fit, some heads at a time, and they are read twice.
#pragma once
#include "tiles.h"

namespace ascend_kv {

template <typename T>
class QuantizeTokens : public QuantizeTiles<T> {
public:
    using QuantizeTiles<T>::QuantizeTiles;

    __aicore__ inline void Process(TPipe &pipe, const QuantizeTensors &tensors)
    {
        const KvCacheQuantizeTiling &t = this->t_;
        this->Init(pipe, tensors, t.tile_rows * t.tile_heads * t.stride, t.tile_rows);
        Range range = CoreRange(t.groups * t.tokens, t.cores, GetBlockIdx(), t.granule);
        for (int64_t token = range.begin; token < range.end;) {
            int64_t of_batch = (token / t.tokens + 1) * t.tokens;
            int64_t end = Smaller(Smaller(range.end, of_batch), token + t.tile_rows);
            Tile(token, this->Rows(end - token));
            token = end;
        }
    }

private:
    // Tokens `token` and on, numbered through all batches.
    __aicore__ inline void Tile(int64_t token, const View &view)
    {
        const KvCacheQuantizeTiling &t = this->t_;
        Scales &scales = this->scales_;
        LocalTensor<float> x;
        bool given = t.is_static != 0;
        if (given) {
            this->ReadScales(token, view.rows);
        } else {
            for (int64_t head = 0; head < t.heads; head += t.tile_heads) {
                x = LoadHeads(token, head, view);
                FindExtremes(scales, x, this->Scratch(), Heads(head, view), head > 0);
                if (t.tile_heads < t.heads) {
                    this->tiles_.Release();
                }
            }
            scales.FromExtremes(view.rows);
            this->WriteScales(token, view.rows);
            scales.FindDivisor(view.rows);
        }
        scales.FillRows(given ? scales.scale : scales.divisor, view.rows);
        for (int64_t head = 0; head < t.heads; head += t.tile_heads) {
            if (given || t.tile_heads < t.heads) {
                x = LoadHeads(token, head, view);
            }
            StepsByRow(this->Scratch(), scales, x, Heads(head, view));
            if (given) {
                DropInfiniteSteps(this->Scratch(), Heads(head, view).All());
            }
            StoreHeads(token, head, view);
        }
    }

    __aicore__ inline RowGroups Heads(int64_t first, const View &view) const
    {
        uint32_t heads = Smaller<int64_t>(this->t_.tile_heads, this->t_.heads - first);
        return RowGroups(view, heads, view.rows * view.stride);
    }

    __aicore__ inline int64_t At(int64_t token, int64_t head) const
    {
        const KvCacheQuantizeTiling &t = this->t_;
        int64_t batch = token / t.tokens;
        return ((batch * t.heads + head) * t.tokens + token % t.tokens) * t.cols;
    }

    __aicore__ inline LocalTensor<float> LoadHeads(int64_t token, int64_t first, const View &view)
    {
        RowGroups heads = Heads(first, view);
        LocalTensor<T> tile = this->tiles_.Alloc();
        for (uint32_t head = 0; head < heads.parts; ++head) {
            LoadRows(tile[head * heads.distance], this->x_[At(token, first + head)], view);
        }
        this->tiles_.Loaded(tile);
        return this->tiles_.Values(heads.All());
    }

    __aicore__ inline void StoreHeads(int64_t token, int64_t first, const View &view)
    {
        RowGroups heads = Heads(first, view);
        LocalTensor<int8_t> codes = this->RoundSteps(heads.All());
        for (uint32_t head = 0; head < heads.parts; ++head) {
            StoreRows(this->codes_[At(token, first + head)], codes[head * heads.distance], view);
        }
        this->out_.FreeTensor(codes);
    }
};

}  // namespace ascend_kv
