// Maximum, minimum and sum over the rows or columns of a float tile. All destroy the tile: they
// fold its second half onto the first until one vector repeat (or one row) is left.
#pragma once
#include "elementwise.h"

namespace ascend_kv {

struct MaxReduce {
    using Fold = MaxOp;
    __aicore__ static inline void Rows(const LocalTensor<float> &dst,
                                       const LocalTensor<float> &src, int32_t mask,
                                       int32_t repeats, int32_t blocks)
    {
        WholeReduceMax(dst, src, mask, repeats, 1, 1, blocks, ReduceOrder::ORDER_ONLY_VALUE);
    }
};

struct MinReduce {
    using Fold = MinOp;
    __aicore__ static inline void Rows(const LocalTensor<float> &dst,
                                       const LocalTensor<float> &src, int32_t mask,
                                       int32_t repeats, int32_t blocks)
    {
        WholeReduceMin(dst, src, mask, repeats, 1, 1, blocks, ReduceOrder::ORDER_ONLY_VALUE);
    }
};

struct SumReduce {
    using Fold = AddOp;
    __aicore__ static inline void Rows(const LocalTensor<float> &dst,
                                       const LocalTensor<float> &src, int32_t mask,
                                       int32_t repeats, int32_t blocks)
    {
        WholeReduceSum(dst, src, mask, repeats, 1, 1, blocks);
    }
};

// Folds every row to at most one vector repeat at its start; returns its width.
template <typename Reduce>
__aicore__ inline uint32_t FoldRows(const LocalTensor<float> &tile, const View &view)
{
    uint32_t width = view.cols;
    while (width > REPEAT_LANES) {
        uint32_t half = RoundUp(DivUp(width, 2u), REPEAT_LANES);
        ApplyTile<typename Reduce::Fold>(tile, tile, tile[half],
                                         View{view.rows, width - half, view.stride});
        VectorDone();
        width = half;
    }
    return width;
}

// dst[r] = the reduction of row r.
template <typename Reduce>
__aicore__ inline void ReduceRows(const LocalTensor<float> &dst, const LocalTensor<float> &tile,
                                  const View &view)
{
    uint32_t width = FoldRows<Reduce>(tile, view);
    uint32_t blocks = view.stride / FLOATS_PER_BLOCK;
    for (uint32_t row = 0; row < view.rows; row += MAX_REPEATS) {
        uint32_t repeats = Smaller(MAX_REPEATS, view.rows - row);
        Reduce::Rows(dst[row], tile[row * view.stride], width, repeats, blocks);
    }
    VectorDone();
}

// The first row of the tile = the reduction over all rows, column by column.
template <typename Reduce>
__aicore__ inline void ReduceCols(const LocalTensor<float> &tile, const View &view)
{
    uint32_t rows = view.rows;
    while (rows > 1) {
        uint32_t half = DivUp(rows, 2u);
        ApplyTile<typename Reduce::Fold>(tile, tile, tile[half * view.stride],
                                         Flat(View{rows - half, view.cols, view.stride}));
        VectorDone();
        rows = half;
    }
}

// The same into the first row of `dst`, which holds half the rows; the tile is kept.
template <typename Reduce>
__aicore__ inline void ReduceColsTo(const LocalTensor<float> &dst, const LocalTensor<float> &tile,
                                    const View &view)
{
    uint32_t half = DivUp(view.rows, 2u);
    uint32_t pairs = view.rows - half;
    if (pairs > 0) {
        ApplyTile<typename Reduce::Fold>(dst, tile, tile[half * view.stride],
                                         Flat(View{pairs, view.cols, view.stride}));
    }
    if (pairs < half) {
        uint32_t lone = pairs * view.stride;
        CopyTile(dst[lone], tile[lone], View{1, view.cols, view.stride});
    }
    VectorDone();
    ReduceCols<Reduce>(dst, {half, view.cols, view.stride});
}

// Folds `parts` tiles of the same View, `distance` elements apart, onto the first.
template <typename Reduce>
__aicore__ inline void FoldParts(const LocalTensor<float> &tile, const View &view,
                                 uint32_t parts, uint32_t distance)
{
    while (parts > 1) {
        uint32_t half = DivUp(parts, 2u);
        for (uint32_t part = 0; part + half < parts; ++part) {
            LocalTensor<float> first = tile[part * distance];
            ApplyTile<typename Reduce::Fold>(first, first, tile[(part + half) * distance], view);
        }
        VectorDone();
        parts = half;
    }
}

}  // namespace ascend_kv
