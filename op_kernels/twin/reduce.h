// Reductions: of a repeat, of a 32-byte block, of neighbours, of a whole tensor.
#pragma once
#include "vector.h"

namespace twin {

enum class Fold { kSum, kMax, kMin };

// The device adds neighbours, then neighbouring sums, and so on; inactive lanes count as nothing.
template <typename T>
T TreeSum(T* values, const bool* active, uint32_t number) {
    bool used[128];
    for (uint32_t i = 0; i < number; ++i) used[i] = active[i];
    for (uint32_t width = number; width > 1; width = (width + 1) / 2) {
        for (uint32_t i = 0; i < width / 2; ++i) {
            bool a = used[2 * i], b = used[2 * i + 1];
            T sum = a && b ? Narrow<T>(Widen(values[2 * i]) + Widen(values[2 * i + 1]))
                    : a    ? values[2 * i]
                           : values[2 * i + 1];
            values[i] = sum;
            used[i] = a || b;
        }
        if (width % 2) {
            values[width / 2] = values[width - 1];
            used[width / 2] = used[width - 1];
        }
    }
    return values[0];
}

// Whether b replaces a as the extreme. Ties keep the smaller index.
template <typename W>
bool Beats(Fold fold, W a, W b) {
    if (a != a || b != b) return Choice().nan_wins ? a == a : a != a && b == b;
    return fold == Fold::kMax ? b > a : b < a;
}

template <typename T>
T Load(const View& view, uint32_t offset) {
    T value;
    std::memcpy(&value, Ub(view.address + offset), sizeof(T));
    return value;
}
template <typename T>
void Store(const View& view, uint32_t offset, T value) {
    std::memcpy(Ub(view.address + offset), &value, sizeof(T));
}

struct ReduceShape {                   // where a reduction of repeats puts its results
    uint32_t groups, lanes_per_group;  // results of one repeat, and elements behind each
    uint32_t result_stride;            // bytes from one repeat's results to the next
    uint32_t alignment;
};

template <typename T>
void ReduceRepeats(const char* op, At at, const View& dst, const View& src, const Lanes& lanes,
                   uint32_t block_stride, uint32_t repeat_stride, const ReduceShape& shape,
                   Fold fold, AscendC::ReduceOrder order) {
    static_assert(kOneOf<T, half, float>, "the A2 reduces half and float only");
    constexpr uint32_t whole = kLanes<T>;
    if (dst.address % shape.alignment) {
        Violate("ub-alignment", at, "the result of %s starts at UB byte %u, not a multiple of %u",
                op, dst.address, shape.alignment);
    }
    Operand source{src, sizeof(T), block_stride, repeat_stride};
    bool index_only = order == AscendC::ReduceOrder::ORDER_ONLY_INDEX;
    bool both = order == AscendC::ReduceOrder::ORDER_VALUE_INDEX ||
                order == AscendC::ReduceOrder::ORDER_INDEX_VALUE;
    uint32_t result = fold == Fold::kSum || shape.groups > 1 ? sizeof(T)
                      : both                                 ? 2 * sizeof(T)
                      : index_only                           ? 4
                                                             : sizeof(T);
    ReduceInstruction(op, at, lanes, source, dst, shape.groups * result, shape.result_stride);
    Elements<T> elements(source);
    for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
        for (uint32_t group = 0; group < shape.groups; ++group) {
            T values[128];
            bool active[128];
            int32_t best = -1;
            for (uint32_t i = 0; i < shape.lanes_per_group; ++i) {
                uint32_t lane = group * shape.lanes_per_group + i;
                active[i] = lane < whole && lanes.Has(lane);
                if (!active[i]) continue;
                values[i] = elements.Get(repeat, lane);
                if (best < 0 || Beats(fold, Widen(values[best]), Widen(values[i])))
                    best = static_cast<int32_t>(i);
            }
            uint32_t to = repeat * shape.result_stride + group * static_cast<uint32_t>(sizeof(T));
            if (best < 0) {  // a block without active elements
                Store<T>(dst, to, T(0));
            } else if (fold == Fold::kSum) {
                Store<T>(dst, to, TreeSum(values, active, shape.lanes_per_group));
            } else if (shape.groups > 1 || order == AscendC::ReduceOrder::ORDER_ONLY_VALUE) {
                Store<T>(dst, to, values[best]);
            } else if (index_only) {
                Store<uint32_t>(dst, to, static_cast<uint32_t>(best));
            } else {
                bool value_first = order == AscendC::ReduceOrder::ORDER_VALUE_INDEX;
                Store<T>(dst, to + (value_first ? 0 : sizeof(T)), values[best]);
                uint32_t bits = static_cast<uint32_t>(best);
                std::memcpy(Ub(dst.address + to + (value_first ? sizeof(T) : 0)), &bits, sizeof(T));
            }
        }
    }
}

// Level 2: all of a tensor, through a scratch tensor. Index bits are relative to the whole tensor.
template <typename T>
void ReduceAll(const char* op, At at, const View& dst, const View& src, const View& scratch,
               int32_t count, Fold fold, bool index);

}  // namespace twin

