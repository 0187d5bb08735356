// From tensors to what the CPU kernels take, and the checks without which an address would be wrong.
//
// An operator returns false, or nothing, where it does not serve what it was given: the Python
// reference then serves it, or says what is wrong (bindings_cpu.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "cpu_operators.h"
#include "cpu_paged.h"

namespace ascend_kv::cpu {

// A thread is worth waking for so many values.
constexpr int64_t GRAIN_VALUES = 1 << 14;

inline std::optional<Type> type_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Type::FLOAT;
    case at::kHalf: return Type::HALF;
    case at::kBFloat16: return Type::BFLOAT;
    case at::kChar: return Type::INT8;
    case at::kFloat8_e4m3fn: return Type::E4M3;
    case at::kFloat8_e5m2: return Type::E5M2;
    case at::kByte: return Type::INT4;
    default: return std::nullopt;
  }
}

inline at::ScalarType scalar_type_of(Type type) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kChar,
                                      at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kByte};
  return types[static_cast<int>(type)];
}

// The kernels want the values of a vector side by side.
inline at::Tensor channels_together(const at::Tensor& x) {
  return x.dim() && x.stride(-1) != 1 ? x.contiguous() : x;
}

inline bool is_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}
inline bool is_int(const at::Tensor& x) {
  return x.scalar_type() == at::kInt || x.scalar_type() == at::kLong;
}

// A one- or two-dimensional tensor of int32 or int64, read as int64.
class IntReader {
 public:
  explicit IntReader(const at::Tensor& x)
      : data_(x.const_data_ptr()),
        wide_(x.scalar_type() == at::kLong),
        row_(x.dim() == 2 ? x.stride(0) : 0),
        column_(x.dim() ? x.stride(x.dim() - 1) : 0) {}
  int64_t operator()(int64_t column) const { return (*this)(0, column); }
  int64_t operator()(int64_t row, int64_t column) const {
    const int64_t at = row * row_ + column * column_;
    return wide_ ? static_cast<const int64_t*>(data_)[at] : static_cast<const int32_t*>(data_)[at];
  }

 private:
  const void* data_;
  bool wide_;
  int64_t row_, column_;
};

// The channels of a vector in a cache [K, N, S, D], or D / 2 where two share a byte.
inline int64_t channels_of(const at::Tensor& cache) {
  return cache.size(3) * (cache.scalar_type() == at::kByte ? 2 : 1);
}

// Whether the caches hold keys and values of one shape, whatever their types.
inline bool caches_agree(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  return key_cache.dim() == 4 && value_cache.dim() == 4 &&
         key_cache.sizes().slice(0, 3) == value_cache.sizes().slice(0, 3) &&
         channels_of(key_cache) == channels_of(value_cache);
}

// False where the tensor does not lie beside `cache` [K, N, S, D], or is not of `type`.
inline bool read_parameter(
    const MaybeTensor& given, const at::Tensor& cache, at::ScalarType type, Parameter& out) {
  if (!given) return true;
  const at::Tensor& x = *given;
  if (x.scalar_type() != type) return false;
  const auto stride = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  const int64_t dim = channels_of(cache);
  // a tensor without elements still stands for a parameter
  static float none[1];
  out.data = x.numel() ? const_cast<void*>(x.const_data_ptr()) : none;
  out.half = type == at::kHalf;
  if (x.dim() == 3) {
    out.kind = Parameter::TOKEN;
    if (x.size(0) != cache.size(0) || x.size(2) != cache.size(2)) return false;
    if (x.size(1) != 1 && x.size(1) != cache.size(1)) return false;
    out.block = stride(0), out.head = stride(1), out.token = stride(2);
    return true;
  }
  if (x.dim() != 4) return false;
  out.head = stride(1), out.channel = stride(3);
  if (x.size(0) != 1 && x.size(2) == 1 && x.size(3) == dim && dim > 1) {  // of a block's channels
    out.kind = Parameter::GROUP;
    out.block = stride(0), out.token = 0, out.group_size = 1;
    return x.size(0) == cache.size(0) && x.size(1) == cache.size(1);
  }
  if (x.size(3) == 1 || x.size(3) == dim) {
    out.kind = Parameter::STATIC;
    return x.size(0) == 1 && x.size(2) == 1 && (x.size(1) == 1 || x.size(1) == cache.size(1));
  }
  out.kind = Parameter::GROUP;
  out.block = stride(0), out.token = stride(2);
  if (x.size(3) == 0 || dim % x.size(3)) return false;
  out.group_size = dim / x.size(3);
  return x.sizes().slice(0, 3) == cache.sizes().slice(0, 3);
}

inline bool read_side(
    const at::Tensor& cache, const MaybeTensor& scale, const MaybeTensor& zero_point, Side& out) {
  const auto type = type_of(cache);
  if (!type || cache.dim() != 4) return false;
  if (cache.stride(3) != 1 && cache.size(3) > 1) {
    not_served = "caches whose channels do not lie side by side";
    return false;
  }
  if (is_quantized(*type) != scale.has_value() || (zero_point && !scale)) return false;
  if (zero_point && (*type == Type::E4M3 || *type == Type::E5M2)) return false;
  out.data = static_cast<char*>(const_cast<void*>(cache.const_data_ptr()));
  out.type = *type;
  const int64_t bytes = bytes_of_type(*type);
  out.block = cache.stride(0) * bytes;
  out.head = cache.stride(1) * bytes;
  out.token = cache.stride(2) * bytes;
  const at::ScalarType parameters = *type == Type::INT4 ? at::kHalf : at::kFloat;
  if (!read_parameter(scale, cache, parameters, out.scale)) return false;
  if (!read_parameter(zero_point, cache, parameters, out.zero_point)) return false;
  return !zero_point || zero_point->sizes() == scale->sizes();
}

// The blocks of one sequence that hold its tokens first * S to length; false: one names none.
inline bool read_blocks(
    const IntReader& tables,
    int64_t row,
    int64_t first,
    int64_t last,
    int64_t num_blocks,
    std::vector<int64_t>& out) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t block = tables(row, i);
    if (block < 0 || block >= num_blocks) return false;
    out.push_back(block);
  }
  return true;
}

}  // namespace ascend_kv::cpu
