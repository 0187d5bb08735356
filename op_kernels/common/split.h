// Integer arithmetic and the split of work over cores. Plain C++: tilings use it on the host,
// kernels on the device. A kernel includes kernel_operator.h before this.
#pragma once
#include <cstdint>

#ifndef __aicore__
#define __aicore__  // a host compiler
#endif

namespace ascend_kv {

template <typename T>
__aicore__ inline constexpr T DivUp(T a, T b)
{
    return (a + b - 1) / b;
}

template <typename T>
__aicore__ inline constexpr T RoundUp(T a, T b)
{
    return DivUp(a, b) * b;
}

template <typename T>
__aicore__ inline constexpr T RoundDown(T a, T b)
{
    return a / b * b;
}

template <typename T>
__aicore__ inline constexpr T Smaller(T a, T b)
{
    return a < b ? a : b;
}

template <typename T>
__aicore__ inline constexpr T Larger(T a, T b)
{
    return a > b ? a : b;
}

// Of positive numbers, the greatest.
template <typename T>
__aicore__ inline constexpr T CommonDivisor(T a, T b)
{
    while (b != 0) {
        T rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

struct Range {
    int64_t begin;
    int64_t end;
};

// The units that `core` of `cores` works on: contiguous, none missed, none twice, and as even as
// whole granules allow. A granule keeps what lies in one 32-byte sector on one core.
__aicore__ inline Range CoreRange(int64_t units, int64_t cores, int64_t core, int64_t granule)
{
    int64_t granules = DivUp(units, granule);
    int64_t base = granules / cores;
    int64_t extra = granules % cores;
    int64_t first = core * base + Smaller(core, extra);
    int64_t count = base + (core < extra ? 1 : 0);
    return {Smaller(first * granule, units), Smaller((first + count) * granule, units)};
}

// The same for `parts` of `units` each, part 0's units, then part 1's, ... Cores and parts fall into
// as many groups of their own as both can be cut into evenly, so that few cores share a part.
__aicore__ inline Range PartsRange(int64_t units, int64_t parts, int64_t cores, int64_t core)
{
    int64_t groups = CommonDivisor(parts, cores);
    int64_t members = cores / groups;
    int64_t group_units = parts / groups * units;
    Range range = CoreRange(group_units, members, core % members, 1);
    int64_t base = core / members * group_units;
    return {base + range.begin, base + range.end};
}

// The core whose CoreRange (with granule 1) holds `unit`.
__aicore__ inline int64_t CoreOf(int64_t units, int64_t cores, int64_t unit)
{
    int64_t base = units / cores;
    int64_t extra = units % cores;
    int64_t large = extra * (base + 1);
    return unit < large ? unit / (base + 1) : extra + (unit - large) / base;
}

}  // namespace ascend_kv
