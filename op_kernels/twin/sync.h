// Events, barriers, atomics and caches, and who this core is.
#pragma once
#include "copy.h"
#include "queue.h"
#include "vector.h"

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t eventID, TWIN_AT) {
    twin::SetEvent(static_cast<int>(event), eventID, at);
}
template <HardEvent event>
void WaitFlag(int32_t eventID, TWIN_AT) {
    twin::WaitEvent(static_cast<int>(event), eventID, at);
}
template <pipe_t pipe>
void PipeBarrier() {
    static_assert(pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_ALL,
                  "a vector core has barriers for PIPE_V, PIPE_MTE2, PIPE_MTE3 and PIPE_ALL");
    twin::Barrier(pipe);
}
template <bool isAIVOnly = true>
void SyncAll(TWIN_AT) {
    static_assert(isAIVOnly, "kernels for vector cores synchronise vector cores");
    twin::SyncCores(at);
}
inline int64_t GetBlockIdx() { return twin::BlockIndex(); }
inline int64_t GetBlockNum() { return twin::BlockNumber(); }

#define TWIN_ATOMIC(NAME, MODE)                                                           \
    template <typename T>                                                                 \
    void NAME() {                                                                         \
        static_assert(twin::kOneOf<T, float, half, bfloat16_t, int32_t, int16_t, int8_t>, \
                      "no atomics of this type");                                         \
        twin::CoreRegisters().atomic = MODE;                                              \
        twin::CoreRegisters().atomic_kind = twin::ElementOf<T>().kind;                    \
    }
TWIN_ATOMIC(SetAtomicAdd, twin::kAtomicAdd)
TWIN_ATOMIC(SetAtomicMax, twin::kAtomicMax)
TWIN_ATOMIC(SetAtomicMin, twin::kAtomicMin)
inline void SetAtomicNone() { twin::CoreRegisters().atomic = twin::kNoAtomic; }

// CTRL[48] is the only bit the A2 lets a kernel set: 1 keeps infinity and NaN in half and bfloat16
// results.
template <int8_t startBit, int8_t endBit>
static inline void SetCtrlSpr(int64_t value) {
    static_assert(startBit == 48 && endBit == 48, "the A2 has CTRL[48] only");
    twin::CoreRegisters().keeps_infinity = value & 1;
}
template <int8_t startBit, int8_t endBit>
static inline int64_t GetCtrlSpr() {
    static_assert(startBit == 48 && endBit == 48, "the A2 has CTRL[48] only");
    return twin::CoreRegisters().keeps_infinity;
}

template <typename T, CacheLine entireType, DcciDst dcciDst>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, TWIN_AT) {
    twin::CleanCache(dst.TwinAddress(), entireType == CacheLine::ENTIRE_DATA_CACHE, at);
}

}  // namespace AscendC
