// Cast: the pairs of types that the A2 converts, with the rounding modes each pair has. Others do
// not compile.
#pragma once
#include "vector.h"

namespace twin {

// Bit m set: RoundMode m is legal for U -> T. 0: the pair does not exist.
template <typename T, typename U>
constexpr uint32_t CastModes() {
    constexpr uint32_t none = 1, five = 0x3e, odd = 0x40;
    if constexpr (std::is_same_v<U, half>) {
        if (kOneOf<T, int8_t, uint8_t>) return none | five;
        if (kOneOf<T, int16_t, int32_t>) return five;
        if (kOneOf<T, float>) return none;
    } else if constexpr (kOneOf<U, int8_t, uint8_t>) {
        if (kOneOf<T, half>) return none;
    } else if constexpr (std::is_same_v<U, int16_t>) {
        if (kOneOf<T, half>) return none | five;
        if (kOneOf<T, float>) return none;
    } else if constexpr (std::is_same_v<U, bfloat16_t>) {
        if (kOneOf<T, float>) return none;
        if (kOneOf<T, int32_t>) return five;
    } else if constexpr (std::is_same_v<U, int32_t>) {
        if (kOneOf<T, float>) return none | five;
        if (kOneOf<T, half, int16_t, int64_t>) return none;
    } else if constexpr (std::is_same_v<U, int64_t>) {
        if (kOneOf<T, int32_t>) return none;
        if (kOneOf<T, float>) return five;
    } else if constexpr (std::is_same_v<U, float>) {
        if (kOneOf<T, half>) return none | five | odd;
        if (kOneOf<T, bfloat16_t, float, int16_t, int32_t, int64_t>) return five;
    }
    return 0;
}
void CastModeMissing()
    __attribute__((error("this pair of types has no such rounding mode on the A2")));
[[noreturn]] void CastModeViolation(At at, int mode);

inline Round RoundOf(AscendC::RoundMode mode) {
    switch (mode) {
        case AscendC::RoundMode::CAST_FLOOR: return Round::kFloor;
        case AscendC::RoundMode::CAST_CEIL: return Round::kCeil;
        case AscendC::RoundMode::CAST_ROUND: return Round::kAway;
        case AscendC::RoundMode::CAST_TRUNC: return Round::kTrunc;
        case AscendC::RoundMode::CAST_ODD: return Round::kOdd;
        default: return Round::kRint;
    }
}
int64_t ToInteger(double value, Round mode, int64_t low, int64_t high);  // saturates, NaN becomes 0
float ToFloat(int64_t value, Round mode);

template <typename T, typename U>
T Convert(U value, Round mode, const Registers& registers) {
    if constexpr (std::is_integral_v<T> && std::is_integral_v<U>) {
        constexpr int64_t high = static_cast<int64_t>(~0ull >> (65 - 8 * sizeof(T)));
        int64_t wide = value;
        return static_cast<T>(wide > high ? high : wide < -high - 1 ? -high - 1 : wide);
    } else if constexpr (std::is_integral_v<T>) {
        constexpr int64_t high =
            static_cast<int64_t>(~0ull >> (64 + std::is_signed_v<T> - 8 * sizeof(T)));
        return static_cast<T>(
            ToInteger(Widen(value), mode, std::is_signed_v<T> ? -high - 1 : 0, high));
    } else if constexpr (std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>) {
        float wide;
        if constexpr (std::is_same_v<U, int32_t>)
            wide = static_cast<float>(static_cast<double>(value) * registers.deq_scale);
        else wide = static_cast<float>(value);
        T result;
        result.bits = std::is_same_v<T, half> ? HalfResult(wide, mode, registers.keeps_infinity)
                                              : BfloatResult(wide, mode, registers.keeps_infinity);
        return result;
    } else if constexpr (std::is_integral_v<U>) {
        return ToFloat(value, mode);
    } else if constexpr (std::is_same_v<U, float>) {  // float to float rounds to a whole number
        return static_cast<float>(WholeNumber(value, mode));
    } else {
        return Widen(value);
    }
}

template <typename T, typename U>
void CastLanes(At at, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src,
               AscendC::RoundMode mode, const Lanes& lanes, const AscendC::UnaryRepeatParams& p) {
    if (!(CastModes<T, U>() >> (static_cast<int>(mode) & 31) & 1))
        CastModeViolation(at, static_cast<int>(mode));
    if constexpr (std::is_same_v<T, half> && std::is_same_v<U, int32_t>) {
        if (!CoreRegisters().has_deq_scale)
            Violate("deq-scale", at, "Cast from int32 to half before SetDeqScale");
    }
    Operand o[2] = {{dst.TwinView(), sizeof(T), p.dstBlkStride, p.dstRepStride, true},
                    {src.TwinView(), sizeof(U), p.srcBlkStride, p.srcRepStride}};
    VectorInstruction("Cast", at, lanes, o, 2);
    if (lanes.Empty()) return;
    Round round = RoundOf(mode);
    const Registers& registers = CoreRegisters();
    Elements<T> d(o[0]);
    Elements<U> a(o[1]);
    ForLanes(lanes, [&](uint32_t r, uint32_t i) {
        d.Set(r, i, Convert<T, U>(a.Get(r, i), round, registers));
    });
}
template <typename T, typename U>
constexpr uint32_t kCastLanes = 256 / (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));

}  // namespace twin

namespace AscendC {

#define TWIN_CAST_CHECK                                                                    \
    static_assert(twin::CastModes<T, U>() != 0, "the A2 has no Cast between these types"); \
    if (__builtin_constant_p(static_cast<int>(roundMode)) &&                               \
        !(twin::CastModes<T, U>() >> (static_cast<int>(roundMode) & 31) & 1)) {            \
        twin::CastModeMissing();                                                           \
    }

template <typename T, typename U>
__attribute__((always_inline)) inline void Cast(const LocalTensor<T>& dst,
                                                const LocalTensor<U>& src,
                                                const RoundMode& roundMode, const uint32_t count,
                                                TWIN_AT) {
    TWIN_CAST_CHECK
    twin::CastLanes(at, dst, src, roundMode, twin::CountLanes(at, "Cast", count),
                    UnaryRepeatParams());
}
template <typename T, typename U, bool isSetMask = true>
__attribute__((always_inline)) inline void Cast(const LocalTensor<T>& dst,
                                                const LocalTensor<U>& src,
                                                const RoundMode& roundMode, const uint64_t mask,
                                                const twin::Repeats repeatTime,
                                                const UnaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    TWIN_CAST_CHECK
    twin::CastLanes(at, dst, src, roundMode,
                    twin::MaskLanes(at, "Cast", mask, repeatTime, twin::kCastLanes<T, U>),
                    repeatParams);
}
template <typename T, typename U, bool isSetMask = true>
__attribute__((always_inline)) inline void Cast(const LocalTensor<T>& dst,
                                                const LocalTensor<U>& src,
                                                const RoundMode& roundMode, const uint64_t mask[],
                                                const twin::Repeats repeatTime,
                                                const UnaryRepeatParams& repeatParams, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    TWIN_CAST_CHECK
    twin::CastLanes(at, dst, src, roundMode,
                    twin::BitLanes(at, "Cast", mask, repeatTime, twin::kCastLanes<T, U>),
                    repeatParams);
}
#undef TWIN_CAST_CHECK

inline void SetDeqScale(half scale) {
    twin::CoreRegisters().has_deq_scale = true;
    twin::CoreRegisters().deq_scale = static_cast<float>(scale);
}

}  // namespace AscendC
