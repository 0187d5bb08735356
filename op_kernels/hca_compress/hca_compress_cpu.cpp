// hca_compress on a CPU. What it computes is said in ascend_kv/ops/hca_compress.py: here window by
// window, one vector of channels at a time, the weights of its slots kept in between.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/cpu_operators.h"
#include "../common/cpu_tensors.h"

namespace ascend_kv::cpu {
namespace {

// Values or gates [T, C], and those of the window before this call [B, ratio, D].
struct Tokens {
  const char* data = nullptr;
  int64_t token = 0;  // in bytes, as the others
  const char* previous = nullptr;
  int64_t previous_sequence = 0, previous_token = 0;
};

struct Window {
  int64_t row;  // of its first token
  int64_t number, sequence;
  bool first;  // of its sequence in this call
};

struct CompressCall {
  Tokens kv, gate;
  Type type;
  int64_t ratio, dim;
  bool overlap;
  const float* bias = nullptr;  // [ratio, C], contiguous
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  const float* turns = nullptr;  // [P, rotary_dim / 2, 2], contiguous
  int64_t rotary_dim = 0;
  std::vector<Window> windows;
};

// The slots that a window mixes: where a slot's channels lie, and the bias of its gate.
template <class T>
struct Slots {
  const CompressCall& call;
  const Window& window;

  // The first D channels of the window before, if there is one: then its own, the last D.
  int64_t begin() const { return call.overlap && window.number > 0 ? -call.ratio : 0; }
  const T* at(const Tokens& x, int64_t slot) const {
    const int64_t bytes = bytes_of_type(call.type);
    if (slot >= 0) {
      const int64_t own = call.overlap ? call.dim : 0;
      return reinterpret_cast<const T*>(x.data + (window.row + slot) * x.token + own * bytes);
    }
    if (!window.first)
      return reinterpret_cast<const T*>(x.data + (window.row + slot) * x.token);
    return reinterpret_cast<const T*>(
        x.previous + window.sequence * x.previous_sequence +
        (slot + call.ratio) * x.previous_token);
  }
  const float* bias(int64_t slot) const {
    const int64_t channels = call.overlap ? 2 * call.dim : call.dim;
    if (slot < 0) return call.bias + (slot + call.ratio) * channels;
    return call.bias + slot * channels + (call.overlap ? call.dim : 0);
  }
};

// Softmax of the gates, and the weighted values, for one vector of channels; `weights` holds one
// vector for each slot.
template <class T>
Vec pool(const Slots<T>& slots, int64_t c, int count, Vec* weights) {
  const CompressCall& call = slots.call;
  Vec most = broadcast(-std::numeric_limits<float>::infinity());
  Vec* next = weights;
  for (int64_t slot = slots.begin(); slot < call.ratio; ++slot) {
    Vec score = load_at(slots.at(call.gate, slot), c, count);
    if (call.bias) score = score + load_at(slots.bias(slot), c, count);
    most = larger(score, most);
    *next++ = score;
  }
  Vec total{};
  for (Vec* w = weights; w < next; ++w) {
    *w = exp_negative(*w - most);  // NaN where all slots are left out
    total = total + *w;
  }
  const Vec share = 1.0f / total;
  Vec pooled{};
  next = weights;
  for (int64_t slot = slots.begin(); slot < call.ratio; ++slot)
    pooled = fma(*next++ * share, load_at(slots.at(call.kv, slot), c, count), pooled);
  return pooled;
}

// Norm and rotary embedding of an entry, in place.
void finish(const CompressCall& call, const Window& window, float* entry) {
  if (call.norm_weight) {
    Vec squares{};
    for_vectors(call.dim, [&](int64_t c, int count) {
      const Vec x = load_at(entry, c, count);
      squares = fma(x, x, squares);
    });
    const float mean = sum(squares) / static_cast<float>(call.dim);
    const float factor = 1.0f / std::sqrt(mean + call.norm_eps);
    for (int64_t c = 0; c < call.dim; ++c) entry[c] = entry[c] * factor * call.norm_weight[c];
  }
  if (!call.turns) return;
  const float* turns = call.turns + call.ratio * window.number * call.rotary_dim;
  float* pairs = entry + call.dim - call.rotary_dim;
  for (int64_t i = 0; i < call.rotary_dim; i += 2) {
    const float first = pairs[i], second = pairs[i + 1];
    pairs[i] = first * turns[i] - second * turns[i + 1];
    pairs[i + 1] = second * turns[i] + first * turns[i + 1];
  }
}

template <class To>
void compress(const CompressCall& call, To* out) {
  if (call.windows.empty()) return;  // then the ratio may be of any size
  const int64_t work = call.ratio * call.dim * (call.overlap ? 2 : 1);
  const int64_t grain = std::max<int64_t>(1, GRAIN_VALUES / work);
  const auto count = static_cast<int64_t>(call.windows.size());
  with_float_type(call.type, [&](auto type) {
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      std::vector<Vec> weights(2 * call.ratio);
      std::vector<float> entry(call.dim);
      for (int64_t w = begin; w < end; ++w) {
        const Slots<decltype(type)> slots{call, call.windows[w]};
        for_vectors(call.dim, [&](int64_t c, int n) {
          store_at(entry.data(), c, n, pool(slots, c, n, weights.data()));
        });
        finish(call, call.windows[w], entry.data());
        for_vectors(call.dim, [&](int64_t c, int n) {
          store_at(out + w * call.dim, c, n, load_at(entry.data(), c, n));
        });
      }
    });
  });
}

