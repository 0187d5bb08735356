// Kernels that do one instruction each, for comparing the twin's arithmetic with numpy. x, y:
// inputs, z: result, n elements. Every kernel runs on one core unless its name says otherwise.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kBytes = 32768;  // of each buffer

template <typename X, typename Z>
struct Bench {
    TPipe pipe;
    TBuf<TPosition::VECIN> xBuffer, yBuffer;
    TBuf<TPosition::VECOUT> zBuffer;
    TBuf<TPosition::VECCALC> scratchBuffer;
    LocalTensor<X> x, y;
    LocalTensor<Z> z;
    uint32_t n;

    __aicore__ inline Bench(GM_ADDR gx, GM_ADDR gy, uint32_t count) : n(count) {
        SetCtrlSpr<48, 48>(1);
        pipe.InitBuffer(xBuffer, kBytes);
        pipe.InitBuffer(yBuffer, kBytes);
        pipe.InitBuffer(zBuffer, kBytes);
        pipe.InitBuffer(scratchBuffer, kBytes);
        x = Load(xBuffer, gx);
        y = Load(yBuffer, gy);
        z = zBuffer.Get<Z>();
        PipeBarrier<PIPE_ALL>();
    }
    __aicore__ inline LocalTensor<X> Load(TBuf<TPosition::VECIN>& buffer, GM_ADDR from) {
        LocalTensor<X> local = buffer.Get<X>();
        if (from == nullptr) {
            return local;
        }
        GlobalTensor<X> global;
        global.SetGlobalBuffer((__gm__ X*)from);
        DataCopyPad(local, global, {1, static_cast<uint32_t>(n * sizeof(X)), 0, 0, 0},
                    {false, 0, 0, 0});
        return local;
    }
    __aicore__ inline void Store(GM_ADDR to, uint32_t count) {
        PipeBarrier<PIPE_ALL>();
        GlobalTensor<Z> global;
        global.SetGlobalBuffer((__gm__ Z*)to);
        DataCopyPad(global, z, {1, static_cast<uint32_t>(count * sizeof(Z)), 0, 0, 0});
    }
};

#define KERNEL(name)                                                                             \
    extern "C" __global__ __aicore__ void name(GM_ADDR x, [[maybe_unused]] GM_ADDR y, GM_ADDR z, \
                                               uint32_t n, int32_t mode)

#define CAST(U, T)                                             \
    KERNEL(cast_##U##_##T) {                                   \
        Bench<U, T> b(x, nullptr, n);                          \
        SetDeqScale(half(0.5f));                               \
        SetCtrlSpr<48, 48>(mode < 100);                        \
        Cast(b.z, b.x, static_cast<RoundMode>(mode % 100), n); \
        b.Store(z, n);                                         \
    }
CAST(half, int8_t)
CAST(half, uint8_t)
CAST(half, int16_t)
CAST(half, int32_t)
CAST(half, float)
CAST(int8_t, half)
CAST(uint8_t, half)
CAST(int16_t, half)
CAST(int16_t, float)
CAST(bfloat16_t, float)
CAST(bfloat16_t, int32_t)
CAST(int32_t, float)
CAST(int32_t, half)
CAST(int32_t, int16_t)
CAST(int32_t, int64_t)
CAST(int64_t, int32_t)
CAST(int64_t, float)
CAST(float, half)
CAST(float, bfloat16_t)
CAST(float, float)
CAST(float, int16_t)
CAST(float, int32_t)
CAST(float, int64_t)

#define ARITHMETIC(T)                                                                             \
    KERNEL(arithmetic_##T) {                                                                      \
        Bench<T, T> b(x, y, n);                                                                   \
        SetCtrlSpr<48, 48>(mode < 100);                                                           \
        T scalar = b.y.GetValue(0);                                                               \
        UnaryRepeatParams strides(1, 1, 8, 8);                                                    \
        switch (mode % 100) {                                                                     \
            case 0: Add(b.z, b.x, b.y, n); break;                                                 \
            case 1: Sub(b.z, b.x, b.y, n); break;                                                 \
            case 2: Mul(b.z, b.x, b.y, n); break;                                                 \
            case 3: Max(b.z, b.x, b.y, n); break;                                                 \
            case 4: Min(b.z, b.x, b.y, n); break;                                                 \
            case 5: Adds(b.z, b.x, scalar, n); break;                                             \
            case 6: Muls(b.z, b.x, scalar, n); break;                                             \
            case 7: Maxs(b.z, b.x, scalar, 256 / sizeof(T), n * sizeof(T) / 256, strides); break; \
            case 8: Mins(b.z, b.x, scalar, 256 / sizeof(T), n * sizeof(T) / 256, strides); break; \
            case 9: Duplicate(b.z, scalar, n); break;                                             \
        }                                                                                         \
        b.Store(z, n);                                                                            \
    }
