// kv_cache_quantize on a CPU. What it computes is said in ascend_kv/ops/kv_cache_quantize.py.
//
// Groups inside a token (token_head, token, group) are read and written in one go. Groups over
// tokens (layer, head, channel) are read twice: extremes of every channel over a run of tokens
// first, joined to those of the groups, then codes. Extremes do not depend on the order.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>

#include "../common/cpu_dense.h"
#include "../common/cpu_operators.h"
#include "../common/cpu_quantized.h"

namespace ascend_kv::cpu {
namespace {

constexpr int64_t RUN_TOKENS = 256;

struct QuantizeCall {
  DenseRows x;
  char* codes;
  float *scale, *zero_point;  // as they are stored, but float32; zero_point: null where symmetric

  template <class Kind>
  typename Kind::Code* codes_at(int64_t b, int64_t n, int64_t t) const {
    const int64_t row = (b * x.heads + n) * x.tokens + t;
    return past(reinterpret_cast<typename Kind::Code*>(codes), row * x.dim);
  }
};

// One scale for some vectors of one length: the row itself, or the same token of all heads.
template <class Kind, class T, bool SYMMETRIC>
void quantize_together(
    const QuantizeCall& call, int64_t b, int64_t n, int64_t heads, int64_t t, int64_t c,
    int64_t size, int64_t group) {
  GroupRange<SYMMETRIC> range;
  for (int64_t h = n; h < n + heads; ++h) range.add(call.x.row<T>(b, h, t) + c, size);
  const auto [scale, zero_point] = range.template scale<Kind>();
  for (int64_t h = n; h < n + heads; ++h)
    encode_row<Kind>(
        call.x.row<T>(b, h, t) + c, size, scale, SYMMETRIC ? nullptr : &zero_point,
        past(call.codes_at<Kind>(b, h, t), c));
  call.scale[group] = scale;
  if (!SYMMETRIC) call.zero_point[group] = zero_point;
}

template <class Kind, class T, bool SYMMETRIC>
void quantize_tokens(const QuantizeCall& call, bool heads_together, int64_t group_size) {
  const DenseRows& x = call.x;
  const int64_t together = heads_together ? x.heads : 1, parts = x.dim / group_size;
  const int64_t units = x.rows() / together;
  const int64_t grain = std::max<int64_t>(1, GRAIN_VALUES / (x.dim * together));
  at::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i % x.tokens, above = i / x.tokens;
      const int64_t n = heads_together ? 0 : above % x.heads;
      const int64_t b = heads_together ? above : above / x.heads;
      for (int64_t p = 0; p < parts; ++p)
        quantize_together<Kind, T, SYMMETRIC>(
            call, b, n, together, t, p * group_size, group_size, i * parts + p);
    }
  });
}

// Extremes of each channel over some rows; three rows of `padded` floats.
template <bool SYMMETRIC>
struct Extremes {
  float *high, *low, *poison;

  // Those found in `data`.
  Extremes(float* data, int64_t padded)
      : high(data), low(data + padded), poison(data + 2 * padded) {}

  void clear(int64_t padded) {
    const GroupRange<SYMMETRIC> none;
    for (int64_t c = 0; c < padded; c += LANES) {
      write(high + c, none.high), write(low + c, none.low), write(poison + c, none.poison);
    }
  }
  template <class T>
  void add(const T* row, int64_t dim) {
    for_vectors(dim, [&](int64_t c, int count) {
      const Vec x = load_at(row, c, count);
      write(high + c, larger(SYMMETRIC ? magnitude(x) : x, load(high + c)));
      if (!SYMMETRIC) write(low + c, smaller(x, load(low + c)));
      write(poison + c, load(poison + c) + (x - x));
    });
  }
  void join(const Extremes& other, int64_t padded) {
    for (int64_t c = 0; c < padded; c += LANES) {
      write(high + c, larger(load(other.high + c), load(high + c)));
      write(low + c, smaller(load(other.low + c), load(low + c)));
      write(poison + c, load(poison + c) + load(other.poison + c));
    }
  }
  GroupRange<SYMMETRIC> of_channel(int64_t c) const {
    GroupRange<SYMMETRIC> range;
    range.high = broadcast(high[c]), range.low = broadcast(low[c]);
    range.poison = broadcast(poison[c]);
    return range;
  }
  GroupRange<SYMMETRIC> of_all(int64_t dim) const {
    GroupRange<SYMMETRIC> range;
    for (int64_t c = 0; c < dim; ++c) {
      range.high = larger(broadcast(high[c]), range.high);
      range.low = smaller(broadcast(low[c]), range.low);
      range.poison = range.poison + poison[c];
    }
    return range;
  }
};

