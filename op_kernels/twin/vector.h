// Element-wise vector instructions: two tensors, tensor and scalar, one tensor; in every calling
// form.
#pragma once
#include "tensor.h"

namespace twin {

template <typename T>
constexpr uint32_t kLanes = 256 / sizeof(T);
template <typename T, typename... Allowed>
constexpr bool kOneOf = (std::is_same_v<T, Allowed> || ...);

// Value of an element for arithmetic, and the element for a value, with the rounding of its type.
template <typename T>
auto Widen(T value) {
    if constexpr (std::is_same_v<T, half>) return HalfValue(value.bits);
    else if constexpr (std::is_same_v<T, bfloat16_t>) return BfloatValue(value.bits);
    else return value;
}
template <typename T, typename W>
T Narrow(W value) {
    if constexpr (std::is_same_v<T, half>) {
        T result;
        result.bits =
            HalfResult(static_cast<float>(value), Round::kRint, CoreRegisters().keeps_infinity);
        return result;
    } else {
        return static_cast<T>(value);
    }
}

// The elements of an operand, by repeat and lane.
template <typename T>
class Elements {
  public:
    explicit Elements(const Operand& o)
        : base_(Ub(o.view.address)), block_(o.block_stride), repeat_(o.repeat_stride) {}
    T Get(uint32_t repeat, uint32_t lane) const {
        T value;
        std::memcpy(&value, base_ + Offset(repeat, lane), sizeof(T));
        return value;
    }
    void Set(uint32_t repeat, uint32_t lane, T value) const {
        std::memcpy(base_ + Offset(repeat, lane), &value, sizeof(T));
    }

  private:
    static constexpr uint32_t kPerBlock = kBlock / sizeof(T);
    size_t Offset(uint32_t repeat, uint32_t lane) const {
        return (repeat * repeat_ + lane / kPerBlock * block_) * kBlock +
               lane % kPerBlock * sizeof(T);
    }
    uint8_t* base_;
    uint32_t block_, repeat_;
};

inline Lanes AnyLanes(At at, const char* op, uint64_t mask, Repeats repeats, uint32_t per_repeat) {
    return MaskLanes(at, op, mask, repeats, per_repeat);
}
inline Lanes AnyLanes(At at, const char* op, uint64_t* mask, Repeats repeats, uint32_t per_repeat) {
    return BitLanes(at, op, mask, repeats, per_repeat);
}

// fn(repeat, lane) for every active element; in counter mode everything is one long repeat.
template <typename F>
void ForLanes(const Lanes& lanes, F&& fn) {
    uint32_t repeats = lanes.counter ? 1 : lanes.repeats;
    uint32_t prefix = lanes.counter ? lanes.count : lanes.prefix;
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        for (uint32_t lane = 0; lane < prefix; ++lane) fn(repeat, lane);
        if (prefix == 0 && !lanes.counter) {
            for (uint32_t lane = 0; lane < 128; ++lane) {
                if (lanes.Has(lane)) fn(repeat, lane);
            }
        }
    }
}

template <typename T, typename U>
void Sources(Operand* o, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src0,
             const AscendC::LocalTensor<U>& src1, const AscendC::BinaryRepeatParams& p) {
    o[0] = {dst.TwinView(), sizeof(T), p.dstBlkStride, p.dstRepStride, true};
    o[1] = {src0.TwinView(), sizeof(U), p.src0BlkStride, p.src0RepStride};
    o[2] = {src1.TwinView(), sizeof(U), p.src1BlkStride, p.src1RepStride};
}

template <bool accumulates, typename T, typename F>
void Binary(const char* op, At at, const AscendC::LocalTensor<T>& dst,
            const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>& src1,
            const Lanes& lanes, const AscendC::BinaryRepeatParams& p, F fn) {
    Operand o[3];
    Sources(o, dst, src0, src1, p);
    o[2].accumulates =
        accumulates && !kOneOf<T, int16_t> && (p.dstRepStride == 0 || p.src1RepStride == 0);
    VectorInstruction(op, at, lanes, o, 3);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]), a(o[1]), b(o[2]);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) {
        d.Set(r, i, Narrow<T>(fn(Widen(a.Get(r, i)), Widen(b.Get(r, i)))));
    });
}

template <typename T, typename F>
void Unary(const char* op, At at, const AscendC::LocalTensor<T>& dst,
           const AscendC::LocalTensor<T>& src, const Lanes& lanes,
           const AscendC::UnaryRepeatParams& p, F fn) {
    Operand o[2] = {{dst.TwinView(), sizeof(T), p.dstBlkStride, p.dstRepStride, true},
                    {src.TwinView(), sizeof(T), p.srcBlkStride, p.srcRepStride}};
    VectorInstruction(op, at, lanes, o, 2);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]), a(o[1]);
    ForLanes(lanes,
             [&](uint32_t r, uint32_t i) { d.Set(r, i, Narrow<T>(fn(Widen(a.Get(r, i))))); });
}

