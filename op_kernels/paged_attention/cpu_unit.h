// What multiplies codes in whole numbers, where the CPU has something for it.
//
// A unit serves one item. Which side it serves is asked of each side (serves); then it gets memory
// (floats), and the queries once (load_rows). For each tile come start_tile, then dot where it
// serves keys, with take_values in the middle of it, or take_values alone where it serves values
// only; then scale for rows whose sums so far shrink, and take_weights. weigh ends what may still
// wait, before add_sums. What load_rows or take_weights refuse the caller computes in float32.
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
  static int bits() { return 0; }
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