enum class Over { LAYER, HEAD, CHANNEL };

// The scales of one group, or of a head's channels, from the extremes of its runs.
template <class Kind, bool SYMMETRIC>
void scale_group(
    const QuantizeCall& call, Over over, int64_t group, int64_t runs, float* extremes,
    int64_t padded) {
  Extremes<SYMMETRIC> all(extremes + 3 * padded * runs * group, padded);
  for (int64_t i = 1; i < runs; ++i)
    all.join(Extremes<SYMMETRIC>(extremes + 3 * padded * (runs * group + i), padded), padded);
  const int64_t count = over == Over::CHANNEL ? call.x.dim : 1;
  for (int64_t c = 0; c < count; ++c) {
    const auto range = over == Over::CHANNEL ? all.of_channel(c) : all.of_all(call.x.dim);
    const auto [scale, zero_point] = range.template scale<Kind>();
    call.scale[group * count + c] = scale;
    if (!SYMMETRIC) call.zero_point[group * count + c] = zero_point;
  }
}

template <class Kind, class T, bool SYMMETRIC>
void quantize_over_tokens(const QuantizeCall& call, Over over) {
  const DenseRows& x = call.x;
  const int64_t padded = round_up(x.dim, LANES);
  const int64_t runs = (x.tokens + RUN_TOKENS - 1) / RUN_TOKENS, heads = x.batch * x.heads;
  std::vector<float> extremes(3 * padded * heads * runs);
  const auto for_runs = [&](auto&& f) {
    at::parallel_for(0, heads * runs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / runs, low = i % runs * RUN_TOKENS;
        f(i, head, low, std::min(low + RUN_TOKENS, x.tokens));
      }
    });
  };
  for_runs([&](int64_t run, int64_t head, int64_t low, int64_t high) {
    Extremes<SYMMETRIC> found(&extremes[3 * padded * run], padded);
    found.clear(padded);
    for (int64_t t = low; t < high; ++t)
      found.add(x.row<T>(head / x.heads, head % x.heads, t), x.dim);
  });
  const int64_t groups = over == Over::LAYER ? x.batch : heads;
  for (int64_t group = 0; group < groups; ++group)
    scale_group<Kind, SYMMETRIC>(call, over, group, runs * heads / groups, extremes.data(), padded);
  for_runs([&](int64_t, int64_t head, int64_t low, int64_t high) {
    const int64_t b = head / x.heads, n = head % x.heads;
    const int64_t group = over == Over::LAYER ? b : head;
    for (int64_t t = low; t < high; ++t) {
      auto* to = call.codes_at<Kind>(b, n, t);
      if (over == Over::CHANNEL) {
        encode_row<Kind>(
            x.row<T>(b, n, t), x.dim, call.scale + group * x.dim,
            SYMMETRIC ? nullptr : call.zero_point + group * x.dim, to);
      } else {
        encode_row<Kind>(
            x.row<T>(b, n, t), x.dim, call.scale[group],
            SYMMETRIC ? nullptr : call.zero_point + group, to);
      }
    }
  });
}

// With scales that are given.
template <class Kind, class T>
void quantize_given(const QuantizeCall& call, const Broadcast& scale, const Broadcast& zero) {
  const DenseRows& x = call.x;
  const int64_t grain = std::max<int64_t>(1, GRAIN_VALUES / x.dim);
  at::parallel_for(0, x.rows(), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> spread(2 * x.dim);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i % x.tokens, n = i / x.tokens % x.heads, b = i / x.tokens / x.heads;
      const float* scales = scale.spread(b, n, t, x.dim, spread.data());
      const float* zeros =
          zero.data ? zero.spread(b, n, t, x.dim, spread.data() + x.dim) : nullptr;
      encode_row<Kind>(x.row<T>(b, n, t), x.dim, scales, zeros, call.codes_at<Kind>(b, n, t));
    }
  });
}

template <class T>
bool are_finite(const DenseRows& x) {
  for (int64_t i = 0; i < x.rows(); ++i) {
    const T* row = x.row<T>(i / x.tokens / x.heads, i / x.tokens % x.heads, i % x.tokens);
    if (!is_finite(row, x.dim)) return false;
  }
  return true;
}

template <class Kind, class T, bool SYMMETRIC>
void quantize(const QuantizeCall& call, std::string_view granularity, int64_t group_size) {
  if (granularity == "layer") return quantize_over_tokens<Kind, T, SYMMETRIC>(call, Over::LAYER);
  if (granularity == "head") return quantize_over_tokens<Kind, T, SYMMETRIC>(call, Over::HEAD);
  if (granularity == "channel")
    return quantize_over_tokens<Kind, T, SYMMETRIC>(call, Over::CHANNEL);
  const int64_t size = granularity == "group" ? group_size : call.x.dim;
  quantize_tokens<Kind, T, SYMMETRIC>(call, granularity == "token", size);
}

