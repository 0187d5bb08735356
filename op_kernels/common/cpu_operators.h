// The CPU operators, one of a name with the Python wrapper that says what it does. Nothing (or
// false) is returned where the Python reference has to serve, or to say what is wrong; then nothing
// has been written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace ascend_kv::cpu {

using MaybeTensor = std::optional<at::Tensor>;

// What the call that runs asks for and the operator does not serve, where it says so.
inline thread_local const char* not_served = nullptr;

std::optional<std::tuple<at::Tensor, at::Tensor>> paged_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& block_tables, at::IntArrayRef query_lengths, at::IntArrayRef kv_lengths,
    double softmax_scale, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point, bool causal,
    int64_t window, const MaybeTensor& sinks, const MaybeTensor& score_bias,
    const MaybeTensor& key_positions, const MaybeTensor& query_positions,
    const MaybeTensor& entries, const MaybeTensor& key_offset,
    const MaybeTensor& rotary_frequencies, const MaybeTensor& offset_query);

std::optional<std::tuple<at::Tensor, at::Tensor>> kv_cache_load(
    const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& block_tables,
    at::IntArrayRef kv_lengths, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point,
    const MaybeTensor& key_offset, const MaybeTensor& rotary_table,
    const MaybeTensor& key_positions, std::optional<at::ScalarType> dtype);

std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> kv_cache_quantize(
    const at::Tensor& x, c10::string_view granularity, bool symmetric, const MaybeTensor& scale,
    const MaybeTensor& zero_point, int64_t group_size, c10::string_view storage);

std::optional<at::Tensor> kv_cache_dequantize(
    const at::Tensor& codes, const at::Tensor& scale, const MaybeTensor& zero_point,
    int64_t group_size, std::optional<at::ScalarType> dtype);

std::optional<at::Tensor> hca_compress(
    const at::Tensor& kv, const at::Tensor& gate, at::IntArrayRef lengths, int64_t ratio,
    const MaybeTensor& position_bias, bool overlap, at::OptionalIntArrayRef first_windows,
    const MaybeTensor& previous_kv, const MaybeTensor& previous_gate,
    const MaybeTensor& norm_weight, double norm_eps, const MaybeTensor& rotary_table,
    int64_t rotary_dim, std::optional<at::ScalarType> dtype);

// Bits that paged_attention leaves of what codes are multiplied with, as it was compiled and as the
// system lets it; 0: float32's (ascend_kv/ops/native.py).
int64_t whole_number_bits();

bool kv_cache_store(
    const at::Tensor& key, const at::Tensor& value, at::Tensor& key_cache, at::Tensor& value_cache,
    const at::Tensor& slot_mapping, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point,
    const MaybeTensor& key_positions, const MaybeTensor& positions, bool dynamic);

}  // namespace ascend_kv::cpu
