// kv_cache_store into an INT8 cache: scales of each token (and head), or given ones.
#pragma once
#include "../common/int8.h"
#include "../common/values.h"
#include "work.h"

namespace ascend_kv {

template <typename T>
class StoreQuantized {
public:
    __aicore__ inline StoreQuantized(TPipe &pipe, const StoreTensors &tensors,
                                     const KvCacheStoreTiling &tiling)
        : t_(tiling), tensors_(tensors)
    {
        uint32_t values = t_.tile_tokens * t_.tile_heads * t_.stride;
        tiles_.Init(pipe, values);
        pipe.InitBuffer(out_, BUFFERS, values);
        pipe.InitBuffer(scratch_, values * sizeof(float));
        bool given = t_.mode == STORE_STATIC;
        uint32_t width = t_.mode == STORE_TOKEN ? 1 : t_.tile_heads;
        uint32_t groups = given ? t_.tile_heads * t_.stride : t_.tile_tokens * width;
        scales_.Init(pipe, groups, t_.symmetric != 0, !given, given);
        if (given) {
            vectors_.Init(pipe, t_.dim, ONE_BUFFER);
        } else {
            InitWriters(pipe, width);
        }
        slots_.Init(pipe, tensors.slots, t_);
        if (t_.positions != 0) {
            positions_.Init(pipe, tensors.positions, tensors.key_positions, t_);
        }
    }

    __aicore__ inline void Process()
    {
        for (StoreSegments segments(t_, t_.mode == STORE_TOKEN); segments.Valid();) {
            segment_ = segments.Take();
            const StoreSide &side = tensors_.sides[segment_.side];
            source_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(side.values));
            rows_.Init(side.cache, t_);
            if (t_.mode == STORE_STATIC) {
                ReadScales(side);
            }
            for (int64_t at = segment_.first; at < segment_.last; at += t_.tile_tokens) {
                uint32_t count = Smaller<int64_t>(t_.tile_tokens, segment_.last - at);
                slots_.Load(at, count);
                if (t_.mode == STORE_TOKEN) {
                    TokenTile(at, count);
                } else {
                    HeadTile(at, count);
                }
                if (segment_.side == 0 && t_.positions != 0) {
                    positions_.Write(slots_, at, segment_.first_head, segment_.heads);
                }
            }
        }
    }

private:
    // A scale for each row of the tile, or given scales.
    __aicore__ inline void HeadTile(int64_t first, uint32_t count)
    {
        uint32_t heads = segment_.heads;
        LocalTensor<float> x = Load(first, count, segment_.first_head, heads);
        View rows{count * heads, Dim(), Stride()};
        if (t_.mode == STORE_STATIC) {
            StepsOfGiven(x, count);
            slots_.Wait();
        } else {
            FindExtremes(scales_, x, scratch_.Get<float>(), RowGroups(rows), false);
            FinishScales(rows.rows);
            StepsByRow(scratch_.Get<float>(), scales_, x, RowGroups(rows));
            slots_.Wait();
            WriteScales(heads, segment_.first_head);
        }
        WriteCodes(rows, segment_.first_head, heads);
    }

    // A scale for all heads of a token. Where a tile does not hold them they are read twice.
    __aicore__ inline void TokenTile(int64_t first, uint32_t count)
    {
        bool whole = t_.tile_heads == t_.heads;
        LocalTensor<float> x;
        for (int64_t head = 0; head < t_.heads; head += t_.tile_heads) {
            uint32_t heads = Smaller<int64_t>(t_.tile_heads, t_.heads - head);
            x = Load(first, count, head, heads);
            FindExtremes(scales_, x, scratch_.Get<float>(), Tokens(count, heads), head > 0);
            if (!whole) {
                tiles_.Release();
            }
        }
        FinishScales(count);
        slots_.Wait();
        WriteScales(1, 0);
        for (int64_t head = 0; head < t_.heads; head += t_.tile_heads) {
            uint32_t heads = Smaller<int64_t>(t_.tile_heads, t_.heads - head);
            if (!whole) {
                x = Load(first, count, head, heads);
            }
            StepsByRow(scratch_.Get<float>(), scales_, x, Tokens(count, heads));
            WriteCodes(View{count * heads, Dim(), Stride()}, head, heads);
        }
    }