inline float FusedOrNot(float a, float b, float c) {
    return Choice().fused ? std::fma(a, b, c) : a * b + c;
}

template <typename T, typename U>
void MultiplyAdd(At at, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src0,
                 const AscendC::LocalTensor<U>& src1, const Lanes& lanes,
                 const AscendC::BinaryRepeatParams& p) {
    static_assert(kOneOf<T, half, float> && kOneOf<U, half, T>,
                  "MulAddDst does not take these types on the A2");
    Operand o[4];
    Sources(o, dst, src0, src1, p);
    o[3] = o[0];
    o[3].write = false;
    VectorInstruction("MulAddDst", at, lanes, o, 4);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]);
    Elements<U> a(o[1]), b(o[2]);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) {
        d.Set(r, i,
              Narrow<T>(FusedOrNot(Widen(a.Get(r, i)), Widen(b.Get(r, i)), Widen(d.Get(r, i)))));
    });
}

template <typename T, typename U>
void ScaleAdd(At at, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src,
              U scale, const Lanes& lanes, const AscendC::UnaryRepeatParams& p) {
    static_assert(kOneOf<T, half, float> && kOneOf<U, half, T>,
                  "Axpy does not take these types on the A2");
    Operand o[3] = {{dst.TwinView(), sizeof(T), p.dstBlkStride, p.dstRepStride, true},
                    {src.TwinView(), sizeof(U), p.srcBlkStride, p.srcRepStride},
                    {dst.TwinView(), sizeof(T), p.dstBlkStride, p.dstRepStride}};
    VectorInstruction("Axpy", at, lanes, o, 3);
    if (lanes.Empty()) return;
    Elements<T> d(o[0]);
    Elements<U> a(o[1]);
    float factor = Widen(scale);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) {
        d.Set(r, i, Narrow<T>(FusedOrNot(Widen(a.Get(r, i)), factor, Widen(d.Get(r, i)))));
    });
}

// Larger and smaller of two, with the documentation's silence about NaN left to the launch's
// choice.
template <typename W>
W Extreme(bool largest, W a, W b) {
    if (a != a || b != b) return (a != a) == Choice().nan_wins ? a : b;
    return largest == (a > b) ? a : b;
}

}  // namespace twin

