// INT8 scales as ascend_kv/formats/int8.py defines them: from the extremes of each group.
#pragma once
#include "reduce.h"

namespace ascend_kv {

// One float for each of up to `capacity` groups, and what follows from them.
class Scales {
public:
    LocalTensor<float> high;     // maximum of the group, of the magnitudes where symmetric
    LocalTensor<float> low;      // minimum of the group
    LocalTensor<float> witness;  // 0, or NaN where the group holds a NaN or an infinity
    LocalTensor<float> scale;
    LocalTensor<float> zero_point;
    LocalTensor<float> divisor;  // the scale, or infinity where it is 0 or NaN: codes are 0
    LocalTensor<float> factor_by_row;  // divisors or scales, each value fills one block
    LocalTensor<float> zero_point_by_row;

    // `by_row`: FillRows will be used. `given`: FromExtremes and FindDivisor will not.
    __aicore__ inline void Init(TPipe &pipe, uint32_t capacity, bool symmetric, bool by_row,
                                bool given)
    {
        symmetric_ = symmetric;
        uint32_t padded = RoundUp(capacity, REPEAT_LANES);
        uint32_t blocks = by_row ? padded * FLOATS_PER_BLOCK : 0;
        uint32_t vectors = given ? GIVEN_VECTORS : VECTORS;
        uint32_t floats = vectors * padded + 2 * blocks + FLOATS_PER_BLOCK;
        pipe.InitBuffer(buffer_, floats * sizeof(float) + RoundUp<uint32_t>(padded / 8, 32));
        LocalTensor<float> buffer = buffer_.Get<float>();
        scale = buffer;
        zero_point = buffer[padded];
        if (!given) {
            divisor = buffer[2 * padded];
            high = buffer[3 * padded];
            low = buffer[4 * padded];
            witness = buffer[5 * padded];
        }
        factor_by_row = buffer[vectors * padded];
        zero_point_by_row = factor_by_row[blocks];
        steps_ = zero_point_by_row[blocks];
        positive_ = steps_[FLOATS_PER_BLOCK].ReinterpretCast<uint8_t>();
        // Compares and Brcb read whole repeats and blocks, past the last group.
        Duplicate(buffer, 0.0f, vectors * padded);
        const float steps = symmetric ? 127.0f : 255.0f;
        Duplicate(steps_, steps, FLOATS_PER_BLOCK);
        VectorDone();
    }

    // high, low, witness -> scale, zero_point, for the first `count` groups.
    __aicore__ inline void FromExtremes(uint32_t count)
    {
        Divide(scale, high, count);
        if (!symmetric_) {
            Divide(divisor, low, count);
            VectorDone();
            Sub(scale, scale, divisor, count);
            VectorDone();
            Muls(zero_point, scale, 128.0f, count);
            VectorDone();
            Add(zero_point, low, zero_point, count);
            VectorDone();
            // A zero point beyond float poisons as well.
            Muls(divisor, zero_point, 0.0f, count);
            VectorDone();
            Add(witness, witness, divisor, count);
            VectorDone();
            Add(zero_point, zero_point, witness, count);
        }
        VectorDone();
        Add(scale, scale, witness, count);
        VectorDone();
    }

