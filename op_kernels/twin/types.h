// Scalar types, enumerations and parameter structs of the Ascend C API, as far as the twin offers
// them. half and bfloat16_t hold bits; arithmetic on them happens in vector instructions, never in
// scalar code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define __inline__ inline
#define GM_ADDR __gm__ uint8_t*
#define ASCEND_IS_AIV constexpr(true)
#define ASCEND_IS_AIC constexpr(false)
#define KERNEL_TYPE_AIV_ONLY 1
#define KERNEL_TYPE_MIX_AIV_1_0 2
// Inside a kernel function only, as on the device.
#define KERNEL_TASK_TYPE_DEFAULT(type) twin::SetKernelType(type)

namespace twin {
// Round a finite value to `mantissa_bits` bits after the leading one, exponent at least
// `min_exponent`.
enum class Round : uint8_t { kRint, kFloor, kCeil, kAway, kTrunc, kOdd };
double WholeNumber(double value, Round mode);
double RoundToGrid(double value, int mantissa_bits, int min_exponent, Round mode);
uint16_t HalfBits(float value, Round mode = Round::kRint);  // overflows to infinity
// What an instruction leaves: with keeps_infinity off, infinity becomes the largest number and NaN
// zero.
uint16_t HalfResult(float value, Round mode, bool keeps_infinity);
uint16_t BfloatResult(float value, Round mode, bool keeps_infinity);
uint16_t BfloatBits(float value, Round mode = Round::kRint);
float HalfValue(uint16_t bits);
inline float BfloatValue(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
}  // namespace twin

struct half {
    uint16_t bits;
    half() = default;
    template <typename A, typename = std::enable_if_t<std::is_arithmetic_v<A>>>
    half(A value) : bits(twin::HalfBits(static_cast<float>(value))) {}
    explicit operator float() const { return twin::HalfValue(bits); }
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    // Only zero converts by itself (padding values); everything else goes through ToBfloat16.
    bfloat16_t(int zero) : bits(twin::BfloatBits(static_cast<float>(zero))) {}
};

enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum event_t {
    EVENT_ID0 = 0,
    EVENT_ID1,
    EVENT_ID2,
    EVENT_ID3,
    EVENT_ID4,
    EVENT_ID5,
    EVENT_ID6,
    EVENT_ID7
};

namespace AscendC {
using TEventID = int8_t;
enum class TPosition : uint8_t { GM, VECIN = 9, VECOUT, VECCALC };
using QuePosition = TPosition;
enum class HardEvent : uint8_t {
    MTE2_V,
    V_MTE2,
    MTE3_V,
    V_MTE3,
    V_V,
    MTE3_MTE2,
    MTE2_MTE3,
    S_V,
    V_S,
    S_MTE2,
    MTE2_S,
    S_MTE3,
    MTE3_S,
    MAX
};
enum class RoundMode : uint8_t {
    CAST_NONE = 0,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD
};
enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t {
    VSEL_CMPMASK_SPR = 0,
    VSEL_TENSOR_SCALAR_MODE,
    VSEL_TENSOR_TENSOR_MODE
};
enum class ReduceOrder : uint8_t {
    ORDER_VALUE_INDEX = 0,
    ORDER_INDEX_VALUE,
    ORDER_ONLY_VALUE,
    ORDER_ONLY_INDEX
};
enum class CacheMode {
    CACHE_MODE_DISABLE = 0,
    CACHE_MODE_NORMAL,
    CACHE_MODE_LAST,
    CACHE_MODE_PERSISTENT
};
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

constexpr uint16_t ONE_BLK_SIZE = 32;
constexpr int32_t DEFAULT_BLK_STRIDE = 1;
constexpr uint8_t DEFAULT_REPEAT_STRIDE = 8;
constexpr int32_t ONE_REPEAT_BYTE_SIZE = 256;
constexpr int32_t MAX_REPEAT_TIMES = 255;

struct DataCopyParams {
    DataCopyParams() {}
    DataCopyParams(uint16_t count, uint16_t len, uint16_t srcStrideIn, uint16_t dstStrideIn)
        : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
    uint16_t blockCount = 1;
    uint16_t blockLen = 0;
    union {
        uint16_t srcGap = 0;
        uint16_t srcStride;
    };
    union {
        uint16_t dstGap = 0;
        uint16_t dstStride;
    };
};
struct DataCopyExtParams {
    DataCopyExtParams() {}
    DataCopyExtParams(uint16_t count, uint32_t len, uint32_t srcStrideIn, uint32_t dstStrideIn,
                      uint32_t rsvIn)
        : blockCount(count),
          blockLen(len),
          srcStride(srcStrideIn),
          dstStride(dstStrideIn),
          rsv(rsvIn) {}
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;
    uint32_t srcStride = 0;
    uint32_t dstStride = 0;
    uint32_t rsv = 0;
};
template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() {}
    DataCopyPadExtParams(bool isPadIn, uint8_t left, uint8_t right, T value)
        : isPad(isPadIn), leftPadding(left), rightPadding(right), paddingValue(value) {}
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue = 0;
};
struct UnaryRepeatParams {
    UnaryRepeatParams() {}
    UnaryRepeatParams(uint16_t dstBlk, uint16_t srcBlk, uint8_t dstRep, uint8_t srcRep)
        : dstBlkStride(dstBlk), srcBlkStride(srcBlk), dstRepStride(dstRep), srcRepStride(srcRep) {}
    uint32_t blockNumber = 8;
    uint16_t dstBlkStride = 1;
    uint16_t srcBlkStride = 1;
    uint8_t dstRepStride = 8;
    uint8_t srcRepStride = 8;
};
struct BinaryRepeatParams {
    BinaryRepeatParams() {}
    BinaryRepeatParams(uint8_t dstBlk, uint8_t src0Blk, uint8_t src1Blk, uint8_t dstRep,
                       uint8_t src0Rep, uint8_t src1Rep)
        : dstBlkStride(dstBlk),
          src0BlkStride(src0Blk),
          src1BlkStride(src1Blk),
          dstRepStride(dstRep),
          src0RepStride(src0Rep),
          src1RepStride(src1Rep) {}
    uint32_t blockNumber = 8;
    uint8_t dstBlkStride = 1;
    uint8_t src0BlkStride = 1;
    uint8_t src1BlkStride = 1;
    uint8_t dstRepStride = 8;
    uint8_t src0RepStride = 8;
    uint8_t src1RepStride = 8;
};
struct BrcbRepeatParams {
    BrcbRepeatParams() {}
    BrcbRepeatParams(uint16_t dstBlk, uint16_t dstRep)
        : dstRepStride(dstRep), dstBlkStride(dstBlk) {}
    uint32_t blockNumber = 8;
    uint16_t dstRepStride = 8;
    uint16_t dstBlkStride = 1;
};
struct GatherMaskParams {
    GatherMaskParams() {}
    GatherMaskParams(uint8_t blockStride, uint16_t repeats, uint16_t repeatStride,
                     uint8_t patternStride)
        : src0BlockStride(blockStride),
          repeatTimes(repeats),
          src0RepeatStride(repeatStride),
          src1RepeatStride(patternStride) {}
    uint8_t src0BlockStride = 1;
    uint16_t repeatTimes = 0;
    uint16_t src0RepeatStride = 8;
    uint8_t src1RepeatStride = 8;
};
struct CopyRepeatParams {
    CopyRepeatParams() {}
    CopyRepeatParams(uint16_t dstStrideIn, uint16_t srcStrideIn, uint16_t dstRep, uint16_t srcRep)
        : dstStride(dstStrideIn),
          srcStride(srcStrideIn),
          dstRepeatSize(dstRep),
          srcRepeatSize(srcRep) {}
    uint16_t dstStride = 0;
    uint16_t srcStride = 0;
    uint16_t dstRepeatSize = 8;
    uint16_t srcRepeatSize = 8;
};

inline float ToFloat(const bfloat16_t& value) { return twin::BfloatValue(value.bits); }
inline bfloat16_t ToBfloat16(const float& value) {
    bfloat16_t result;
    result.bits = twin::BfloatBits(value);
    return result;
}
}  // namespace AscendC