namespace AscendC {

// Every instruction exists as (count), (mask, repeats, strides) and (mask bits, repeats, strides).
#define TWIN_BINARY(NAME, ACCUMULATES, EXPRESSION, ...)                                           \
    template <typename T>                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,  \
              const int32_t& count, TWIN_AT) {                                                    \
        static_assert(twin::kOneOf<T, __VA_ARGS__>, #NAME " does not take this type on the A2");  \
        twin::Binary<ACCUMULATES>(#NAME, at, dst, src0, src1, twin::CountLanes(at, #NAME, count), \
                                  BinaryRepeatParams(),                                           \
                                  [](auto a, auto b) { return EXPRESSION; });                     \
    }                                                                                             \
    template <typename T, bool isSetMask = true, typename M>                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,  \
              M mask, const twin::Repeats repeatTime, const BinaryRepeatParams& repeatParams,     \
              TWIN_AT) {                                                                          \
        static_assert(isSetMask && twin::kOneOf<T, __VA_ARGS__>,                                  \
                      #NAME " does not take this type on the A2");                                \
        twin::Binary<ACCUMULATES>(#NAME, at, dst, src0, src1,                                     \
                                  twin::AnyLanes(at, #NAME, mask, repeatTime, twin::kLanes<T>),   \
                                  repeatParams, [](auto a, auto b) { return EXPRESSION; });       \
    }

#define TWIN_SCALAR(NAME, EXPRESSION, ...)                                                        \
    template <typename T, bool isSetMask = true>                                                  \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,         \
              const int32_t& count, TWIN_AT) {                                                    \
        static_assert(twin::kOneOf<T, __VA_ARGS__>, #NAME " does not take this type on the A2");  \
        auto b = twin::Widen(scalarValue);                                                        \
        twin::Unary(#NAME, at, dst, src, twin::CountLanes(at, #NAME, count), UnaryRepeatParams(), \
                    [b](auto a) { return EXPRESSION; });                                          \
    }                                                                                             \
    template <typename T, bool isSetMask = true, typename M>                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, M mask, \
              const twin::Repeats repeatTime, const UnaryRepeatParams& repeatParams, TWIN_AT) {   \
        static_assert(isSetMask && twin::kOneOf<T, __VA_ARGS__>,                                  \
                      #NAME " does not take this type on the A2");                                \
        auto b = twin::Widen(scalarValue);                                                        \
        twin::Unary(#NAME, at, dst, src,                                                          \
                    twin::AnyLanes(at, #NAME, mask, repeatTime, twin::kLanes<T>), repeatParams,   \
                    [b](auto a) { return EXPRESSION; });                                          \
    }

#define TWIN_UNARY(NAME, EXPRESSION, ...)                                                         \
    template <typename T>                                                                         \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count,         \
              TWIN_AT) {                                                                          \
        static_assert(twin::kOneOf<T, __VA_ARGS__>, #NAME " does not take this type on the A2");  \
        twin::Unary(#NAME, at, dst, src, twin::CountLanes(at, #NAME, count), UnaryRepeatParams(), \
                    [](auto a) { return EXPRESSION; });                                           \
    }                                                                                             \
    template <typename T, bool isSetMask = true, typename M>                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,                       \
              const twin::Repeats repeatTime, const UnaryRepeatParams& repeatParams, TWIN_AT) {   \
        static_assert(isSetMask && twin::kOneOf<T, __VA_ARGS__>,                                  \
                      #NAME " does not take this type on the A2");                                \
        twin::Unary(#NAME, at, dst, src,                                                          \
                    twin::AnyLanes(at, #NAME, mask, repeatTime, twin::kLanes<T>), repeatParams,   \
                    [](auto a) { return EXPRESSION; });                                           \
    }

TWIN_BINARY(Add, true, a + b, half, float, int16_t, int32_t)
TWIN_BINARY(Sub, true, a - b, half, float, int16_t, int32_t)
TWIN_BINARY(Mul, true, a* b, half, float, int16_t, int32_t)
TWIN_BINARY(Div, false, a / b, half, float)
TWIN_BINARY(Max, true, twin::Extreme(true, a, b), half, float, int16_t, int32_t)
TWIN_BINARY(Min, true, twin::Extreme(false, a, b), half, float, int16_t, int32_t)
TWIN_BINARY(And, false, a& b, int16_t, uint16_t)
TWIN_BINARY(Or, false, a | b, int16_t, uint16_t)

TWIN_SCALAR(Adds, a + b, half, float, int16_t, int32_t)
TWIN_SCALAR(Muls, a* b, half, float, int16_t, int32_t)
TWIN_SCALAR(Maxs, twin::Extreme(true, a, b), half, float, int16_t, int32_t)
TWIN_SCALAR(Mins, twin::Extreme(false, a, b), half, float, int16_t, int32_t)

TWIN_UNARY(Abs, std::fabs(a), half, float)
TWIN_UNARY(Exp, std::exp(a), half, float)
TWIN_UNARY(Ln, std::log(a), half, float)
TWIN_UNARY(Sqrt, std::sqrt(a), half, float)
TWIN_UNARY(Rsqrt, static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))), half, float)
TWIN_UNARY(Reciprocal, 1 / a, half, float)
TWIN_UNARY(Relu, a > 0 ? a : decltype(a)(0), half, float, int32_t)
TWIN_UNARY(Not, ~a, int16_t, uint16_t)

// dst = src0 * src1 + dst, dst = scalar * src + dst; half sources may feed a float result.
template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1,
               const int32_t& count, TWIN_AT) {
    twin::MultiplyAdd(at, dst, src0, src1, twin::CountLanes(at, "MulAddDst", count),
                      BinaryRepeatParams());
}
template <typename T, typename U, bool isSetMask = true>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1,
               uint64_t mask, const twin::Repeats repeatTime,
               const BinaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::MultiplyAdd(at, dst, src0, src1,
                      twin::MaskLanes(at, "MulAddDst", mask, repeatTime, twin::kLanes<T>),
                      repeatParams);
}
template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue,
          const int32_t& count, TWIN_AT) {
    twin::ScaleAdd(at, dst, src, scalarValue, twin::CountLanes(at, "Axpy", count),
                   UnaryRepeatParams());
}
template <typename T, typename U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, uint64_t mask,
          const twin::Repeats repeatTime, const UnaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::ScaleAdd(at, dst, src, scalarValue,
                   twin::MaskLanes(at, "Axpy", mask, repeatTime, twin::kLanes<T>), repeatParams);
}

#undef TWIN_BINARY
#undef TWIN_SCALAR
#undef TWIN_UNARY

}  // namespace AscendC
