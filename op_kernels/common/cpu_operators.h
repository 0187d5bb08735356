// The CPU operators, one of a name with the Python wrapper that says what it does. Nothing (or
// false) is returned where the Python reference has to serve, or to say what is wrong; then nothing
// has been written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace ascend_kv::cpu {

using MaybeTensor = std::optional<at::Tensor>;

std::optional<std::tuple<at::Tensor, at::Tensor>> paged_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& block_tables, at::IntArrayRef query_lengths, at::IntArrayRef kv_lengths,
    double softmax_scale, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point, bool causal,
    int64_t window, const MaybeTensor& sinks, const MaybeTensor& score_bias,
    const MaybeTensor& key_positions, const MaybeTensor& query_positions,
    const MaybeTensor& entries);

bool kv_cache_store(
    const at::Tensor& key, const at::Tensor& value, at::Tensor& key_cache, at::Tensor& value_cache,
    const at::Tensor& slot_mapping, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point,
    const MaybeTensor& key_positions, const MaybeTensor& positions, bool dynamic);

}  // namespace ascend_kv::cpu