at::Tensor as_floats(const at::Tensor& x) { return x.to(at::kFloat).contiguous(); }

bool read_source(
    const at::Tensor& x, const MaybeTensor& previous, int64_t sequences, int64_t ratio,
    int64_t dim, Tokens& out) {
  const int64_t bytes = x.element_size();
  out.data = static_cast<const char*>(x.const_data_ptr());
  out.token = x.stride(0) * bytes;
  if (!previous) return true;
  if (previous->sizes() != at::IntArrayRef{sequences, ratio, dim} ||
      previous->scalar_type() != x.scalar_type())
    return false;
  out.previous = static_cast<const char*>(previous->const_data_ptr());
  out.previous_sequence = previous->stride(0) * bytes;
  out.previous_token = previous->stride(1) * bytes;
  return true;
}

}  // namespace

std::optional<at::Tensor> hca_compress(
    const at::Tensor& kv, const at::Tensor& gate, at::IntArrayRef lengths, int64_t ratio,
    const MaybeTensor& position_bias, bool overlap, at::OptionalIntArrayRef first_windows,
    const MaybeTensor& previous_kv, const MaybeTensor& previous_gate,
    const MaybeTensor& norm_weight, double norm_eps, const MaybeTensor& rotary_table,
    int64_t rotary_dim, std::optional<at::ScalarType> dtype) {
  const auto type = type_of(kv);
  if (!type || is_quantized(*type) || kv.dim() != 2 || gate.sizes() != kv.sizes() ||
      gate.scalar_type() != kv.scalar_type() || ratio < 1 || kv.size(1) == 0 ||
      (overlap && kv.size(1) % 2))
    return {};
  const at::Tensor values = channels_together(kv), gates = channels_together(gate);
  CompressCall call;
  call.type = *type, call.ratio = ratio, call.overlap = overlap;
  call.dim = overlap ? kv.size(1) / 2 : kv.size(1);
  const auto sequences = static_cast<int64_t>(lengths.size());
  if (first_windows && first_windows->size() != lengths.size()) return {};
  if (previous_kv.has_value() != previous_gate.has_value()) return {};
  MaybeTensor before_kv, before_gate;
  if (previous_kv) {
    before_kv = channels_together(*previous_kv);
    before_gate = channels_together(*previous_gate);
  }
  if (!read_source(values, before_kv, sequences, ratio, call.dim, call.kv) ||
      !read_source(gates, before_gate, sequences, ratio, call.dim, call.gate))
    return {};
  int64_t start = 0, last = -1;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t first = first_windows ? (*first_windows)[s] : 0, count = lengths[s] / ratio;
    if (lengths[s] < 0 || first < 0 || (overlap && first && count && !previous_kv)) return {};
    for (int64_t w = 0; w < count; ++w)
      call.windows.push_back({start + w * ratio, first + w, s, w == 0});
    if (count) last = std::max(last, first + count - 1);
    start += lengths[s];
  }
  if (start != kv.size(0)) return {};

  at::Tensor bias, weight, table;
  if (position_bias) {
    if (position_bias->sizes() != at::IntArrayRef{ratio, kv.size(1)}) return {};
    bias = as_floats(*position_bias);
    call.bias = bias.const_data_ptr<float>();
  }
  if (norm_weight) {
    if (norm_weight->sizes() != at::IntArrayRef{call.dim}) return {};
    weight = as_floats(*norm_weight);
    call.norm_weight = weight.const_data_ptr<float>();
    call.norm_eps = static_cast<float>(norm_eps);
  }
  if (rotary_table) {
    if (rotary_dim <= 0 || rotary_dim % 2 || rotary_dim > call.dim || rotary_table->dim() != 3 ||
        rotary_table->size(1) != rotary_dim / 2 || rotary_table->size(2) != 2 ||
        (last >= 0 && (!rotary_table->size(0) || (rotary_table->size(0) - 1) / ratio < last)))
      return {};
    table = as_floats(*rotary_table);
    call.turns = table.const_data_ptr<float>();
    call.rotary_dim = rotary_dim;
  } else if (rotary_dim) {
    return {};
  }
  const at::ScalarType result = dtype.value_or(kv.scalar_type());
  if (!is_float(result)) return {};
  at::Tensor out = at::empty(
      {static_cast<int64_t>(call.windows.size()), call.dim}, kv.options().dtype(result));
  with_float_type(*type_of(out), [&](auto to) {
    compress(call, static_cast<decltype(to)*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace ascend_kv::cpu
