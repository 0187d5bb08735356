// kv_cache_store on a CPU. What it writes is said in ascend_kv/ops/kv_cache_store.py.
//
// Tokens are shared out among threads by their slot, so that a slot that is named twice holds one
// of the two tokens, the later one, and never a mixture.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "../common/cpu_operators.h"
#include "../common/cpu_quantized.h"
#include "../common/cpu_tensors.h"

namespace ascend_kv::cpu {
namespace {

// Neighbouring slots stay with one thread.
constexpr int64_t STRIPE_SLOTS = 16;

struct NewTokens {
  const char* data;
  Type type;
  int64_t token, head;  // strides in bytes
};

struct Slot {
  int64_t block, offset;
};

// One side of one token.
template <class T>
struct Writer {
  const NewTokens& from;
  const Side& cache;
  int64_t heads, dim;

  const T* row(int64_t token, int64_t head) const {
    return reinterpret_cast<const T*>(from.data + token * from.token + head * from.head);
  }
  template <class Kind>
  typename Kind::Code* codes(Slot s, int64_t head) const {
    return reinterpret_cast<typename Kind::Code*>(cache.at(s.block, head, s.offset));
  }

  template <class To>
  void convert(int64_t token, Slot s) const {
    for (int64_t n = 0; n < heads; ++n) {
      const T* x = row(token, n);
      To* to = reinterpret_cast<To*>(cache.at(s.block, n, s.offset));
      for_vectors(
          dim, [&](int64_t c, int count) { store_at(to, c, count, load_at(x, c, count)); });
    }
  }

  // Scales of its own: one for all heads, one a head, or one for each group of channels.
  template <class Kind, bool SYMMETRIC>
  void quantize(int64_t token, Slot s, bool heads_together) const {
    const Parameter &scale = cache.scale, &zero = cache.zero_point;
    const int64_t together = heads_together ? heads : 1;
    const bool grouped = scale.kind == Parameter::GROUP;
    const int64_t size = grouped ? scale.group_size : dim;
    for (int64_t first = 0; first < heads; first += together) {
      for (int64_t c = 0; c < dim; c += size) {
        GroupRange<SYMMETRIC> range;
        for (int64_t n = first; n < first + together; ++n) range.add(row(token, n) + c, size);
        const auto [step, zero_point] = range.template scale<Kind>();
        for (int64_t n = first; n < first + together; ++n)
          encode_row<Kind>(
              row(token, n) + c, size, step, SYMMETRIC ? nullptr : &zero_point,
              past(codes<Kind>(s, n), c));
        const int64_t group = c / size;
        scale.set(scale.place(s.block, first, s.offset) + group * scale.channel, step);
        if (!SYMMETRIC)
          zero.set(zero.place(s.block, first, s.offset) + group * zero.channel, zero_point);
      }
    }
  }

  // Scales that are given. `spread` holds 2 * dim floats.
  template <class Kind>
  void quantize_given(int64_t token, Slot s, float* spread) const {
    const auto fill = [&](const Parameter& p, int64_t n, float* to) {
      for (int64_t c = 0; c < dim; ++c) to[c] = p.of_channel(s.block, n, s.offset, c);
      return to;
    };
    for (int64_t n = 0; n < heads; ++n) {
      const float* scales = fill(cache.scale, n, spread);
      const float* zeros = cache.zero_point.data ? fill(cache.zero_point, n, spread + dim) : nullptr;
      encode_row<Kind>(row(token, n), dim, scales, zeros, codes<Kind>(s, n));
    }
  }

  void store(int64_t token, Slot s, bool dynamic, bool heads_together, float* spread) const {
    switch (cache.type) {
      case Type::FLOAT: return convert<float>(token, s);
      case Type::HALF: return convert<Half>(token, s);
      case Type::BFLOAT: return convert<BFloat>(token, s);
      default: break;
    }
    with_kind(cache.type, [&](auto kind) {
      using Kind = decltype(kind);
      if (!dynamic) return quantize_given<Kind>(token, s, spread);
      if constexpr (Kind::WHOLE)
        if (cache.zero_point.data) return quantize<Kind, false>(token, s, heads_together);
      quantize<Kind, true>(token, s, heads_together);
    });
  }

