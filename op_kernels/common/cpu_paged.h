// One side of a paged cache, keys or values, as the CPU operators read it: addresses and strides,
// no tensors. What the tensors hold is said in ascend_kv/ops/kv_cache_store.py; letters: geometry.py.
#pragma once

#include <cstdint>

#include "cpu_vector.h"

namespace ascend_kv::cpu {

enum class Type : int { FLOAT, HALF, BFLOAT, INT8 };

constexpr int64_t bytes_of_type(Type type) {
  return type == Type::FLOAT ? 4 : type == Type::INT8 ? 1 : 2;
}

// f with a value of the float type that is stored; or of any, INT8 too.
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
  if (type == Type::INT8) f(int8_t{});
  else with_float_type(type, f);
}

// Scales or zero points; null data: there are none.
struct Parameter {
  enum Kind { NONE, TOKEN, GROUP, STATIC };

  float* data = nullptr;
  Kind kind = NONE;
  // in elements; 0 where a size of 1 stands for all. STATIC: head and channel only
  int64_t block = 0, head = 0, token = 0, channel = 0;
  int64_t group_size = 0;  // GROUP: channels of a group

  float* at(int64_t b, int64_t n, int64_t s) const {
    return data + b * block + n * head + s * token;
  }
  // STATIC
  float fixed(int64_t n, int64_t c) const { return data[n * head + c * channel]; }
  float of_channel(int64_t b, int64_t n, int64_t s, int64_t c) const {
    if (kind == STATIC) return fixed(n, c);
    return at(b, n, s)[kind == GROUP ? c / group_size * channel : 0];
  }
};

struct Side {
  char* data = nullptr;
  Type type = Type::FLOAT;
  int64_t block = 0, head = 0, token = 0;  // in bytes; channels lie side by side
  Parameter scale, zero_point;

  char* at(int64_t b, int64_t n, int64_t s) const { return data + b * block + n * head + s * token; }
};

}  // namespace ascend_kv::cpu
