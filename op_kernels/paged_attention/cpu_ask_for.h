// Asks for what lies elsewhere in memory and is needed soon.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu_softmax.h"

namespace ascend_kv::cpu {

constexpr int64_t LINE_BYTES = 64;

// Into the second-level cache: it takes more requests at a time than the first.
inline void ask_for(const void* stored, int64_t bytes) {
  for (int64_t c = 0; c < bytes; c += LINE_BYTES)
    __builtin_prefetch(static_cast<const char*>(stored) + c, 0, 2);
}

// So many tokens ahead a vector is asked for: soon enough for main memory (measured: of 16, 32, 48
// and 64, 32 was the fastest or near it).
constexpr int AHEAD = 32;

// The keys and values of the next tile, asked for in pieces: all at once they would keep what is
// needed first waiting.
class Upcoming {
 public:
  // TILE addresses each of vectors of so many bytes, null where they are not wanted.
  void start(
      const void* const* keys, int64_t key_bytes, const void* const* values, int64_t value_bytes) {
    now_ = keys ? keys : values;
    bytes_ = keys ? key_bytes : value_bytes;
    then_ = keys ? values : nullptr;
    then_bytes_ = value_bytes;
    left_ = TILE;
  }

  // Some vectors, 8 lines of common ones. To be called often.
  void ask_for_some() {
    if (left_ == 0) {
      if (!then_) return;
      now_ = std::exchange(then_, nullptr), bytes_ = then_bytes_, left_ = TILE;
    }
    const int count = bytes_ <= LINE_BYTES ? 8 : 4;
    for (int i = 0; i < count; ++i) ask_for(now_[i], bytes_);
    now_ += count, left_ -= count;
  }
  // When the tile ends: the next one is needed now.
  void ask_for_rest() {
    while (left_ || then_) ask_for_some();
  }

 private:
  const void *const *now_ = nullptr, *const *then_ = nullptr;
  int left_ = 0;  // of now_
  int64_t bytes_ = 0, then_bytes_ = 0;
};

}  // namespace ascend_kv::cpu
