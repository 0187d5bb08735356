// kv_cache_store: new keys and values [T, N, D] -> the paged caches, by slot, in one pass.
//
// Caches lie as [K, N, S, D], or (NZ) as [K, N, D * bytes / 32, S, 32 bytes]; scales and zero
// points as [K, N, S], with one scale a token as [K, 1, S]. A slot is block * S + offset; -1 skips
// the token. With given scales, scale and zero_point are [N, D] and read.
#include "kernel_operator.h"

#include "quantized.h"
#include "unquantized.h"

namespace ascend_kv {

template <typename T>
__aicore__ inline void RunStore(const StoreTensors &tensors, const KvCacheStoreTiling &tiling)
{
    TPipe pipe;
    if (tiling.cache_element == INT8) {
        StoreQuantized<T>(pipe, tensors, tiling).Process();
    } else if (tiling.cache_element == HALF) {
        StoreUnquantized<T, half>(pipe, tensors, tiling).Process();
    } else if (tiling.cache_element == BFLOAT16) {
        StoreUnquantized<T, bfloat16_t>(pipe, tensors, tiling).Process();
    } else {
        StoreUnquantized<T, float>(pipe, tensors, tiling).Process();
    }
}

}  // namespace ascend_kv

// What the tiling does not call for may be null: scales of float caches, zero points of symmetric
// codes, positions, everything of the value where there is one side.
extern "C" __global__ __aicore__ void kv_cache_store(
    GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR slot_mapping,
    GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR key_zero_point, GM_ADDR value_zero_point,
    GM_ADDR key_positions, GM_ADDR positions, KvCacheStoreTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::StoreTensors tensors{{{key, key_cache, key_scale, key_zero_point},
                                     {value, value_cache, value_scale, value_zero_point}},
                                    slot_mapping,
                                    key_positions,
                                    positions};
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunStore<half>(tensors, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunStore<bfloat16_t>(tensors, tiling);
    } else {
        ascend_kv::RunStore<float>(tensors, tiling);
    }
}
