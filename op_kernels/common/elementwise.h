// Operations on every element of a tile. Only elements of the View are read and written, so that
// gaps between rows may hold anything.
#pragma once
#include "chunks.h"

namespace ascend_kv {

// Everything that the vector unit was told before is finished before what follows.
__aicore__ inline void VectorDone()
{
    PipeBarrier<PIPE_V>();
}

// Infinity and NaN stay what they are when results become half or bfloat16. The control bit may
// be off, and then they turn into the largest number and 0: a poisoned group would read as zeros.
__aicore__ inline void KeepInfinityAndNan()
{
    SetCtrlSpr<48, 48>(1);
}

template <RoundMode mode, typename D, typename S>
__aicore__ inline void CastTile(const LocalTensor<D> &dst, const LocalTensor<S> &src,
                                const View &view)
{
    if (view.Dense()) {
        Cast(dst, src, mode, view.Elements());
        return;
    }
    for (RowChunks c(view); c.Valid(); c.Next()) {
        Cast(dst[c.offset], src[c.offset], mode, c.mask, c.repeats,
             {1, 1, c.Step(sizeof(D)), c.Step(sizeof(S))});
    }
}

// half or bfloat16 to float, exactly.
template <typename T>
__aicore__ inline void ToFloat32(const LocalTensor<float> &dst, const LocalTensor<T> &src,
                                 const View &view)
{
    CastTile<RoundMode::CAST_NONE>(dst, src, view);
}

// float to half or bfloat16, to the nearest, half to even.
template <typename T>
__aicore__ inline void FromFloat32(const LocalTensor<T> &dst, const LocalTensor<float> &src,
                                   const View &view)
{
    CastTile<RoundMode::CAST_RINT>(dst, src, view);
}

// Repeat strides of instructions whose operands all lie as the tile does.
template <typename T>
__aicore__ inline UnaryRepeatParams Unary(const RowChunks &c)
{
    return {1, 1, c.Step(sizeof(T)), c.Step(sizeof(T))};
}

__aicore__ inline BinaryRepeatParams Binary(const RowChunks &c)
{
    uint8_t step = c.Step(sizeof(float));
    return {1, 1, 1, step, step, step};
}

__aicore__ inline void AbsTile(const LocalTensor<float> &dst, const LocalTensor<float> &src,
                               const View &view)
{
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Abs(dst[c.offset], src[c.offset], c.mask, c.repeats, Unary<float>(c));
    }
}

// Adding 0 copies and lets a NaN through, which a maximum with itself may not. -0 becomes 0.
__aicore__ inline void CopyTile(const LocalTensor<float> &dst, const LocalTensor<float> &src,
                                const View &view)
{
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Adds(dst[c.offset], src[c.offset], 0.0f, c.mask, c.repeats, Unary<float>(c));
    }
}

__aicore__ inline void ScaleTile(const LocalTensor<float> &dst, const LocalTensor<float> &src,
                                 float factor, const View &view)
{
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Muls(dst[c.offset], src[c.offset], factor, c.mask, c.repeats, Unary<float>(c));
    }
}

__aicore__ inline void ExpTile(const LocalTensor<float> &dst, const LocalTensor<float> &src,
                               const View &view)
{
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Exp(dst[c.offset], src[c.offset], c.mask, c.repeats, Unary<float>(c));
    }
}

// The two-operand instructions as types, so that one loop serves them all.
#define ASCEND_KV_BINARY(Name, Instruction)                                                      \
    struct Name {                                                                                \
        __aicore__ static inline void Run(const LocalTensor<float> &d,                           \
                                          const LocalTensor<float> &a,                           \
                                          const LocalTensor<float> &b, uint64_t mask,            \
                                          uint8_t repeats, const BinaryRepeatParams &params)     \
        {                                                                                        \
            Instruction(d, a, b, mask, repeats, params);                                         \
        }                                                                                        \
    }

ASCEND_KV_BINARY(AddOp, Add);
ASCEND_KV_BINARY(SubOp, Sub);
ASCEND_KV_BINARY(MulOp, Mul);
ASCEND_KV_BINARY(DivOp, Div);
ASCEND_KV_BINARY(MaxOp, Max);
ASCEND_KV_BINARY(MinOp, Min);
#undef ASCEND_KV_BINARY

// dst = a op b, element by element; the three have the same stride.
template <typename Op>
__aicore__ inline void ApplyTile(const LocalTensor<float> &dst, const LocalTensor<float> &a,
                                 const LocalTensor<float> &b, const View &view)
{
    for (RowChunks c(view); c.Valid(); c.Next()) {
        Op::Run(dst[c.offset], a[c.offset], b[c.offset], c.mask, c.repeats, Binary(c));
    }
}

// dst = a op its row's value; `by_row` holds one 32-byte block for each row, filled with it.
template <typename Op>
__aicore__ inline void ApplyByRow(const LocalTensor<float> &dst, const LocalTensor<float> &a,
                                  const LocalTensor<float> &by_row, const View &view)
{
    for (RowChunks c(view); c.Valid(); c.Next()) {
        uint8_t step = c.Step(sizeof(float));
        Op::Run(dst[c.offset], a[c.offset], by_row[c.row * FLOATS_PER_BLOCK], c.mask, c.repeats,
                {1, 1, 0, step, step, c.RowStep()});
    }
}

// dst = a op its column's value; `by_col` holds one float for each column.
template <typename Op>
__aicore__ inline void ApplyByCol(const LocalTensor<float> &dst, const LocalTensor<float> &a,
                                  const LocalTensor<float> &by_col, const View &view)
{
    for (RowChunks c(view); c.Valid(); c.Next()) {
        uint8_t step = c.Step(sizeof(float));
        Op::Run(dst[c.offset], a[c.offset], by_col[c.col], c.mask, c.repeats,
                {1, 1, 1, step, step, c.ColStep()});
    }
}

// tile = tile op other, element by element; the rows of `other` are `stride` elements apart.
template <typename Op>
__aicore__ inline void ApplyWith(const LocalTensor<float> &tile, const View &view,
                                 const LocalTensor<float> &other, uint32_t stride)
{
    for (RowChunks c(view); c.Valid(); c.Next()) {
        uint8_t step = c.Step(sizeof(float));
        uint8_t other_step = c.down ? stride / FLOATS_PER_BLOCK : step;
        Op::Run(tile[c.offset], tile[c.offset], other[c.row * stride + c.col], c.mask, c.repeats,
                {1, 1, 1, step, step, other_step});
    }
}

}  // namespace ascend_kv