ARITHMETIC(half)
ARITHMETIC(float)
ARITHMETIC(int32_t)
ARITHMETIC(int16_t)

#define FUNCTIONS(T)                                \
    KERNEL(functions_##T) {                         \
        Bench<T, T> b(x, y, n);                     \
        switch (mode) {                             \
            case 0: Div(b.z, b.x, b.y, n); break;   \
            case 1: Abs(b.z, b.x, n); break;        \
            case 2: Exp(b.z, b.x, n); break;        \
            case 3: Ln(b.z, b.x, n); break;         \
            case 4: Sqrt(b.z, b.x, n); break;       \
            case 5: Rsqrt(b.z, b.x, n); break;      \
            case 6: Reciprocal(b.z, b.x, n); break; \
            case 7: Relu(b.z, b.x, n); break;       \
        }                                           \
        b.Store(z, n);                              \
    }
FUNCTIONS(half)
FUNCTIONS(float)

#define REDUCTIONS(T)                                                                              \
    KERNEL(reductions_##T) {                                                                       \
        Bench<T, T> b(x, nullptr, n);                                                              \
        LocalTensor<T> scratch = b.scratchBuffer.Get<T>();                                         \
        constexpr int32_t lanes = 256 / sizeof(T);                                                 \
        int32_t repeats = n / lanes;                                                               \
        switch (mode) {                                                                            \
            case 0: WholeReduceMax(b.z, b.x, lanes, repeats, 1, 1, 8); break;                      \
            case 1:                                                                                \
                WholeReduceMin(b.z, b.x, lanes, repeats, 1, 1, 8, ReduceOrder::ORDER_INDEX_VALUE); \
                break;                                                                             \
            case 2:                                                                                \
                WholeReduceMax(b.z, b.x, lanes, repeats, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);  \
                break;                                                                             \
            case 3: WholeReduceSum(b.z, b.x, lanes, repeats, 1, 1, 8); break;                      \
            case 4: BlockReduceMax(b.z, b.x, repeats, lanes, 1, 1, 8); break;                      \
            case 5: BlockReduceSum(b.z, b.x, repeats, lanes, 1, 1, 8); break;                      \
            case 6: PairReduceSum(b.z, b.x, repeats, lanes, 1, 1, 8); break;                       \
            case 7: ReduceMax(b.z, b.x, scratch, n, true); break;                                  \
            case 8: ReduceMin(b.z, b.x, scratch, n, true); break;                                  \
            case 9: ReduceSum(b.z, b.x, scratch, n); break;                                        \
            case 10: BlockReduceMin(b.z, b.x, repeats, lanes, 1, 1, 8); break;                     \
            case 11:                                                                               \
                WholeReduceMin(b.z, b.x, lanes, repeats, 1, 1, 8, ReduceOrder::ORDER_ONLY_INDEX);  \
                break;                                                                             \
        }                                                                                          \
        uint32_t results[] = {2, 2, 1, 1, 8, 8, lanes / 2, 0, 0, 0, 8, 1};                         \
        b.Store(z, mode == 9 ? 1 : mode >= 7 && mode <= 8 ? 2 : results[mode] * repeats);          \
    }
REDUCTIONS(half)
REDUCTIONS(float)

KERNEL(movements) {
    Bench<float, float> b(x, y, n);
    uint64_t kept = 0;
    LocalTensor<uint32_t> offsets = b.y.ReinterpretCast<uint32_t>();
    LocalTensor<uint8_t> bits = b.scratchBuffer.Get<uint8_t>();
    Duplicate(b.z, 0.0f, 2048);
    PipeBarrier<PIPE_ALL>();
    switch (mode) {
        case 0: Brcb(b.z, b.x, n / 8, {1, 8}); break;
        case 1: Gather(b.z, b.x, offsets, 4, n); break;
        case 2: GatherMask(b.z, b.x, 2, true, n, {1, 1, 8, 0}, kept); break;
        case 3:
            GatherMask(b.z, b.x, 5, false, 0, {1, static_cast<uint16_t>(n / 64), 8, 0}, kept);
            break;
        case 4: CreateVecIndex(b.z, 3.0f, n); break;
        case 5:
            Compares(bits, b.x, 0.25f, CMPMODE::GE, n);
            PipeBarrier<PIPE_V>();
            Select(b.z, bits, b.x, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, n);
            break;
        case 6:
            Compare(bits, b.x, b.y, CMPMODE::LT, n);
            PipeBarrier<PIPE_V>();
            Select(b.z, bits, b.x, b.y, SELMODE::VSEL_CMPMASK_SPR, 64, n / 64, {1, 1, 1, 8, 8, 8});
            break;
        case 7: DataCopy(b.z[8], b.x, {2, 3, 1, 2}); break;
        case 8: Adds(b.z, b.x, 1.0f, 8, n / 64, {2, 1, 16, 8}); break;
        case 9: MulAddDst(b.z, b.x, b.y, n); break;
        case 10: Axpy(b.z, b.x, 2.5f, n); break;
    }
    PipeBarrier<PIPE_ALL>();
    b.z.SetValue(2048, static_cast<float>(kept));
    b.Store(z, 2049);
}