    __aicore__ inline uint32_t Dim() const { return t_.dim; }
    __aicore__ inline uint32_t Stride() const { return t_.stride; }

    // One group for each token: one long row where nothing lies between the heads.
    __aicore__ inline RowGroups Tokens(uint32_t count, uint32_t heads) const
    {
        uint32_t width = heads * Stride();
        if (Dim() == Stride()) {
            return View{count, width, width};
        }
        return RowGroups(View{count, Dim(), width}, heads, Stride());
    }

    __aicore__ inline LocalTensor<float> Load(int64_t first, uint32_t count, int64_t first_head,
                                              uint32_t heads)
    {
        LocalTensor<T> tile = tiles_.Alloc();
        LoadTokens(tile, source_, t_, segment_.side, first, count, first_head, heads);
        tiles_.Loaded(tile);
        return tiles_.Values(View{count * heads, Dim(), Stride()});
    }

    __aicore__ inline void FinishScales(uint32_t groups)
    {
        scales_.FromExtremes(groups);
        scales_.FindDivisor(groups);
        scales_.FillRows(scales_.divisor, groups);
    }

    __aicore__ inline void InitWriters(TPipe &pipe, uint32_t width)
    {
        steps_.Init(pipe, t_.tile_tokens);
        scale_writer_.Init(pipe, t_, width);
        if (t_.symmetric == 0) {
            zero_point_writer_.Init(pipe, t_, width);
        }
    }

    // `width` scales of each token, to rows first_row and on of its block.
    __aicore__ inline void WriteScales(uint32_t width, int64_t first_row)
    {
        const StoreSide &side = tensors_.sides[segment_.side];
        int64_t rows = t_.mode == STORE_TOKEN ? 1 : t_.heads;
        scale_writer_.Stage(slots_, scales_.scale, steps_, width);
        scale_writer_.Write(slots_, side.scale, rows, first_row, 1);
        if (t_.symmetric == 0) {
            zero_point_writer_.Stage(slots_, scales_.zero_point, steps_, width);
            zero_point_writer_.Write(slots_, side.zero_point, rows, first_row, 1);
        }
    }

    __aicore__ inline void WriteCodes(const View &rows, int64_t first_head, uint32_t heads)
    {
        LocalTensor<int8_t> codes = out_.AllocTensor<int8_t>();
        RoundToCodes(codes, scratch_.Get<float>(), tiles_.Halves(), t_.symmetric != 0, rows);
        tiles_.Release();
        out_.EnQue(codes);
        codes = out_.DeQue<int8_t>();
        rows_.Write(slots_, codes, first_head, heads);
        out_.FreeTensor(codes);
    }

    // Given scales [N, D] of this segment's heads, in rows as the tile has them.
    __aicore__ inline void ReadScales(const StoreSide &side)
    {
        scale_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(side.scale));
        zero_point_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(side.zero_point));
        for (uint32_t head = 0; head < segment_.heads; ++head) {
            int64_t at = (segment_.first_head + head) * t_.dim;
            vectors_.Read(scales_.scale[head * Stride()], scale_[at], Dim());
            if (t_.symmetric == 0) {
                vectors_.Read(scales_.zero_point[head * Stride()], zero_point_[at], Dim());
            }
        }
    }

    __aicore__ inline void StepsOfGiven(const LocalTensor<float> &x, uint32_t count)
    {
        LocalTensor<float> steps = scratch_.Get<float>();
        RowGroups tokens = Tokens(count, segment_.heads);
        for (uint32_t part = 0; part < tokens.parts; ++part) {
            uint32_t at = part * tokens.distance;
            StepsByCol(steps[at], x[at], scales_.scale[at], scales_.zero_point[at],
                       t_.symmetric != 0, tokens.view);
        }
        DropInfiniteSteps(steps, tokens.All());
    }

    const KvCacheStoreTiling &t_;
    const StoreTensors &tensors_;
    StoreSegment segment_;
    GlobalTensor<T> source_;
    GlobalTensor<float> scale_;
    GlobalTensor<float> zero_point_;
    ValueTiles<T> tiles_;
    VectorsIn vectors_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> scratch_;
    Steps steps_;
    Scales scales_;
    SlotTile slots_;
    RowWriter<int8_t> rows_;
    ValueWriter<float> scale_writer_;
    ValueWriter<float> zero_point_writer_;
    PositionWriter positions_;
};

}  // namespace ascend_kv
