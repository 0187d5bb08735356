// Asks for what lies elsewhere in memory and is needed soon.
#pragma once

#include <cstdint>

namespace ascend_kv::cpu {

constexpr int64_t LINE_BYTES = 64;

// Into the second-level cache: it takes more requests at a time than the first.
inline void ask_for(const void* stored, int64_t bytes) {
  for (int64_t c = 0; c < bytes; c += LINE_BYTES)
    __builtin_prefetch(static_cast<const char*>(stored) + c, 0, 2);
}

}  // namespace ascend_kv::cpu
