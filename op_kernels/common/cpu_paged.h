// One side of a paged cache, keys or values, as the CPU operators read it: addresses and strides,
// no tensors. What the tensors hold is said in ascend_kv/ops/kv_cache_store.py; letters: geometry.py.
#pragma once

#include <cstdint>

#include "cpu_vector.h"

namespace ascend_kv::cpu {

enum class Type : int { FLOAT, HALF, BFLOAT, INT8, E4M3, E5M2, INT4 };

constexpr bool is_quantized(Type type) { return type >= Type::INT8; }

// Of an element, which holds two channels of INT4.
constexpr int64_t bytes_of_type(Type type) {
  return type == Type::FLOAT ? 4 : is_quantized(type) ? 1 : 2;
}

// f with a value of the float type that is stored; or of any, quantized ones too.
template <class F>
inline void with_float_type(Type type, F&& f) {
  switch (type) {
    case Type::HALF: return f(Half{});
    case Type::BFLOAT: return f(BFloat{});
    default: return f(float{});
  }
}
template <class F>
inline void with_type(Type type, F&& f) {
  switch (type) {
    case Type::INT8: return f(int8_t{});
    case Type::E4M3: return f(E4M3{});
    case Type::E5M2: return f(E5M2{});
    case Type::INT4: return f(Nibbles{});
    default: return with_float_type(type, f);
  }
}

// Scales or zero points, float32 or half; null data: there are none.
struct Parameter {
  enum Kind { NONE, TOKEN, GROUP, STATIC };

  void* data = nullptr;
  bool half = false;
  Kind kind = NONE;
  // in elements; 0 where a size of 1 stands for all. STATIC: head and channel only
  int64_t block = 0, head = 0, token = 0, channel = 0;
  int64_t group_size = 0;  // GROUP: channels of a group; 1: a channel for the tokens of a block

  bool by_block() const { return kind == GROUP && group_size == 1; }
  // by_block, with channels side by side: some of a block's, from channel c.
  Vec of_block(int64_t place, int64_t c, int count) const {
    return half ? load_at(static_cast<const Half*>(data) + place, c, count)
                : load_at(static_cast<const float*>(data) + place, c, count);
  }

  // Of a token, or of its first group.
  int64_t place(int64_t b, int64_t n, int64_t s) const { return b * block + n * head + s * token; }
  float get(int64_t place) const {
    return half ? to_float(static_cast<Half*>(data)[place]) : static_cast<float*>(data)[place];
  }
  void set(int64_t place, float value) const {
    if (half) store_some(static_cast<Half*>(data) + place, broadcast(value), 1);
    else static_cast<float*>(data)[place] = value;
  }
  const void* address(int64_t place) const {
    return static_cast<char*>(data) + place * (half ? sizeof(Half) : sizeof(float));
  }
  // STATIC
  float fixed(int64_t n, int64_t c) const { return get(n * head + c * channel); }
  float of_channel(int64_t b, int64_t n, int64_t s, int64_t c) const {
    if (kind == STATIC) return fixed(n, c);
    return get(place(b, n, s) + (kind == GROUP ? c / group_size * channel : 0));
  }
  // The tokens s to s + count of one block, each with one.
  void get_tokens(int64_t b, int64_t n, int64_t s, int count, float* out) const {
    const int64_t first = place(b, n, s);
    const auto copy = [&](const auto* from) {
      for_vectors(count, [&](int64_t c, int some) { store_at(out, c, some, load_at(from, c, some)); });
    };
    if (token != 1) for (int i = 0; i < count; ++i) out[i] = get(first + i * token);
    else if (half) copy(static_cast<Half*>(data) + first);
    else copy(static_cast<float*>(data) + first);
  }
};

// Whether of_block reads the scales, and the zero points if there are any.
inline bool read_by_block(const Parameter& scale, const Parameter& zero_point) {
  return scale.by_block() && scale.channel == 1 && (!zero_point.data || zero_point.channel == 1);
}

struct Side {
  char* data = nullptr;
  Type type = Type::FLOAT;
  int64_t block = 0, head = 0, token = 0;  // in bytes; channels lie side by side
  Parameter scale, zero_point;

  char* at(int64_t b, int64_t n, int64_t s) const { return data + b * block + n * head + s * token; }
};

}  // namespace ascend_kv::cpu
