// Rounding to half, bfloat16 and integers in every mode of the device, without the host's own half
// types.
#include "cast.h"

namespace twin {

double WholeNumber(double value, Round mode) {
    switch (mode) {
        case Round::kRint: return std::nearbyint(value);
        case Round::kFloor: return std::floor(value);
        case Round::kCeil: return std::ceil(value);
        case Round::kAway: return std::round(value);
        case Round::kTrunc: return std::trunc(value);
        case Round::kOdd: break;  // an inexact result takes the neighbour with an odd last bit
    }
    double rounded = std::trunc(value);
    if (rounded != value && std::fmod(rounded, 2) == 0) rounded += value > 0 ? 1 : -1;
    return rounded;
}

double RoundToGrid(double value, int mantissa_bits, int min_exponent, Round mode) {
    if (value == 0 || !std::isfinite(value)) return value;
    int exponent = std::ilogb(value);
    if (exponent < min_exponent) exponent = min_exponent;
    double rounded = WholeNumber(std::ldexp(value, mantissa_bits - exponent), mode);
    return std::ldexp(std::copysign(rounded, value), exponent - mantissa_bits);
}

static uint32_t Bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float Value(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Whether a finite number beyond the largest one rounds to that instead of to infinity.
static bool BelowInfinity(float value, Round mode) {
    if (std::isinf(value)) return false;
    return mode == Round::kTrunc || mode == Round::kOdd ||
           mode == (value > 0 ? Round::kFloor : Round::kCeil);
}

uint16_t HalfBits(float value, Round mode) {
    uint32_t bits = Bits(value), magnitude = bits & 0x7fffffff;
    uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    if (mode == Round::kRint && magnitude >= 0x38800000 &&
        magnitude < 0x47000000) {  // the ordinary case, fast
        uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
    }
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    double rounded = std::fabs(RoundToGrid(value, 10, -14, mode));
    if (rounded >= 65536) return sign | (BelowInfinity(value, mode) ? 0x7bff : 0x7c00);
    if (rounded < std::ldexp(1.0, -14))
        return sign | static_cast<uint16_t>(std::ldexp(rounded, 24));
    int exponent = std::ilogb(rounded);
    return sign | static_cast<uint16_t>((exponent + 15) << 10) |
           (static_cast<uint16_t>(std::ldexp(rounded, 10 - exponent)) & 0x3ff);
}

float HalfValue(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f,
             mantissa = bits & 0x3ff;
    if (exponent == 0x1f) return Value(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return Value(sign | (exponent + 112) << 23 | mantissa << 13);
    float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
}

uint16_t BfloatBits(float value, Round mode) {
    uint32_t bits = Bits(value), magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(bits >> 16 & 0x8000) | 0x7fc0;
    if (mode == Round::kRint)
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    double rounded = RoundToGrid(value, 7, -126, mode);
    if (std::fabs(rounded) >= 0x1p128 && BelowInfinity(value, mode))
        return (bits >> 16 & 0x8000) | 0x7f7f;
    return static_cast<uint16_t>(Bits(static_cast<float>(rounded)) >> 16);
}

static uint16_t Saturate(uint16_t bits, uint16_t infinity) {
    uint16_t magnitude = bits & 0x7fff;
    if (magnitude < infinity) return bits;
    return magnitude == infinity ? bits - 1 : 0;
}
uint16_t HalfResult(float value, Round mode, bool keeps_infinity) {
    uint16_t bits = HalfBits(value, mode);
    return keeps_infinity ? bits : Saturate(bits, 0x7c00);
}
uint16_t BfloatResult(float value, Round mode, bool keeps_infinity) {
    uint16_t bits = BfloatBits(value, mode);
    return keeps_infinity ? bits : Saturate(bits, 0x7f80);
}

int64_t ToInteger(double value, Round mode, int64_t low, int64_t high) {
    if (std::isnan(value)) return 0;
    double rounded = std::isfinite(value) ? WholeNumber(value, mode) : value;
    if (rounded >= static_cast<double>(high)) return high;
    if (rounded <= static_cast<double>(low)) return low;
    return static_cast<int64_t>(rounded);
}

float ToFloat(int64_t value, Round mode) {
    uint64_t magnitude =
        value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
    int shift = 0;
    while (magnitude >> shift >= 1u << 24) ++shift;
    uint64_t kept = magnitude >> shift, rest = magnitude & ((1ull << shift) - 1),
             half = shift ? 1ull << (shift - 1) : 1;
    bool up = mode == Round::kRint    ? rest > half || (rest == half && (kept & 1))
              : mode == Round::kAway  ? rest >= half
              : mode == Round::kFloor ? value < 0 && rest
              : mode == Round::kCeil  ? value > 0 && rest
                                      : false;
    float result = std::ldexp(static_cast<float>(kept + up), shift);
    return value < 0 ? -result : result;
}

void CastModeViolation(At at, int mode) {
    Violate("cast-mode", at, "this pair of types has no rounding mode %d on the A2", mode);
}

}  // namespace twin
