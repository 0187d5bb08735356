// Compare, Compares and Select: masks of one bit an element.
#pragma once
#include "vector.h"

namespace twin {
inline bool Holds(AscendC::CMPMODE mode, float a, float b) {
    switch (mode) {
        case AscendC::CMPMODE::LT: return a < b;
        case AscendC::CMPMODE::GT: return a > b;
        case AscendC::CMPMODE::EQ: return a == b;
        case AscendC::CMPMODE::LE: return a <= b;
        case AscendC::CMPMODE::GE: return a >= b;
        default: return a != b;
    }
}
inline void SetBit(const View& mask, uint32_t bit, bool value) {
    uint8_t* byte = Ub(mask.address + bit / 8);
    *byte = static_cast<uint8_t>((*byte & ~(1 << bit % 8)) | value << bit % 8);
}
inline bool GetBit(const View& mask, uint32_t bit) {
    return *Ub(mask.address + bit / 8) >> bit % 8 & 1;
}

template <typename T>
void SelectLanes(At at, const AscendC::LocalTensor<T>& dst, const View& mask,
                 const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>* src1, T scalar,
                 AscendC::SELMODE mode, const Lanes& lanes, const AscendC::BinaryRepeatParams& p) {
    static_assert(kOneOf<T, half, float>, "Select takes half and float on the A2");
    bool same_mask = mode == AscendC::SELMODE::VSEL_CMPMASK_SPR;
    if ((mode == AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE) == (src1 != nullptr)) {
        Violate("select-mode", at, "Select in mode %d with %s", static_cast<int>(mode),
                src1 ? "two tensors" : "a scalar");
    }
    Operand o[3];
    Sources(o, dst, src0, src1 ? *src1 : src0, p);
    SelectInstruction(at, lanes, o, src1 ? 3 : 2, mask, same_mask, !same_mask);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]), a(o[1]), b(o[2]);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) {
        bool first = GetBit(mask, same_mask ? i % kLanes<T> : r * kLanes<T> + i);
        d.Set(r, i, first ? a.Get(r, i) : src1 ? b.Get(r, i) : scalar);
    });
}
}  // namespace twin

namespace AscendC {

template <typename T, typename U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
             CMPMODE cmpMode, uint32_t count, TWIN_AT) {
    static_assert(twin::kOneOf<T, half, float> && twin::kOneOf<U, uint8_t>,
                  "Compare: half or float to uint8 bits");
    twin::Lanes lanes = twin::CountLanes(at, "Compare", count);
    twin::Operand o[2] = {{src0.TwinView(), sizeof(T)}, {src1.TwinView(), sizeof(T)}};
    twin::CompareInstruction("Compare", at, lanes, o, 2, dst.TwinView());
    twin::Elements<T> a(o[0]), b(o[1]);
    for (uint32_t i = 0; i < count; ++i) {
        twin::SetBit(dst.TwinView(), i,
                     twin::Holds(cmpMode, twin::Widen(a.Get(0, i)), twin::Widen(b.Get(0, i))));
    }
}
template <typename T, typename U>
void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar,
              CMPMODE cmpMode, uint32_t count, TWIN_AT) {
    static_assert(twin::kOneOf<T, half, float> && twin::kOneOf<U, uint8_t>,
                  "Compares: half or float to uint8 bits");
    twin::Lanes lanes = twin::CountLanes(at, "Compares", count);
    twin::Operand o[1] = {{src0.TwinView(), sizeof(T)}};
    twin::CompareInstruction("Compares", at, lanes, o, 1, dst.TwinView());
    twin::Elements<T> a(o[0]);
    for (uint32_t i = 0; i < count; ++i) {
        twin::SetBit(dst.TwinView(), i,
                     twin::Holds(cmpMode, twin::Widen(a.Get(0, i)), twin::Widen(src1Scalar)));
    }
}

template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, TWIN_AT) {
    twin::SelectLanes<T>(at, dst, selMask.TwinView(), src0, &src1, T(0), selMode,
                         twin::CountLanes(at, "Select", count), BinaryRepeatParams());
}
template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            T src1, SELMODE selMode, uint32_t count, TWIN_AT) {
    twin::SelectLanes<T>(at, dst, selMask.TwinView(), src0, nullptr, src1, selMode,
                         twin::CountLanes(at, "Select", count), BinaryRepeatParams());
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint64_t mask,
            const twin::Repeats repeatTime, const BinaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::SelectLanes<T>(at, dst, selMask.TwinView(), src0, &src1, T(0), selMode,
                         twin::MaskLanes(at, "Select", mask, repeatTime, twin::kLanes<T>),
                         repeatParams);
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            T src1, SELMODE selMode, uint64_t mask, const twin::Repeats repeatTime,
            const BinaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::SelectLanes<T>(at, dst, selMask.TwinView(), src0, nullptr, src1, selMode,
                         twin::MaskLanes(at, "Select", mask, repeatTime, twin::kLanes<T>),
                         repeatParams);
}

}  // namespace AscendC
