// The host functions: what PyTorch calls. Each checks its arguments, cuts the work, allocates
// results and launches; a case that no kernel serves goes to the reference, with a reason.
// Arguments and results are those of ascend_kv/ops/<operator>.py, where they are described.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace ascend_kv {

// Int32 numbers, on the device of `as`.
at::Tensor ToDevice(at::IntArrayRef numbers, const at::Tensor &as);

std::tuple<at::Tensor, at::Tensor, at::Tensor> KvCacheQuantizeHost(
    const at::Tensor &x, c10::string_view granularity, bool symmetric,
    const std::optional<at::Tensor> &scale, const std::optional<at::Tensor> &zero_point,
    int64_t group_size, c10::string_view storage);

at::Tensor KvCacheDequantizeHost(const at::Tensor &codes, const at::Tensor &scale,
                                 const std::optional<at::Tensor> &zero_point, int64_t group_size,
                                 std::optional<at::ScalarType> dtype);

void KvCacheStoreHost(const at::Tensor &key, const at::Tensor &value, const at::Tensor &key_cache,
                      const at::Tensor &value_cache, const at::Tensor &slot_mapping,
                      const std::optional<at::Tensor> &key_scale,
                      const std::optional<at::Tensor> &value_scale,
                      const std::optional<at::Tensor> &key_zero_point,
                      const std::optional<at::Tensor> &value_zero_point,
                      const std::optional<at::Tensor> &key_positions,
                      const std::optional<at::Tensor> &positions, bool dynamic);

std::tuple<at::Tensor, at::Tensor> KvCacheLoadHost(
    const at::Tensor &key_cache, const at::Tensor &value_cache, const at::Tensor &block_tables,
    at::IntArrayRef kv_lengths, const std::optional<at::Tensor> &key_scale,
    const std::optional<at::Tensor> &value_scale, const std::optional<at::Tensor> &key_zero_point,
    const std::optional<at::Tensor> &value_zero_point, const std::optional<at::Tensor> &key_offset,
    const std::optional<at::Tensor> &rotary_table, const std::optional<at::Tensor> &key_positions,
    std::optional<at::ScalarType> dtype);

at::Tensor HcaCompressHost(const at::Tensor &kv, const at::Tensor &gate, at::IntArrayRef lengths,
                           int64_t ratio, const std::optional<at::Tensor> &position_bias,
                           bool overlap, at::OptionalIntArrayRef first_windows,
                           const std::optional<at::Tensor> &previous_kv,
                           const std::optional<at::Tensor> &previous_gate,
                           const std::optional<at::Tensor> &norm_weight, double norm_eps,
                           const std::optional<at::Tensor> &rotary_table, int64_t rotary_dim,
                           std::optional<at::ScalarType> dtype);

at::Tensor HcaDecompressHost(const at::Tensor &entries, at::IntArrayRef lengths, int64_t ratio);

}  // namespace ascend_kv
