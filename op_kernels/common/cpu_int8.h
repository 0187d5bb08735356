// INT8 as ascend_kv/formats/int8.py says it, to the bit: absmax or extremes of a group, its scale
// and zero point, its codes. Float32 operations round once each (-ffp-contract=off).
#pragma once

#include <limits>

#include "cpu_vector.h"

namespace ascend_kv::cpu {

// What the vectors of a group have shown so far. A NaN or infinity makes `poison` NaN.
template <bool SYMMETRIC>
struct GroupRange {
  Vec high = broadcast(SYMMETRIC ? 0.0f : -std::numeric_limits<float>::infinity());
  Vec low = broadcast(std::numeric_limits<float>::infinity());
  Vec poison{};

  template <class T>
  void add(const T* from, int64_t n) {
    for_vectors(n, [&](int64_t c, int count) {
      Vec x = load_at(from, c, count);
      if constexpr (SYMMETRIC) {
        high = larger(magnitude(x), high);
      } else {
        if (count < LANES)  // lanes past the end repeat the first instead of 0
          for (int l = count; l < LANES; ++l) x[l] = x[0];
        high = larger(x, high);
        low = smaller(x, low);
      }
      poison = poison + (x - x);
    });
  }

  // Scale, and zero point where asymmetric.
  std::pair<float, float> scale() const {
    const float wrong = sum(poison), most = largest(high);
    if constexpr (SYMMETRIC) {
      return {most / 127.0f + wrong, 0.0f};
    } else {
      const float least = smallest(low);
      const float scale = most / 255.0f - least / 255.0f;
      const float zero_point = least + 128.0f * scale;
      const float poisoned = (zero_point - zero_point) + wrong;
      return {scale + poisoned, zero_point + poisoned};
    }
  }
};

// Codes of a vector of values, as floats: to the nearest, half to even, clamped; 0 for what is no
// number of steps (0 / 0, a NaN scale, an infinity).
inline Vec codes_of(Vec x, Vec scale, float low) {
  Vec steps = x / scale;
  const Ints finite = magnitude(steps) < std::numeric_limits<float>::infinity();
  steps = finite ? steps : Vec{};
  steps = smaller(larger(steps, broadcast(low)), broadcast(127.0f));
  const Vec magic = broadcast(0x1.8p23f);  // the sum has no bits left for fractions
  return (steps + magic) - magic;
}

constexpr float lowest_code(bool symmetric) { return symmetric ? -127.0f : -128.0f; }

// Codes by a product with 1 / scale, a fraction of the time of a division. A quotient below 128 and
// the product differ by less than 3e-5, so they round alike unless they lie near a tie: returns
// whether none did, and nothing was NaN or infinite. Else the codes are not valid.
template <class T>
inline bool encode_by_product(
    const T* from, int64_t n, float inverse, float zero_point, float low, int8_t* to) {
  const Vec magic = broadcast(0x1.8p23f);  // the sum has no bits left for fractions
  Ints clear = Ints{} == Ints{};
  for_vectors(n, [&](int64_t c, int count) {
    const Vec steps = (load_at(from, c, count) - zero_point) * inverse;
    const Vec whole = (steps + magic) - magic;
    clear = clear & (magnitude(steps - whole) < 0.4999f);
    store_at(to, c, count, smaller(larger(whole, broadcast(low)), broadcast(127.0f)));
  });
  return all(clear);
}

// `n` values with one scale.
template <class T>
inline void encode_row(const T* from, int64_t n, float scale, const float* zero_point, int8_t* to) {
  const float zero = zero_point ? *zero_point : 0.0f, low = lowest_code(!zero_point);
  // beyond, the inverse is not a normal number
  const bool usual = scale > 0x1p-126f && scale < 0x1p126f;
  if (usual && encode_by_product(from, n, 1.0f / scale, zero, low, to)) return;
  for_vectors(n, [&](int64_t c, int count) {
    const Vec x = load_at(from, c, count) - zero;
    store_at(to, c, count, codes_of(x, broadcast(scale), low));
  });
}

// The same with a scale (and zero point) for each value.
template <class T>
inline void encode_row(
    const T* from, int64_t n, const float* scales, const float* zero_points, int8_t* to) {
  const float low = lowest_code(!zero_points);
  for_vectors(n, [&](int64_t c, int count) {
    Vec x = load_at(from, c, count);
    if (zero_points) x = x - load_at(zero_points, c, count);
    store_at(to, c, count, codes_of(x, load_at(scales, c, count), low));
  });
}

}  // namespace ascend_kv::cpu
