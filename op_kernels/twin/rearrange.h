// Instructions that fill, spread and pick elements: Duplicate, CreateVecIndex, Brcb, Gather,
// GatherMask.
#pragma once
#include "vector.h"

namespace twin {
template <typename T>
void Fill(At at, const AscendC::LocalTensor<T>& dst, T value, const Lanes& lanes,
          uint32_t block_stride, uint32_t repeat_stride) {
    Operand o[1] = {{dst.TwinView(), sizeof(T), block_stride, repeat_stride, true}};
    VectorInstruction("Duplicate", at, lanes, o, 1);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) { d.Set(r, i, value); });
}
template <typename T>
constexpr bool kFillable = kOneOf<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>;
}  // namespace twin

namespace AscendC {

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, TWIN_AT) {
    static_assert(twin::kFillable<T>, "Duplicate does not take this type on the A2");
    twin::Fill(at, dst, scalarValue, twin::CountLanes(at, "Duplicate", count), 1, 8);
}
template <typename T, bool isSetMask = true, typename M>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, M mask,
               const twin::Repeats repeatTime, const uint16_t dstBlockStride,
               const uint8_t dstRepeatStride, TWIN_AT) {
    static_assert(isSetMask && twin::kFillable<T>, "Duplicate does not take this type on the A2");
    twin::Fill(at, dst, scalarValue,
               twin::AnyLanes(at, "Duplicate", mask, repeatTime, twin::kLanes<T>), dstBlockStride,
               dstRepeatStride);
}

// firstValue, firstValue + 1, ...
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, TWIN_AT) {
    static_assert(twin::kOneOf<T, half, float, int16_t, int32_t>,
                  "CreateVecIndex does not take this type on the A2");
    twin::Lanes lanes = twin::CountLanes(at, "CreateVecIndex", count);
    if (lanes.Empty()) return;
    twin::CreateIndexInstruction(at, dst.TwinView(), count, sizeof(T));
    twin::Elements<T> d(twin::Operand{dst.TwinView(), sizeof(T)});
    auto first = twin::Widen(firstValue);
    for (uint32_t i = 0; i < count; ++i)
        d.Set(0, i, twin::Narrow<T>(first + static_cast<decltype(first)>(i)));
}

// Each repeat takes 8 elements and fills a block of 32 bytes with each.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const twin::Repeats repeatTime,
          const BrcbRepeatParams& repeatParams, TWIN_AT) {
    static_assert(twin::kFillable<T>, "Brcb takes elements of 2 or 4 bytes");
    twin::BrcbInstruction(at, dst.TwinView(), src.TwinView(), repeatTime, repeatParams.dstBlkStride,
                          repeatParams.dstRepStride, sizeof(T));
}

// dst[i] = the element of src at byte srcBaseOffset + srcOffset[i].
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
            const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
            const uint32_t count, TWIN_AT) {
    static_assert(twin::kFillable<T>, "Gather takes elements of 2 or 4 bytes");
    twin::GatherInstruction(at, dst.TwinView(), src.TwinView(), srcOffset.TwinView(), srcBaseOffset,
                            twin::CountLanes(at, "Gather", count), 8, sizeof(T));
}
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
            const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
            const uint64_t mask, const twin::Repeats repeatTime, const uint16_t dstRepStride,
            TWIN_AT) {
    static_assert(twin::kFillable<T>, "Gather takes elements of 2 or 4 bytes");
    twin::GatherInstruction(at, dst.TwinView(), src.TwinView(), srcOffset.TwinView(), srcBaseOffset,
                            twin::MaskLanes(at, "Gather", mask, repeatTime, twin::kLanes<T>),
                            dstRepStride, sizeof(T));
}

// Keeps the elements that a built-in pattern names (1 even, 2 odd, 3 to 6 one of four, 7 all), side
// by side.
template <typename T>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern,
                const bool reduceMode, const uint32_t mask, const GatherMaskParams& params,
                uint64_t& rsvdCnt, TWIN_AT) {
    static_assert(twin::kFillable<T>, "GatherMask takes elements of 2 or 4 bytes");
    rsvdCnt = twin::GatherMaskInstruction(
        at, dst.TwinView(), src0.TwinView(), src1Pattern, reduceMode, mask, params.repeatTimes,
        params.src0BlockStride, params.src0RepeatStride, sizeof(T));
}

}  // namespace AscendC
