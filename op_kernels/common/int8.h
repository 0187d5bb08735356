// INT8 codes as ascend_kv/formats/int8.py defines them: values -> steps -> codes, and back.
#pragma once
#include "scales.h"

namespace ascend_kv {

// steps = (value - zero point) / scale -> codes. One rounding only: float to int32 to the nearest,
// half to even; int32 to half and half to int8 are exact once clamped. `steps` and `halves` may
// not overlap and are destroyed.
__aicore__ inline void RoundToCodes(const LocalTensor<int8_t> &codes,
                                    const LocalTensor<float> &steps,
                                    const LocalTensor<half> &halves, bool symmetric,
                                    const View &view)
{
    LocalTensor<int32_t> whole = steps.ReinterpretCast<int32_t>();
    CastTile<RoundMode::CAST_RINT>(whole, steps, view);
    VectorDone();
    SetDeqScale(static_cast<half>(1.0f));
    CastTile<RoundMode::CAST_NONE>(halves, whole, view);
    VectorDone();
    const half lowest = static_cast<half>(symmetric ? -127.0f : -128.0f);
    const half highest = static_cast<half>(127.0f);
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Maxs(halves[c.offset], halves[c.offset], lowest, c.mask, c.repeats, Unary<half>(c));
    }
    VectorDone();
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Mins(halves[c.offset], halves[c.offset], highest, c.mask, c.repeats, Unary<half>(c));
    }
    VectorDone();
    CastTile<RoundMode::CAST_TRUNC>(codes, halves, view);
    VectorDone();
}

// steps = (x - zero point) / factor, row r of all parts with the factor of group r.
__aicore__ inline void StepsByRow(const LocalTensor<float> &steps, const Scales &scales,
                                  const LocalTensor<float> &x, const RowGroups &groups)
{
    LocalTensor<float> shifted = x;
    if (!scales.Symmetric()) {
        for (uint32_t part = 0; part < groups.parts; ++part) {
            uint32_t at = part * groups.distance;
            ApplyByRow<SubOp>(steps[at], x[at], scales.zero_point_by_row, groups.view);
        }
        VectorDone();
        shifted = steps;
    }
    for (uint32_t part = 0; part < groups.parts; ++part) {
        uint32_t at = part * groups.distance;
        ApplyByRow<DivOp>(steps[at], shifted[at], scales.factor_by_row, groups.view);
    }
    VectorDone();
}

// The same, each column with its own factor and zero point.
__aicore__ inline void StepsByCol(const LocalTensor<float> &steps, const LocalTensor<float> &x,
                                  const LocalTensor<float> &factor,
                                  const LocalTensor<float> &zero_point, bool symmetric,
                                  const View &view)
{
    LocalTensor<float> shifted = x;
    if (!symmetric) {
        ApplyByCol<SubOp>(steps, x, zero_point, view);
        VectorDone();
        shifted = steps;
    }
    ApplyByCol<DivOp>(steps, shifted, factor, view);
    VectorDone();
}

// Steps that are infinite become NaN, and their codes 0: needed where scales are given, which may
// be 0 or next to it. (Found scales are 0 or large enough, and divisors deal with 0.)
__aicore__ inline void DropInfiniteSteps(const LocalTensor<float> &steps, const View &view)
{
    for (RowChunks c(Flat(view)); c.Valid(); c.Next()) {
        Axpy(steps[c.offset], steps[c.offset], 0.0f, c.mask, c.repeats, Unary<float>(c));
    }
    VectorDone();
}

// Codes -> float, exactly.
__aicore__ inline void CodesToFloat(const LocalTensor<float> &values,
                                    const LocalTensor<half> &halves,
                                    const LocalTensor<int8_t> &codes, const View &view)
{
    CastTile<RoundMode::CAST_NONE>(halves, codes, view);
    VectorDone();
    CastTile<RoundMode::CAST_NONE>(values, halves, view);
    VectorDone();
}

// values = codes * scale + zero point, in place, each row with its own.
__aicore__ inline void ValuesByRow(const LocalTensor<float> &values,
                                   const LocalTensor<float> &scale_by_row,
                                   const LocalTensor<float> &zero_point_by_row, bool symmetric,
                                   const View &view)
{
    ApplyByRow<MulOp>(values, values, scale_by_row, view);
    VectorDone();
    if (!symmetric) {
        ApplyByRow<AddOp>(values, values, zero_point_by_row, view);
        VectorDone();
    }
}

// The same, each column with its own.
__aicore__ inline void ValuesByCol(const LocalTensor<float> &values,
                                   const LocalTensor<float> &scale,
                                   const LocalTensor<float> &zero_point, bool symmetric,
                                   const View &view)
{
    ApplyByCol<MulOp>(values, values, scale, view);
    VectorDone();
    if (!symmetric) {
        ApplyByCol<AddOp>(values, values, zero_point, view);
        VectorDone();
    }
}

}  // namespace ascend_kv