namespace AscendC {

#define TWIN_WHOLE_EXTREME(NAME, FOLD)                                                          \
    template <typename T, bool isSetMask = true>                                                \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,         \
              const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride, \
              const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,   \
              TWIN_AT) {                                                                        \
        static_assert(isSetMask, "the twin sets the mask of every instruction");                \
        uint32_t unit = order == ReduceOrder::ORDER_ONLY_VALUE   ? sizeof(T)                    \
                        : order == ReduceOrder::ORDER_ONLY_INDEX ? 4                            \
                                                                 : 2 * sizeof(T);               \
        twin::ReduceRepeats<T>(#NAME, at, dst.TwinView(), src.TwinView(),                       \
                               twin::MaskLanes(at, #NAME, mask, repeatTime, twin::kLanes<T>),   \
                               srcBlkStride, srcRepStride,                                      \
                               {1, twin::kLanes<T>, dstRepStride * unit, unit}, FOLD, order);   \
    }
TWIN_WHOLE_EXTREME(WholeReduceMax, twin::Fold::kMax)
TWIN_WHOLE_EXTREME(WholeReduceMin, twin::Fold::kMin)

template <typename T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                    const int32_t repeatTime, const int32_t dstRepStride,
                    const int32_t srcBlkStride, const int32_t srcRepStride, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::ReduceRepeats<T>("WholeReduceSum", at, dst.TwinView(), src.TwinView(),
                           twin::MaskLanes(at, "WholeReduceSum", mask, repeatTime, twin::kLanes<T>),
                           srcBlkStride, srcRepStride,
                           {1, twin::kLanes<T>, dstRepStride * uint32_t{sizeof(T)}, sizeof(T)},
                           twin::Fold::kSum, ReduceOrder::ORDER_ONLY_VALUE);
}

#define TWIN_BLOCK_REDUCE(NAME, FOLD)                                                         \
    template <typename T, bool isSetMask = true>                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, \
              const int32_t mask, const int32_t dstRepStride, const int32_t srcBlkStride,     \
              const int32_t srcRepStride, TWIN_AT) {                                          \
        static_assert(isSetMask, "the twin sets the mask of every instruction");              \
        twin::ReduceRepeats<T>(                                                               \
            #NAME, at, dst.TwinView(), src.TwinView(),                                        \
            twin::MaskLanes(at, #NAME, mask, repeatTime, twin::kLanes<T>), srcBlkStride,      \
            srcRepStride,                                                                     \
            {8, 32 / sizeof(T), dstRepStride * 8 * uint32_t{sizeof(T)}, 8 * sizeof(T)}, FOLD, \
            ReduceOrder::ORDER_ONLY_VALUE);                                                   \
    }
TWIN_BLOCK_REDUCE(BlockReduceMax, twin::Fold::kMax)
TWIN_BLOCK_REDUCE(BlockReduceMin, twin::Fold::kMin)
TWIN_BLOCK_REDUCE(BlockReduceSum, twin::Fold::kSum)

template <typename T, bool isSetMask = true>
void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime,
                   const int32_t mask, const int32_t dstRepStride, const int32_t srcBlkStride,
                   const int32_t srcRepStride, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::ReduceRepeats<T>("PairReduceSum", at, dst.TwinView(), src.TwinView(),
                           twin::MaskLanes(at, "PairReduceSum", mask, repeatTime, twin::kLanes<T>),
                           srcBlkStride, srcRepStride,
                           {twin::kLanes<T> / 2, 2, dstRepStride * 128u, 32}, twin::Fold::kSum,
                           ReduceOrder::ORDER_ONLY_VALUE);
}

template <typename T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src,
               const LocalTensor<T>& sharedTmpBuffer, const int32_t count, bool calIndex = 0,
               TWIN_AT) {
    twin::ReduceAll<T>("ReduceMax", at, dst.TwinView(), src.TwinView(), sharedTmpBuffer.TwinView(),
                       count, twin::Fold::kMax, calIndex);
}
template <typename T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src,
               const LocalTensor<T>& sharedTmpBuffer, const int32_t count, bool calIndex = 0,
               TWIN_AT) {
    twin::ReduceAll<T>("ReduceMin", at, dst.TwinView(), src.TwinView(), sharedTmpBuffer.TwinView(),
                       count, twin::Fold::kMin, calIndex);
}
template <typename T, bool isSetMask = true>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
               const LocalTensor<T>& sharedTmpBuffer, const int32_t count, TWIN_AT) {
    static_assert(isSetMask, "the twin sets the mask of every instruction");
    twin::ReduceAll<T>("ReduceSum", at, dst.TwinView(), src.TwinView(), sharedTmpBuffer.TwinView(),
                       count, twin::Fold::kSum, false);
}

}  // namespace AscendC

namespace twin {

template <typename T>
void ReduceAll(const char* op, At at, const View& dst, const View& src, const View& scratch,
               int32_t count, Fold fold, bool index) {
    static_assert(kOneOf<T, half, float>, "the A2 reduces half and float only");
    Lanes lanes = CountLanes(at, op, count);
    if (lanes.Empty()) return;
    ReduceAllInstruction(op, at, src, lanes, fold == Fold::kSum ? nullptr : &scratch, dst,
                         sizeof(T), index);
    if (fold == Fold::kSum) {  // a tree within each repeat, the repeats one after another
        T sum{};
        for (uint32_t start = 0; start < lanes.count; start += kLanes<T>) {
            bool active[128];
            T part[128];
            for (uint32_t i = 0; i < kLanes<T>; ++i) {
                active[i] = start + i < lanes.count;
                if (active[i]) part[i] = Load<T>(src, (start + i) * sizeof(T));
            }
            T repeat = TreeSum(part, active, kLanes<T>);
            sum = start ? Narrow<T>(Widen(sum) + Widen(repeat)) : repeat;
        }
        Store<T>(dst, 0, sum);
        return;
    }
    uint32_t best = 0;
    for (uint32_t i = 1; i < lanes.count; ++i) {
        if (Beats(fold, Widen(Load<T>(src, best * sizeof(T))), Widen(Load<T>(src, i * sizeof(T)))))
            best = i;
    }
    Store<T>(dst, 0, Load<T>(src, best * sizeof(T)));
    if (index) std::memcpy(Ub(dst.address + sizeof(T)), &best, sizeof(T));
}

}  // namespace twin
