// What multiplies codes in whole numbers, where the CPU has something for it.
#pragma once

#include "cpu_matrix_unit.h"
#include "cpu_word_unit.h"

namespace ascend_kv::cpu {

#if defined(ASCEND_KV_AMX)
using Unit = MatrixUnit;
#elif defined(ASCEND_KV_AVX2)
using Unit = WordUnit;
#else

class NoUnit {
 public:
  static bool serves(const Side&, int, int64_t) { return false; }
  static int64_t floats(int, int64_t) { return 0; }
  NoUnit(const Side&, const Side&, int, int64_t, float*) {}
  bool load_rows(const float*, int64_t) { return false; }
  void start_tile(const void* const*, const void* const*) {}
  void ask_for_some() {}
  template <class F>
  void dot(const void* const*, int, float*, F&&) {}
  void take_values(const void* const*, int) {}
  bool take_weights(const float*, int) { return false; }
  void weigh() {}
  void scale(int, float) {}
  void add_sums(float*, int64_t) const {}
};
using Unit = NoUnit;

#endif

}  // namespace ascend_kv::cpu
