// What a tiling must know about the device, and the element types by number.
// Plain C++, shared by host and kernels.
//
// A tiling struct has plain fields only, and a kernel's entry names it without its namespace: CANN
// writes what launches a kernel by copying `struct Name {...}` from the source to where nothing
// else of it is known. So each is made known outside the namespace too.
#pragma once
#include "split.h"

namespace ascend_kv {

// Number of an element type in a tiling struct.
enum ElementType : int32_t { HALF = 0, BFLOAT16 = 1, FLOAT = 2, INT8 = 3 };

__aicore__ inline constexpr int64_t ElementBytes(int32_t type)
{
    return type == INT8 ? 1 : type == FLOAT ? 4 : 2;
}

struct DeviceLimits {
    int64_t cores;     // vector cores, at most MAX_CORES are used
    int64_t ub_bytes;  // unified buffer of one vector core
};

constexpr int64_t MAX_CORES = 64;  // one partial result of each core fits one vector repeat
constexpr int64_t BLOCK_BYTES = 32;
constexpr int64_t LANES = 64;  // floats in one vector repeat
constexpr int64_t MAX_COPY_BLOCKS = 4095;
// Select keeps 8 KiB at the end of UB for itself; the rest of the margin is room to grow.
constexpr int64_t RESERVED_UB_BYTES = 16 * 1024;
// Rows of a tile start at multiples of this, so that they are 32-byte aligned as int8 too.
constexpr int64_t ROW_ALIGNMENT = 32;

__aicore__ inline constexpr int64_t UsableUb(const DeviceLimits &limits)
{
    return limits.ub_bytes - RESERVED_UB_BYTES;
}

}  // namespace ascend_kv
