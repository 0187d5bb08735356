// hca_compress: windows of `ratio` tokens -> one entry each, by gated pooling per channel, then
// RMSNorm and RoPE. With overlap a window also sees the first half of the channels (a) of the
// tokens of the window before.
//
// The host launches hca_compress, or, where the tiling says split, hca_compress_pool and then
// hca_compress_finish on the same stream.
#include "kernel_operator.h"

#include "finish.h"
#include "pool.h"

namespace ascend_kv {

// Whole windows on one core.
template <typename T, typename E>
__aicore__ inline void CompressWindows(TPipe &pipe, const CompressTensors &tensors,
                                       GM_ADDR entries, const HcaCompressTiling &t)
{
    WindowPool<T> pool;
    EntryFinish<E> finish;
    TBuf<TPosition::VECCALC> buffer;
    pool.Init(pipe, tensors, t);
    finish.Init(pipe, tensors, entries, t);
    pipe.InitBuffer(buffer, t.tile_windows * t.row_stride * sizeof(float));
    LocalTensor<float> pooled = buffer.Get<float>();
    pool.BeginPart(0);
    Range range = CoreRange(t.windows, t.cores, GetBlockIdx(), 1);
    for (WindowRuns runs(t, tensors.sequences, range.begin, range.end); runs.Valid();) {
        WindowRun run = runs.Take(pool.Most(runs.AtStart()));
        pool.Pool(run, pooled, t.row_stride);
        finish.Run(pooled, run.entry, run.count);
    }
    pool.EndPart();
}

// Parts of the channels: all windows of the first part, of the second, ...
template <typename T>
__aicore__ inline void PoolParts(TPipe &pipe, const CompressTensors &tensors, GM_ADDR workspace,
                                 const HcaCompressTiling &t)
{
    WindowPool<T> pool;
    TQue<TPosition::VECOUT, 1> out;
    GlobalTensor<float> rows;
    rows.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(workspace));
    pool.Init(pipe, tensors, t);
    pipe.InitBuffer(out, BUFFERS, t.tile_windows * t.stride * sizeof(float));
    Range range = CoreRange(t.windows * Parts(t), t.cores, GetBlockIdx(), 1);
    while (range.begin < range.end) {
        int64_t part = range.begin / t.windows;
        int64_t first = range.begin % t.windows;
        int64_t last = Smaller(t.windows, first + range.end - range.begin);
        range.begin += last - first;
        int64_t channel = part * t.chunk;
        uint32_t channels = Smaller<int64_t>(t.chunk, t.dim - channel);
        pool.BeginPart(channel);
        for (WindowRuns runs(t, tensors.sequences, first, last); runs.Valid();) {
            WindowRun run = runs.Take(pool.Most(runs.AtStart()));
            LocalTensor<float> pooled = out.AllocTensor<float>();
            pool.Pool(run, pooled, t.stride);
            out.EnQue(pooled);
            pooled = out.DeQue<float>();
            View view{static_cast<uint32_t>(run.count), channels, static_cast<uint32_t>(t.stride)};
            StoreRows(rows[run.entry * t.dim + channel], pooled, view,
                      (t.dim - channels) * sizeof(float));
            out.FreeTensor(pooled);
        }
        pool.EndPart();
    }
}

template <typename E>
__aicore__ inline void FinishRows(TPipe &pipe, const CompressTensors &tensors, GM_ADDR workspace,
                                  GM_ADDR entries, const HcaCompressTiling &t)
{
    EntryFinish<E> finish;
    TQue<TPosition::VECIN, 1> in;
    GlobalTensor<float> rows;
    rows.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(workspace));
    finish.Init(pipe, tensors, entries, t);
    pipe.InitBuffer(in, BUFFERS, t.finish_rows * t.row_stride * sizeof(float));
    Range range = CoreRange(t.windows, t.finish_cores, GetBlockIdx(), 1);
    for (int64_t entry = range.begin; entry < range.end; entry += t.finish_rows) {
        uint32_t count = Smaller<int64_t>(t.finish_rows, range.end - entry);
        LocalTensor<float> pooled = in.AllocTensor<float>();
        LoadRows(pooled, rows[entry * t.dim],
                 View{count, static_cast<uint32_t>(t.dim), static_cast<uint32_t>(t.row_stride)});
        in.EnQue(pooled);
        pooled = in.DeQue<float>();
        finish.Run(pooled, entry, count);
        in.FreeTensor(pooled);
    }
}

template <typename T>
__aicore__ inline void RunCompress(const CompressTensors &tensors, GM_ADDR entries,
                                   const HcaCompressTiling &tiling)
{
    TPipe pipe;
    if (tiling.out_element == HALF) {
        CompressWindows<T, half>(pipe, tensors, entries, tiling);
    } else if (tiling.out_element == BFLOAT16) {
        CompressWindows<T, bfloat16_t>(pipe, tensors, entries, tiling);
    } else {
        CompressWindows<T, float>(pipe, tensors, entries, tiling);
    }
}

}  // namespace ascend_kv

// sequences: int32 [B, 4]: each sequence's first token in kv, first entry, index of its first
// window, 0. A sequence has at least the tokens of its windows. previous_kv and previous_gate: the
// a half of the window before, of sequences whose first window is not 0. What the tiling does not
// call for may be null.
extern "C" __global__ __aicore__ void hca_compress(
    GM_ADDR kv, GM_ADDR gate, GM_ADDR sequences, GM_ADDR position_bias, GM_ADDR previous_kv,
    GM_ADDR previous_gate, GM_ADDR norm_weight, GM_ADDR rotary_table, GM_ADDR entries,
    HcaCompressTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::CompressTensors tensors{kv,          gate,          sequences,   position_bias,
                                       previous_kv, previous_gate, norm_weight, rotary_table};
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunCompress<half>(tensors, entries, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunCompress<bfloat16_t>(tensors, entries, tiling);
    } else {
        ascend_kv::RunCompress<float>(tensors, entries, tiling);
    }
}

extern "C" __global__ __aicore__ void hca_compress_pool(
    GM_ADDR kv, GM_ADDR gate, GM_ADDR sequences, GM_ADDR position_bias, GM_ADDR previous_kv,
    GM_ADDR previous_gate, GM_ADDR workspace, HcaCompressTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::CompressTensors tensors{kv,          gate,          sequences, position_bias,
                                       previous_kv, previous_gate, nullptr,   nullptr};
    AscendC::TPipe pipe;
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::PoolParts<half>(pipe, tensors, workspace, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::PoolParts<bfloat16_t>(pipe, tensors, workspace, tiling);
    } else {
        ascend_kv::PoolParts<float>(pipe, tensors, workspace, tiling);
    }
}

extern "C" __global__ __aicore__ void hca_compress_finish(
    GM_ADDR workspace, GM_ADDR sequences, GM_ADDR norm_weight, GM_ADDR rotary_table,
    GM_ADDR entries, HcaCompressTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::CompressTensors tensors{nullptr, nullptr, sequences,   nullptr,
                                       nullptr, nullptr, norm_weight, rotary_table};
    AscendC::TPipe pipe;
    if (tiling.out_element == ascend_kv::HALF) {
        ascend_kv::FinishRows<half>(pipe, tensors, workspace, entries, tiling);
    } else if (tiling.out_element == ascend_kv::BFLOAT16) {
        ascend_kv::FinishRows<bfloat16_t>(pipe, tensors, workspace, entries, tiling);
    } else {
        ascend_kv::FinishRows<float>(pipe, tensors, workspace, entries, tiling);
    }
}