// Every core adds what it holds; then all read the sum.
KERNEL(sum_over_cores) {
    (void)mode;
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench<float, float> b(x, nullptr, n);
    GlobalTensor<float> sum, all;
    sum.SetGlobalBuffer((__gm__ float*)y, n);
    all.SetGlobalBuffer((__gm__ float*)z, n * GetBlockNum());
    Muls(b.z, b.x, static_cast<float>(GetBlockIdx() + 1), n);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    SetAtomicAdd<float>();
    DataCopyPad(sum, b.z, {1, static_cast<uint32_t>(n * 4), 0, 0, 0});
    SetAtomicNone();
    SyncAll();
    DataCopyPad(b.x, sum, {1, static_cast<uint32_t>(n * 4), 0, 0, 0}, {false, 0, 0, 0});
    SetFlag<HardEvent::MTE2_MTE3>(0);
    WaitFlag<HardEvent::MTE2_MTE3>(0);
    DataCopyPad(all[GetBlockIdx() * n], b.x, {1, static_cast<uint32_t>(n * 4), 0, 0, 0});
}

// Rows of n bytes with gaps: what the traffic counters are tested with.
KERNEL(rows) {
    TPipe pipe;
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, kBytes);
    LocalTensor<int8_t> local = buffer.Get<int8_t>();
    GlobalTensor<int8_t> from, to;
    from.SetGlobalBuffer((__gm__ int8_t*)x);
    to.SetGlobalBuffer((__gm__ int8_t*)z);
    int64_t start = GetBlockIdx() * 4096;
    uint32_t gap = static_cast<uint32_t>(mode);
    uint8_t left = n % 32 == 0 ? 0 : 1;  // a byte more would push whole rows a block apart
    DataCopyPad(local, from[start], {10, n, gap, 0, 0}, {true, left, 0, 7});
    SetFlag<HardEvent::MTE2_MTE3>(0);
    WaitFlag<HardEvent::MTE2_MTE3>(0);
    DataCopyPad(to[start], local, {10, n, 0, gap, 0});
}

// The last element of a tensor of any size.
KERNEL(last_of_many) {
    (void)mode;
    TPipe pipe;
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 32);
    LocalTensor<int8_t> local = buffer.Get<int8_t>();
    GlobalTensor<int8_t> from, to;
    uint64_t size = static_cast<uint64_t>(n) << 20;
    from.SetGlobalBuffer((__gm__ int8_t*)x, size);
    to.SetGlobalBuffer((__gm__ int8_t*)z, 1);
    DataCopyPad(local, from[size - 1], {1, 1, 0, 0, 0}, {false, 0, 0, 0});
    SetFlag<HardEvent::MTE2_MTE3>(0);
    WaitFlag<HardEvent::MTE2_MTE3>(0);
    DataCopyPad(to, local, {1, 1, 0, 0, 0});
}

struct Tiling {
    int64_t offset;
    float scale;
    int32_t count;
};
// Every way to hand an argument over.
extern "C" __global__ __aicore__ void arguments(GM_ADDR z, GM_ADDR tilingAddress, Tiling tiling,
                                                float add, int8_t minus, GM_ADDR nothing) {
    TPipe pipe;
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 32);
    LocalTensor<float> local = buffer.Get<float>();
    GlobalTensor<int32_t> words;
    words.SetGlobalBuffer((__gm__ int32_t*)tilingAddress, 2);
    float sum = static_cast<float>(words.GetValue(0) + words.GetValue(1)) + add +
                static_cast<float>(minus) + static_cast<float>(tiling.offset) * tiling.scale +
                static_cast<float>(tiling.count);
    Duplicate(local, nothing == nullptr ? sum : 0.0f, 8);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    GlobalTensor<float> to;
    to.SetGlobalBuffer((__gm__ float*)z);
    DataCopyPad(to, local, {1, 4, 0, 0, 0});
}