    // scale of FromExtremes -> divisor.
    __aicore__ inline void FindDivisor(uint32_t count)
    {
        const float infinity = 1.0f / 0.0f;
        Compares(positive_, scale, 0.0f, CMPMODE::GT, RoundUp(count, REPEAT_LANES));
        VectorDone();
        Select(divisor, positive_, scale, infinity, SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
        VectorDone();
    }

    // `factor` (divisor or scale) and zero_point -> one block for each group.
    __aicore__ inline void FillRows(const LocalTensor<float> &factor, uint32_t count)
    {
        FillBlocks(factor_by_row, factor, count);
        if (!symmetric_) {
            FillBlocks(zero_point_by_row, zero_point, count);
        }
        VectorDone();
    }

    // Each of `count` values fills one block.
    template <typename T>
    __aicore__ static inline void FillBlocks(const LocalTensor<T> &dst, const LocalTensor<T> &src,
                                             uint32_t count)
    {
        uint32_t pieces = DivUp(count, FLOATS_PER_BLOCK);
        for (uint32_t piece = 0; piece < pieces; piece += MAX_REPEATS) {
            uint32_t first = piece * FLOATS_PER_BLOCK;
            Brcb(dst[first * FLOATS_PER_BLOCK], src[first], Smaller(MAX_REPEATS, pieces - piece),
                 {1, 8});
        }
    }

    __aicore__ inline bool Symmetric() const { return symmetric_; }

private:
    // True division by 127 or 255: multiplying by the reciprocal would round twice.
    __aicore__ inline void Divide(const LocalTensor<float> &dst, const LocalTensor<float> &src,
                                  uint32_t count)
    {
        for (RowChunks c(View{1, count, count}); c.Valid(); c.Next()) {
            uint8_t step = c.Step(sizeof(float));
            Div(dst[c.offset], src[c.offset], steps_, c.mask, c.repeats, {1, 1, 0, step, step, 0});
        }
    }

    static constexpr uint32_t VECTORS = 6;
    static constexpr uint32_t GIVEN_VECTORS = 2;
    bool symmetric_;
    TBuf<TPosition::VECCALC> buffer_;
    LocalTensor<float> steps_;
    LocalTensor<uint8_t> positive_;
};

// A tile of `parts` equal Views, `distance` elements from one to the next: one after another, or
// row by row in turn. Row r of all parts is one group.
struct RowGroups {
    View view;
    uint32_t parts;
    uint32_t distance;

    __aicore__ inline RowGroups(const View &rows) : view(rows), parts(1), distance(rows.stride) {}
    __aicore__ inline RowGroups(const View &rows, uint32_t count, uint32_t apart)
        : view(rows), parts(count), distance(apart)
    {}

    __aicore__ inline View All() const
    {
        return {parts * view.rows, view.cols, Smaller(view.stride, distance)};
    }
    __aicore__ inline uint32_t Count() const { return view.rows; }

    template <typename Reduce>
    __aicore__ inline void Run(const LocalTensor<float> &dst, const LocalTensor<float> &tile) const
    {
        FoldParts<Reduce>(tile, view, parts, distance);
        ReduceRows<Reduce>(dst, tile, view);
    }
};

// A tile whose columns are the groups.
struct ColumnGroups {
    View view;

    __aicore__ inline View All() const { return view; }
    __aicore__ inline uint32_t Count() const { return view.cols; }

    template <typename Reduce>
    __aicore__ inline void Run(const LocalTensor<float> &dst, const LocalTensor<float> &tile) const
    {
        ReduceCols<Reduce>(tile, view);
        CopyTile(dst, tile, Line(view.cols));
        VectorDone();
    }
};

template <typename Reduce, typename Groups>
__aicore__ inline void ReduceGroups(const LocalTensor<float> &dst, const LocalTensor<float> &tile,
                                    const LocalTensor<float> &spare, const Groups &groups,
                                    bool merge)
{
    groups.template Run<Reduce>(merge ? spare : dst, tile);
    if (merge) {
        ApplyTile<typename Reduce::Fold>(dst, dst, spare, Line(groups.Count()));
        VectorDone();
    }
}

// `x` (kept) -> high, low and witness of its groups; `merge` counts in what they hold already.
// `scratch` is a tile to destroy.
template <typename Groups>
__aicore__ inline void FindExtremes(const Scales &scales, const LocalTensor<float> &x,
                                    const LocalTensor<float> &scratch, const Groups &groups,
                                    bool merge)
{
    const LocalTensor<float> &spare = scales.divisor;
    View view = groups.All();
    if (scales.Symmetric()) {
        AbsTile(scratch, x, view);
    } else {
        CopyTile(scratch, x, view);
        VectorDone();
        ReduceGroups<MinReduce>(scales.low, scratch, spare, groups, merge);
        CopyTile(scratch, x, view);
    }
    VectorDone();
    ReduceGroups<MaxReduce>(scales.high, scratch, spare, groups, merge);
    // 0 * x is 0 unless x is NaN or infinite; a maximum may or may not let a NaN through.
    ScaleTile(scratch, x, 0.0f, view);
    VectorDone();
    ReduceGroups<SumReduce>(scales.witness, scratch, spare, groups, merge);
}

}  // namespace ascend_kv
