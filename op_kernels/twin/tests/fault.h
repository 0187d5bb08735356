// For kernels that break one rule on purpose and their near-misses: FAULT(name) has one line marked
// `// BREAKS rule`, where the twin must stop; CLEAN(name) does almost the same and must pass.
// x and y: 64 KiB of global memory each, x an input full of ones.
#pragma once
#include "kernel_operator.h"

using namespace AscendC;

#define FAULT(name) extern "C" __global__ __aicore__ void fault_##name(GM_ADDR x, GM_ADDR y)
#define CLEAN(name) extern "C" __global__ __aicore__ void clean_##name(GM_ADDR x, GM_ADDR y)

constexpr uint32_t kCount = 256;  // floats in each buffer
constexpr uint32_t kGlobal = 16384;

// Three buffers of a kilobyte, and both global tensors.
struct Bench {
    TPipe pipe;
    TBuf<TPosition::VECIN> inBuffer;
    TBuf<TPosition::VECCALC> calcBuffer;
    TBuf<TPosition::VECOUT> outBuffer;
    LocalTensor<float> in, calc, out;
    GlobalTensor<float> x, y;

    __aicore__ inline Bench(GM_ADDR gx, GM_ADDR gy) {
        pipe.InitBuffer(inBuffer, kCount * sizeof(float));
        pipe.InitBuffer(calcBuffer, kCount * sizeof(float));
        pipe.InitBuffer(outBuffer, kCount * sizeof(float));
        in = inBuffer.Get<float>();
        calc = calcBuffer.Get<float>();
        out = outBuffer.Get<float>();
        x.SetGlobalBuffer((__gm__ float*)gx, kGlobal);
        y.SetGlobalBuffer((__gm__ float*)gy, kGlobal);
    }
    __aicore__ inline void Fill() {  // every buffer written, everything done
        Duplicate(in, 1.0f, kCount);
        Duplicate(calc, 2.0f, kCount);
        Duplicate(out, 3.0f, kCount);
        PipeBarrier<PIPE_ALL>();
    }
};

template <HardEvent event>
__aicore__ inline void
Hand() {  // everything so far on the first pipe before everything to come on the second
    SetFlag<event>(0);
    WaitFlag<event>(0);
}
