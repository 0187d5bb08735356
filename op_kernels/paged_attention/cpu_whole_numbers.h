// Which floats can be rounded to whole numbers against the largest of them.
#pragma once

#include <limits>

#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

// The largest magnitude of a row that fills whole vectors; NaN where one is NaN. Without SIGNS the
// row's own largest, and what has no whole numbers where one has a sign.
template <bool SIGNS>
inline float largest_size(const float* row, int64_t count) {
  Words most{};
  for (int64_t c = 0; c < count; c += LANES) {
    const Vec x = load(row + c);
    most = larger_bits(most, bits_of<Words>(SIGNS ? magnitude(x) : x));
  }
  return bits_of<float>(largest_bits(most));
}

// 0, or a number whose inverse times 2^24 is one too.
inline bool has_whole_numbers(float size) {
  return bits_of<uint32_t>(size) == 0 ||
         (size >= 0x1p-100f && size <= std::numeric_limits<float>::max());
}

}  // namespace ascend_kv::cpu
