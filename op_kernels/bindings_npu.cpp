// The NPU's implementations of the operators whose schemas ascend_kv/ops defines.
#include <torch/library.h>

#include "host/hosts.h"

TORCH_LIBRARY_IMPL(ascend_kv, PrivateUse1, m)
{
    m.impl("kv_cache_quantize", TORCH_FN(ascend_kv::KvCacheQuantizeHost));
    m.impl("kv_cache_dequantize", TORCH_FN(ascend_kv::KvCacheDequantizeHost));
    m.impl("kv_cache_store", TORCH_FN(ascend_kv::KvCacheStoreHost));
    m.impl("kv_cache_load", TORCH_FN(ascend_kv::KvCacheLoadHost));
    m.impl("hca_compress", TORCH_FN(ascend_kv::HcaCompressHost));
    m.impl("hca_decompress", TORCH_FN(ascend_kv::HcaDecompressHost));
}
