// kv_cache_dequantize on a CPU: code * scale + zero point, see ascend_kv/ops/kv_cache_dequantize.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "../common/cpu_dense.h"
#include "../common/cpu_operators.h"
#include "../common/cpu_quantized.h"

namespace ascend_kv::cpu {
namespace {

template <class From, class To>
void decode_row(
    const From* from, const Broadcast& scale, const Broadcast& zero, int64_t b, int64_t n,
    int64_t t, int64_t dim, float* spread, To* to) {
  if (scale.is_one_a_row() && (!zero.data || zero.is_one_a_row())) {
    const Vec factor = broadcast(*scale.row(b, n, t));
    const Vec shift = broadcast(zero.data ? *zero.row(b, n, t) : 0.0f);
    for_vectors(dim, [&](int64_t c, int count) {
      Vec x = load_at(from, c, count) * factor;
      if (zero.data) x = x + shift;
      store_at(to, c, count, x);
    });
    return;
  }
  const float* factors = scale.spread(b, n, t, dim, spread);
  const float* shifts = zero.data ? zero.spread(b, n, t, dim, spread + dim) : nullptr;
  for_vectors(dim, [&](int64_t c, int count) {
    Vec x = load_at(from, c, count) * load_at(factors, c, count);
    if (shifts) x = x + load_at(shifts, c, count);
    store_at(to, c, count, x);
  });
}

}  // namespace

std::optional<at::Tensor> kv_cache_dequantize(
    const at::Tensor& given, const at::Tensor& scale, const MaybeTensor& zero_point,
    int64_t group_size, std::optional<at::ScalarType> dtype) {
  const auto stored = type_of(given);
  if (given.dim() != 4 || !stored || !is_quantized(*stored) || given.numel() == 0) return {};
  const at::Tensor codes = channels_together(given);
  DenseRows rows = dense_rows(codes, *stored);
  rows.dim = channels_of(codes);
  if (group_size < 0 || (group_size && rows.dim % group_size)) return {};
  const int64_t group = std::max<int64_t>(1, group_size);
  // as floats: halves are INT4's alone
  const at::ScalarType parameters = *stored == Type::INT4 ? at::kHalf : at::kFloat;
  const bool shifted = zero_point && !(zero_point->dim() == 1 && zero_point->numel() == 0);
  if (scale.scalar_type() != parameters) return {};
  if (shifted && (zero_point->scalar_type() != parameters || *stored == Type::E4M3 ||
                  *stored == Type::E5M2))
    return {};
  const at::Tensor factors = scale.to(at::kFloat);
  const at::Tensor shifts = shifted ? zero_point->to(at::kFloat) : at::Tensor();
  const auto scales = read_broadcast(factors, rows, group);
  std::optional<Broadcast> zeros = Broadcast{};
  if (shifted) zeros = read_broadcast(shifts, rows, group);
  const at::ScalarType result = dtype.value_or(at::kFloat);
  if (!scales || !zeros || !is_float(result)) return {};

  const std::vector<int64_t> sizes = {rows.batch, rows.heads, rows.tokens, rows.dim};
  at::Tensor out = at::empty(sizes, codes.options().dtype(result));
  char* data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, GRAIN_VALUES / rows.dim);
  const auto decode = [&](auto code, auto value) {
    using From = decltype(code);
    using To = decltype(value);
    at::parallel_for(0, rows.rows(), grain, [&](int64_t begin, int64_t end) {
      std::vector<float> spread(2 * rows.dim);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i % rows.tokens, n = i / rows.tokens % rows.heads;
        const int64_t b = i / rows.tokens / rows.heads;
        decode_row(
            rows.row<From>(b, n, t), *scales, *zeros, b, n, t, rows.dim, spread.data(),
            reinterpret_cast<To*>(data) + i * rows.dim);
      }
    });
  };
  with_kind(*stored, [&](auto kind) {
    with_float_type(*type_of(out), [&](auto value) { decode(typename decltype(kind)::Code{}, value); });
  });
  return out;
}

}  // namespace ascend_kv::cpu
