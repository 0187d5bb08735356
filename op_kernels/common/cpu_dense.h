// Dense tensors [B, N, T, D] row by row, and scales that broadcast to them, for the CPU operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu_paged.h"
#include "cpu_tensors.h"

namespace ascend_kv::cpu {

// Where a row of D values lies; D itself is contiguous.
struct DenseRows {
  char* data;
  Type type;
  int64_t batch, heads, tokens, dim;
  int64_t stride[3];  // in bytes

  template <class T>
  T* row(int64_t b, int64_t n, int64_t t) const {
    return reinterpret_cast<T*>(data + b * stride[0] + n * stride[1] + t * stride[2]);
  }
  int64_t rows() const { return batch * heads * tokens; }
};

inline DenseRows dense_rows(const at::Tensor& x, Type type) {
  const int64_t bytes = bytes_of_type(type);
  return {static_cast<char*>(const_cast<void*>(x.const_data_ptr())), type, x.size(0), x.size(1),
          x.size(2), x.size(3),
          {x.stride(0) * bytes, x.stride(1) * bytes, x.stride(2) * bytes}};
}

// Scales (or zero points) of any shape that broadcasts to the rows, the last dimension being
// channels or groups of channels.
struct Broadcast {
  const float* data = nullptr;
  int64_t stride[4] = {};
  int64_t group_size = 1;

  const float* row(int64_t b, int64_t n, int64_t t) const {
    return data + b * stride[0] + n * stride[1] + t * stride[2];
  }
  bool is_one_a_row() const { return stride[3] == 0; }
  // One for each of `dim` channels, in `to`.
  const float* spread(int64_t b, int64_t n, int64_t t, int64_t dim, float* to) const {
    const float* from = row(b, n, t);
    for (int64_t c = 0; c < dim; ++c) to[c] = from[c / group_size * stride[3]];
    return to;
  }
};

// Nothing where it does not broadcast.
inline std::optional<Broadcast> read_broadcast(
    const at::Tensor& x, const DenseRows& rows, int64_t group_size) {
  const int64_t sizes[] = {rows.batch, rows.heads, rows.tokens, rows.dim / group_size};
  if (x.scalar_type() != at::kFloat || x.dim() != 4) return std::nullopt;
  Broadcast out;
  out.data = x.const_data_ptr<float>();
  out.group_size = group_size;
  for (int i = 0; i < 4; ++i) {
    if (x.size(i) != 1 && x.size(i) != sizes[i]) return std::nullopt;
    out.stride[i] = x.size(i) == 1 ? 0 : x.stride(i);
  }
  return out;
}

}  // namespace ascend_kv::cpu
