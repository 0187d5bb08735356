// kv_cache_quantize: x [B, N, T, D] -> INT8 codes and float32 scales (and zero points).
//
// The host launches kv_cache_quantize, or, where the tiling says 3 passes, one after another on
// one stream: kv_cache_quantize_reduce, kv_cache_quantize_scales, kv_cache_quantize. Kernels that
// follow each other need no barrier between cores, which could wait for a core that another
// stream keeps busy.
#include "kernel_operator.h"

#include "channels.h"
#include "partials.h"
#include "rows.h"
#include "spans.h"
#include "tokens.h"

namespace ascend_kv {

template <typename T>
__aicore__ inline void RunQuantize(const QuantizeTensors &tensors, const KvCacheQuantizeTiling &t)
{
    TPipe pipe;
    if (t.mode == QUANTIZE_ROWS) {
        QuantizeRows<T>(t).Process(pipe, tensors);
    } else if (t.mode == QUANTIZE_SPANS) {
        QuantizeSpans<T>(t).Process(pipe, tensors);
    } else if (t.mode == QUANTIZE_TOKENS) {
        QuantizeTokens<T>(t).Process(pipe, tensors);
    } else {
        QuantizeChannels<T>(t).Process(pipe, tensors);
    }
}

template <typename T>
__aicore__ inline void RunReduce(GM_ADDR x, GM_ADDR workspace, const KvCacheQuantizeTiling &t)
{
    TPipe pipe;
    if (t.mode == QUANTIZE_SPANS) {
        ReduceItems<T, SpanItem>(t).Process(pipe, x, workspace);
    } else {
        ReduceItems<T, ChannelItem>(t).Process(pipe, x, workspace);
    }
}

}  // namespace ascend_kv

// scale, zero_point: written by one dynamic pass, else read.
extern "C" __global__ __aicore__ void kv_cache_quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scale,
                                                        GM_ADDR zero_point,
                                                        KvCacheQuantizeTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::QuantizeTensors tensors{x, codes, scale, zero_point};
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunQuantize<half>(tensors, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunQuantize<bfloat16_t>(tensors, tiling);
    } else {
        ascend_kv::RunQuantize<float>(tensors, tiling);
    }
}

extern "C" __global__ __aicore__ void kv_cache_quantize_reduce(
    GM_ADDR x, GM_ADDR workspace, KvCacheQuantizeTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunReduce<half>(x, workspace, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunReduce<bfloat16_t>(x, workspace, tiling);
    } else {
        ascend_kv::RunReduce<float>(x, workspace, tiling);
    }
}

extern "C" __global__ __aicore__ void kv_cache_quantize_scales(
    GM_ADDR workspace, GM_ADDR scale, GM_ADDR zero_point, KvCacheQuantizeTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    AscendC::TPipe pipe;
    if (tiling.mode == ascend_kv::QUANTIZE_SPANS) {
        ascend_kv::MergeItems<ascend_kv::SpanItem>(tiling).Process(pipe, workspace, scale,
                                                                   zero_point);
    } else {
        ascend_kv::MergeItems<ascend_kv::ChannelItem>(tiling).Process(pipe, workspace, scale,
                                                                      zero_point);
    }
}