  bool token_is_finite(int64_t token) const {
    for (int64_t n = 0; n < heads; ++n)
      if (!is_finite(row(token, n), dim)) return false;
    return true;
  }
};

struct StoreCall {
  NewTokens key_from, value_from;
  Side key, value;
  int64_t tokens, heads, dim, block_size;
  bool dynamic, key_together, value_together;
  int32_t* key_positions = nullptr;
  int64_t position_block = 0, position_head = 0, position_token = 0;
};

// The tokens of thread `part` of `parts`.
void store_part(
    const StoreCall& call, const std::vector<int64_t>& slots, const IntReader* positions,
    int64_t part, int64_t parts) {
  std::vector<std::pair<int64_t, Slot>> mine;
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int64_t slot = slots[t];
    if (slot >= 0 && slot / STRIPE_SLOTS % parts == part)
      mine.push_back({t, {slot / call.block_size, slot % call.block_size}});
  }
  std::vector<float> spread(call.dynamic ? 0 : 2 * call.dim);
  const auto side = [&](const NewTokens& from, const Side& cache, bool together) {
    with_float_type(from.type, [&](auto type) {
      const Writer<decltype(type)> writer{from, cache, call.heads, call.dim};
      for (const auto& [token, slot] : mine)
        writer.store(token, slot, call.dynamic, together, spread.data());
    });
  };
  side(call.key_from, call.key, call.key_together);
  side(call.value_from, call.value, call.value_together);
  if (!positions) return;
  for (const auto& [token, slot] : mine) {
    int32_t* to = call.key_positions + slot.block * call.position_block +
                  slot.offset * call.position_token;
    for (int64_t n = 0; n < call.heads; ++n)
      to[n * call.position_head] = static_cast<int32_t>((*positions)(token));
  }
}

bool all_finite(const StoreCall& call, const NewTokens& from, const Side& cache,
                const std::vector<int64_t>& slots) {
  bool finite = true;
  with_float_type(from.type, [&](auto type) {
    const Writer<decltype(type)> writer{from, cache, call.heads, call.dim};
    for (int64_t t = 0; t < call.tokens && finite; ++t)
      finite = slots[t] < 0 || writer.token_is_finite(t);
  });
  return finite;
}

std::optional<NewTokens> read_tokens(const at::Tensor& x) {
  const auto type = type_of(x);
  if (!type || is_quantized(*type)) return std::nullopt;
  const int64_t bytes = bytes_of_type(*type);
  return NewTokens{
      static_cast<const char*>(x.const_data_ptr()), *type, x.stride(0) * bytes,
      x.stride(1) * bytes};
}

}  // namespace

bool kv_cache_store(
    const at::Tensor& given_key, const at::Tensor& given_value, at::Tensor& key_cache,
    at::Tensor& value_cache, const at::Tensor& slot_mapping, const MaybeTensor& key_scale,
    const MaybeTensor& value_scale, const MaybeTensor& key_zero_point,
    const MaybeTensor& value_zero_point, const MaybeTensor& key_positions,
    const MaybeTensor& positions, bool dynamic) {
  StoreCall call{};
  if (!caches_agree(key_cache, value_cache)) return false;
  if (!read_side(key_cache, key_scale, key_zero_point, call.key)) return false;
  if (!read_side(value_cache, value_scale, value_zero_point, call.value)) return false;
  const at::Tensor key = channels_together(given_key);
  const at::Tensor value = channels_together(given_value);
  if (key.dim() != 3 || value.sizes() != key.sizes()) return false;
  const auto key_from = read_tokens(key), value_from = read_tokens(value);
  if (!key_from || !value_from) return false;
  call.key_from = *key_from, call.value_from = *value_from;
  call.tokens = key.size(0), call.heads = key.size(1), call.dim = key.size(2);
  call.block_size = key_cache.size(2), call.dynamic = dynamic;
  if (call.heads != key_cache.size(1) || call.dim != channels_of(key_cache)) return false;
  if (slot_mapping.sizes() != at::IntArrayRef{call.tokens} || !is_int(slot_mapping)) return false;
  for (const Side* side : {&call.key, &call.value})
    if (dynamic ? side->scale.kind == Parameter::STATIC : side->type == Type::INT4) return false;
  // a scale of [K, 1, S] is for all heads, with one head it is the head's
  call.key_together = key_scale && key_scale->size(1) != call.heads;
  call.value_together = value_scale && value_scale->size(1) != call.heads;

  std::optional<IntReader> places;
  if (key_positions.has_value() != positions.has_value()) return false;
  if (key_positions) {
    if (key_positions->scalar_type() != at::kInt || !is_int(*positions) ||
        key_positions->sizes() != key_cache.sizes().slice(0, 3) ||
        positions->sizes() != slot_mapping.sizes())
      return false;
    call.key_positions = const_cast<int32_t*>(key_positions->const_data_ptr<int32_t>());
    call.position_block = key_positions->stride(0);
    call.position_head = key_positions->stride(1);
    call.position_token = key_positions->stride(2);
    places.emplace(*positions);
  }
  const IntReader read(slot_mapping);
  const int64_t num_slots = key_cache.size(0) * call.block_size;
  std::vector<int64_t> slots(call.tokens);
  for (int64_t t = 0; t < call.tokens; ++t) {
    slots[t] = read(t);
    if (slots[t] < -1 || slots[t] >= num_slots) return false;
  }
  if (!dynamic) {  // before anything is written
    if (key_scale && !all_finite(call, call.key_from, call.key, slots)) return false;
    if (value_scale && !all_finite(call, call.value_from, call.value, slots)) return false;
  }
  const int64_t values = call.tokens * call.heads * call.dim;
  const int64_t parts =
      std::clamp<int64_t>(values / GRAIN_VALUES, 1, std::max(1, at::get_num_threads()));
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      store_part(call, slots, places ? &*places : nullptr, part, parts);
  });
  return true;
}

}  // namespace ascend_kv::cpu
