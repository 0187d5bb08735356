// The quantized formats as ascend_kv/formats say them, to the bit: absmax or extremes of a group, its
// scale and zero point, its codes. Float32 operations round once each (-ffp-contract=off).
#pragma once

#include <limits>

#include "cpu_paged.h"
#include "cpu_vector.h"

namespace ascend_kv::cpu {

// What tells formats apart. Codes run from -LARGEST (asymmetric: one less) to LARGEST, in STEPS
// steps; MIDDLE steps above the lowest value lies the zero point.
struct Int8Kind {
  using Code = int8_t;
  static constexpr float LARGEST = 127.0f, STEPS = 255.0f, MIDDLE = 128.0f;
  static constexpr bool WHOLE = true, HALF_SCALES = false;
};
struct Int4Kind {
  using Code = Nibbles;
  static constexpr float LARGEST = 7.0f, STEPS = 15.0f, MIDDLE = 8.0f;
  static constexpr bool WHOLE = true, HALF_SCALES = true;
};
struct E4M3Kind {
  using Code = E4M3;
  static constexpr float LARGEST = 448.0f, STEPS = 0.0f, MIDDLE = 0.0f;
  static constexpr bool WHOLE = false, HALF_SCALES = false;
};
struct E5M2Kind {
  using Code = E5M2;
  static constexpr float LARGEST = 57344.0f, STEPS = 0.0f, MIDDLE = 0.0f;
  static constexpr bool WHOLE = false, HALF_SCALES = false;
};

// f with the kind of a quantized type.
template <class F>
inline void with_kind(Type type, F&& f) {
  switch (type) {
    case Type::INT4: return f(Int4Kind{});
    case Type::E4M3: return f(E4M3Kind{});
    case Type::E5M2: return f(E5M2Kind{});
    default: return f(Int8Kind{});
  }
}

template <class Kind>
inline float as_stored(float parameter) {
  return Kind::HALF_SCALES ? round_to_half(parameter) : parameter;
}

// What the vectors of a group have shown so far. A NaN or infinity makes `poison` NaN, or becomes the
// largest magnitude; either makes the scale NaN.
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
        high = bits_of<Vec>(larger_bits(bits_of<Words>(high), bits_of<Words>(magnitude(x))));
      } else {
        if (count < LANES)  // lanes past the end repeat the first instead of 0
          for (int l = count; l < LANES; ++l) x[l] = x[0];
        high = larger(x, high);
        low = smaller(x, low);
        poison = poison + (x - x);
      }
    });
  }

  // Scale, and zero point where asymmetric, as they are stored.
  template <class Kind>
  std::pair<float, float> scale() const {
    const float wrong = sum(poison);
    if constexpr (SYMMETRIC) {
      const float most = bits_of<float>(largest_bits(bits_of<Words>(high)));
      const float scale = as_stored<Kind>(most / Kind::LARGEST + (most - most) + wrong);
      return {Kind::HALF_SCALES ? scale + (scale - scale) : scale, 0.0f};
    } else {
      const float most = largest(high), least = smallest(low);
      const float scale = as_stored<Kind>(most / Kind::STEPS - least / Kind::STEPS);
      const float zero_point = as_stored<Kind>(least + Kind::MIDDLE * scale);
      const float poisoned = (zero_point - zero_point) + wrong;
      return {scale + poisoned, zero_point + poisoned};
    }
  }
};

// Whether none of `n` values is NaN or infinite.
template <class T>
inline bool is_finite(const T* from, int64_t n) {
  Vec poison{};
  for_vectors(n, [&](int64_t c, int count) {
    const Vec x = load_at(from, c, count);
    poison = poison + (x - x);
  });
  return sum(poison) == 0.0f;
}

// Codes of a vector of values, as floats: clamped, whole numbers to the nearest, half to even; 0 for
// what is no number of steps (0 / 0, a NaN scale, an infinity).
template <class Kind>
inline Vec codes_of(Vec x, Vec scale, float low) {
  Vec steps = x / scale;
  const Ints finite = magnitude(steps) < std::numeric_limits<float>::infinity();
  steps = finite ? steps : Vec{};
  steps = smaller(larger(steps, broadcast(low)), broadcast(Kind::LARGEST));
  if (!Kind::WHOLE) return steps;
  const Vec magic = broadcast(0x1.8p23f);  // the sum has no bits left for fractions
  return (steps + magic) - magic;
}

template <class Kind>
constexpr float lowest_code(bool symmetric) {
  return symmetric ? -Kind::LARGEST : -Kind::LARGEST - 1.0f;
}

// Whole codes by a product with 1 / scale, a fraction of the time of a division. A quotient below
// 128 and the product differ by less than 3e-5, so they round alike unless they lie near a tie:
// returns whether none did, and nothing was NaN or infinite. Else the codes are not valid.
template <class Kind, class T>
inline bool encode_by_product(
    const T* from, int64_t n, float inverse, float zero_point, float low, typename Kind::Code* to) {
  Ints clear = Ints{} == Ints{};
  const auto whole = [&](Vec x) {
    const Vec steps = (x - zero_point) * inverse;
    const Ints nearest_steps = nearest(steps), least = Ints{} + static_cast<int32_t>(low);
    clear = clear & (magnitude(steps - floats_of(nearest_steps)) < 0.4999f);
    return nearest_steps < least ? least : nearest_steps;
  };
  int64_t c = 0;
  if constexpr (std::is_same_v<typename Kind::Code, int8_t>) {
    for (; c + 4 * LANES <= n; c += 4 * LANES) {
      Ints codes[4];
      repeat<4>([&](auto i) { codes[i] = whole(load(from + c + i * LANES)); });
      store_saturated(to + c, codes);
    }
  }
  for_vectors(n - c, [&](int64_t i, int count) {
    const Vec codes = floats_of(whole(load_at(from, c + i, count)));
    store_at(to, c + i, count, smaller(codes, broadcast(Kind::LARGEST)));
  });
  return all(clear);
}

// `n` values with one scale.
template <class Kind, class T>
inline void encode_row(
    const T* from, int64_t n, float scale, const float* zero_point, typename Kind::Code* to) {
  const float zero = zero_point ? *zero_point : 0.0f, low = lowest_code<Kind>(!zero_point);
  // beyond, the inverse is not a normal number
  const bool usual = Kind::WHOLE && scale > 0x1p-126f && scale < 0x1p126f;
  if (usual && encode_by_product<Kind>(from, n, 1.0f / scale, zero, low, to)) return;
  for_vectors(n, [&](int64_t c, int count) {
    const Vec x = load_at(from, c, count) - zero;
    store_at(to, c, count, codes_of<Kind>(x, broadcast(scale), low));
  });
}

// The same with a scale (and zero point) for each value.
template <class Kind, class T>
inline void encode_row(
    const T* from, int64_t n, const float* scales, const float* zero_points,
    typename Kind::Code* to) {
  const float low = lowest_code<Kind>(!zero_points);
  for_vectors(n, [&](int64_t c, int count) {
    Vec x = load_at(from, c, count);
    if (zero_points) x = x - load_at(zero_points, c, count);
    store_at(to, c, count, codes_of<Kind>(x, load_at(scales, c, count), low));
  });
}

}  // namespace ascend_kv::cpu