std::optional<Type> type_named(std::string_view storage) {
  if (storage == "int8") return Type::INT8;
  if (storage == "int4") return Type::INT4;
  if (storage == "fp8_e4m3") return Type::E4M3;
  if (storage == "fp8_e5m2") return Type::E5M2;
  return std::nullopt;
}

// The shape of the scales; empty where there is no such granularity.
std::vector<int64_t> scale_sizes(
    const DenseRows& x, std::string_view granularity, int64_t group_size) {
  if (granularity == "layer") return {x.batch, 1, 1, 1};
  if (granularity == "head") return {x.batch, x.heads, 1, 1};
  if (granularity == "token") return {x.batch, 1, x.tokens, 1};
  if (granularity == "token_head") return {x.batch, x.heads, x.tokens, 1};
  if (granularity == "channel") return {x.batch, x.heads, 1, x.dim};
  if (granularity == "group" && group_size > 0 && x.dim % group_size == 0)
    return {x.batch, x.heads, x.tokens, x.dim / group_size};
  return {};
}

}  // namespace

std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> kv_cache_quantize(
    const at::Tensor& given, c10::string_view named, bool symmetric, const MaybeTensor& scale,
    const MaybeTensor& zero_point, int64_t group_size, c10::string_view storage) {
  const std::string_view granularity(named.data(), named.size());
  const auto type = type_of(given), stored = type_named({storage.data(), storage.size()});
  if (!type || is_quantized(*type) || given.dim() != 4 || given.numel() == 0 || !stored) return {};
  const at::Tensor x = channels_together(given);
  const DenseRows rows = dense_rows(x, *type);
  const std::vector<int64_t> sizes = scale_sizes(rows, granularity, group_size);
  if (sizes.empty() || (scale && symmetric == zero_point.has_value()) || (zero_point && !scale))
    return {};
  const bool int4 = *stored == Type::INT4, fp8 = !int4 && *stored != Type::INT8;
  if ((int4 && (scale || rows.dim % 2 || group_size % 2)) || (fp8 && !symmetric)) return {};

  std::vector<int64_t> code_sizes = x.sizes().vec();
  if (int4) code_sizes[3] /= 2;
  at::Tensor codes = at::empty(code_sizes, x.options().dtype(scalar_type_of(*stored)));
  const auto floats = x.options().dtype(at::kFloat);
  QuantizeCall call{rows, static_cast<char*>(codes.mutable_data_ptr()), nullptr, nullptr};
  const auto with_types = [&](auto&& f) {
    with_kind(*stored, [&](auto kind) {
      with_float_type(*type, [&](auto value) { f(kind, value); });
    });
  };
  if (scale) {
    const int64_t group = granularity == "group" ? group_size : 1;
    const auto scales = read_broadcast(*scale, rows, group);
    std::optional<Broadcast> zeros = Broadcast{};
    if (zero_point) zeros = read_broadcast(*zero_point, rows, group);
    bool finite = true;
    with_float_type(*type, [&](auto t) { finite = are_finite<decltype(t)>(rows); });
    if (!scales || !zeros || !finite) return {};
    with_types([&](auto kind, auto value) {
      quantize_given<decltype(kind), decltype(value)>(call, *scales, *zeros);
    });
    const auto copy = [](const at::Tensor& t) { return t.clone(at::MemoryFormat::Contiguous); };
    return std::make_tuple(
        codes, copy(*scale), zero_point ? copy(*zero_point) : at::empty({0}, floats));
  }
  at::Tensor scales = at::empty(sizes, floats);
  at::Tensor zeros = symmetric ? at::empty({0}, floats) : at::empty(sizes, floats);
  call.scale = scales.mutable_data_ptr<float>();
  call.zero_point = symmetric ? nullptr : zeros.mutable_data_ptr<float>();
  with_types([&](auto kind, auto value) {
    using Kind = decltype(kind);
    using T = decltype(value);
    if constexpr (Kind::WHOLE)
      if (!symmetric) return quantize<Kind, T, false>(call, granularity, group_size);
    quantize<Kind, T, true>(call, granularity, group_size);
  });
  if (int4) scales = scales.to(at::kHalf), zeros = zeros.to(at::kHalf);
  return std::make_tuple(codes, scales, zeros);
}

}  // namespace ascend_kv::cpu
