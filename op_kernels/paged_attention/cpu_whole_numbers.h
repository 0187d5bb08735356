// Which floats can be rounded to whole numbers against the largest of them.
#pragma once

#include <limits>

#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

// Of numbers that are not negative the larger has the larger bits, and NaN the largest.
inline Words larger_bits(Words a, Words b) { return a > b ? a : b; }
template <int D = LANES / 2>
inline uint32_t largest_bits(Words v) {
  if constexpr (D == 0) return v[0];
  else return largest_bits<D / 2>(larger_bits(v, bits_of<Words>(upper<D>(
                 bits_of<Vec>(v), bits_of<Vec>(v), Lanes{}))));
}

// The largest magnitude of a row that fills whole vectors; NaN where one is NaN.
inline float largest_size(const float* row, int64_t count) {
  Words most{};
  for (int64_t c = 0; c < count; c += LANES)
    most = larger_bits(most, bits_of<Words>(magnitude(load(row + c))));
  return bits_of<float>(largest_bits(most));
}

// 0, or a number whose inverse times 2^24 is one too.
inline bool has_whole_numbers(float size) {
  return size == 0 || (size >= 0x1p-100f && size <= std::numeric_limits<float>::max());
}

}  // namespace ascend_kv::cpu
