// DataCopy and DataCopyPad between global memory and the unified buffer, and within it.
#pragma once
#include "tensor.h"

namespace twin {
// Rows of `length` bytes; strides from the start of a row to the start of the next.
struct Rows {
    uint32_t count, length;
    uint64_t global_stride, local_stride;
};
struct Padding {  // bytes on either side of a row
    uint32_t left = 0, right = 0;
    const void* value = nullptr;  // null: whatever
};
enum ElementKind : uint8_t { kOther, kF32, kF16, kBf16, kI32, kI16, kI8 };
struct Element {
    uint32_t size;
    ElementKind kind;  // how an atomic store combines it
};
template <typename T>
constexpr Element ElementOf() {
    return {sizeof(T), std::is_same_v<T, float>        ? kF32
                       : std::is_same_v<T, half>       ? kF16
                       : std::is_same_v<T, bfloat16_t> ? kBf16
                       : std::is_same_v<T, int32_t>    ? kI32
                       : std::is_same_v<T, int16_t>    ? kI16
                       : std::is_same_v<T, int8_t>     ? kI8
                                                       : kOther};
}
// aligned: DataCopy, whose addresses and lengths are multiples of 32 bytes.
void CopyIn(At at, bool aligned, const View& local, const void* base, const void* global,
            const Rows& rows, const Padding& padding, Element element);
void CopyOut(At at, bool aligned, const void* base, void* global, const View& local,
             const Rows& rows, Element element);
void CopyLocal(At at, const View& to, const View& from, uint32_t count, uint32_t length,
               uint32_t to_stride, uint32_t from_stride);
}  // namespace twin

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p,
              TWIN_AT) {
    twin::Rows rows{p.blockCount, p.blockLen * 32u, (uint32_t{p.blockLen} + p.srcStride) * 32ull,
                    (uint32_t{p.blockLen} + p.dstStride) * 32ull};
    twin::CopyIn(at, true, dst.TwinView(), src.TwinBase(), src.TwinAddress(), rows, {},
                 twin::ElementOf<T>());
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p,
              TWIN_AT) {
    twin::Rows rows{p.blockCount, p.blockLen * 32u, (uint32_t{p.blockLen} + p.dstStride) * 32ull,
                    (uint32_t{p.blockLen} + p.srcStride) * 32ull};
    twin::CopyOut(at, true, dst.TwinBase(), dst.TwinAddress(), src.TwinView(), rows,
                  twin::ElementOf<T>());
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count,
              TWIN_AT) {
    twin::Rows rows{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0};
    twin::CopyIn(at, true, dst.TwinView(), src.TwinBase(), src.TwinAddress(), rows, {},
                 twin::ElementOf<T>());
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
              TWIN_AT) {
    twin::Rows rows{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0};
    twin::CopyOut(at, true, dst.TwinBase(), dst.TwinAddress(), src.TwinView(), rows,
                  twin::ElementOf<T>());
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p,
              TWIN_AT) {
    twin::CopyLocal(at, dst.TwinView(), src.TwinView(), p.blockCount, p.blockLen * 32u,
                    (uint32_t{p.blockLen} + p.dstStride) * 32,
                    (uint32_t{p.blockLen} + p.srcStride) * 32);
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, TWIN_AT) {
    twin::CopyLocal(at, dst.TwinView(), src.TwinView(), 1, static_cast<uint32_t>(count * sizeof(T)),
                    0, 0);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad, TWIN_AT) {
    twin::Padding padding{pad.leftPadding * uint32_t{sizeof(T)},
                          pad.rightPadding * uint32_t{sizeof(T)},
                          pad.isPad ? &pad.paddingValue : nullptr};
    uint64_t padded = uint64_t{p.blockLen} + padding.left + padding.right;
    twin::Rows rows{p.blockCount, p.blockLen, uint64_t{p.blockLen} + p.srcStride,
                    (padded + 31) / 32 * 32 + uint64_t{p.dstStride} * 32};
    twin::CopyIn(at, false, dst.TwinView(), src.TwinBase(), src.TwinAddress(), rows, padding,
                 twin::ElementOf<T>());
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p,
                 TWIN_AT) {
    twin::Rows rows{p.blockCount, p.blockLen, uint64_t{p.blockLen} + p.dstStride,
                    (uint64_t{p.blockLen} + 31) / 32 * 32 + uint64_t{p.srcStride} * 32};
    twin::CopyOut(at, false, dst.TwinBase(), dst.TwinAddress(), src.TwinView(), rows,
                  twin::ElementOf<T>());
}

}  // namespace AscendC
