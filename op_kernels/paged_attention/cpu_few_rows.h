// Products of a few rows (queries, or weights of queries) with cached tokens, read where they lie
// and converted on the way: what a decode does. All rows share each read. While a token is worked
// on, the one that has its place in the next tile (`upcoming`) is asked for: a cache lies in blocks
// all over the memory, and no hardware guesses where the next one is.
#pragma once

#include <algorithm>

#include "../common/cpu_vector.h"
#include "cpu_ask_for.h"
#include "cpu_turned_keys.h"

namespace ascend_kv::cpu {

#define ASCEND_KV_INLINED __attribute__((always_inline))
#define ASCEND_KV_INLINE inline ASCEND_KV_INLINED

// Sums that stay in registers, beside what is loaded: AVX2 has 16 registers, the others 32, and
// AVX-512 multiplies with what lies in memory.
constexpr int SUMS = LANES == 8 ? 8 : LANES == 16 ? 28 : 16;
constexpr int MOST_ROWS = LANES == 8 ? 4 : 8;

// Products of R rows with K keys, channel by channel: parts[r * LANES + k] is a vector whose sum is
// rows[r] . keys[k].
template <class T, int R, int K>
ASCEND_KV_INLINE void dot_keys(
    const float* rows, int64_t row_stride, const void* const* keys, const void* const* upcoming,
    int64_t dim, Vec* parts) {
  const T* from[K];
  Vec sums[R][K];
  repeat<K>([&](auto k) {
    from[k] = static_cast<const T*>(keys[k]);
    ask_for(upcoming[k], bytes_of_channels<T>(dim));
    repeat<R>([&](auto r) { sums[r][k] = Vec{}; });
  });
  const auto add = [&](int64_t at, auto&& read_key) ASCEND_KV_INLINED {
    Vec x[K];
    repeat<K>([&](auto k) { x[k] = read_key(past(from[k], at)); });
    repeat<R>([&](auto r) {
      const Vec q = load(rows + r * row_stride + at);
      repeat<K>([&](auto k) { sums[r][k] = fma(q, x[k], sums[r][k]); });
    });
  };
  int64_t c = 0;
  for (; c + LANES <= dim; c += LANES) add(c, [](const T* x) { return load(x); });
  const int rest = static_cast<int>(dim - c);
  if (rest) add(c, [&](const T* x) { return load_some(x, rest); });
  repeat<R>([&](auto r) { repeat<K>([&](auto k) { parts[r * LANES + k] = sums[r][k]; }); });
}

// scores[r][k] = rows[r] . keys[k], for `count` keys, a multiple of LANES.
template <class T, int R>
inline void dot_block(
    const float* rows, int64_t row_stride, const void* const* keys, const void* const* upcoming,
    int count, int64_t dim, float* scores, int64_t score_stride) {
  constexpr int K = SUMS / R >= 4 ? 4 : 2;
  for (int first = 0; first < count; first += LANES) {
    Vec parts[R * LANES];
    for (int k = 0; k < LANES; k += K)
      dot_keys<T, R, K>(
          rows, row_stride, keys + first + k, upcoming + first + k, dim, parts + k);
    for (int r = 0; r < R; ++r)
      write(scores + r * score_stride + first, sum_each(parts + r * LANES));
  }
}

// out[r] += sum over k of weights[r][k] * values[k], in C vectors of channels.
template <class T, int R, int C>
inline void weigh_columns(
    const float* weights, int64_t weight_stride, const void* const* values,
    const void* const* upcoming, int count, int64_t column, float* out, int64_t out_stride) {
  Vec sums[R][C];
  float* to = out + column;
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) { sums[r][c] = load(to + r * out_stride + c * LANES); });
  });
  for (int k = 0; k < count; ++k) {
    const T* value = past(static_cast<const T*>(values[k]), column);
    ask_for(past(static_cast<const T*>(upcoming[k]), column), bytes_of_channels<T>(C * LANES));
    Vec x[C];
    repeat<C>([&](auto c) { x[c] = load(past(value, c * LANES)); });
    repeat<R>([&](auto r) {
      const Vec weight = broadcast(weights[r * weight_stride + k]);
      repeat<C>([&](auto c) { sums[r][c] = fma(weight, x[c], sums[r][c]); });
    });
  }
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) { write(to + r * out_stride + c * LANES, sums[r][c]); });
  });
}

template <class T, int R>
inline void weigh_block(
    const float* weights, int64_t weight_stride, const void* const* values,
    const void* const* upcoming, int count, int64_t dim, float* out, int64_t out_stride) {
  constexpr int C = std::min(4, SUMS / R);
  int64_t column = 0;
  for (; column + C * LANES <= dim; column += C * LANES)
    weigh_columns<T, R, C>(
        weights, weight_stride, values, upcoming, count, column, out, out_stride);
  for (; column + LANES <= dim; column += LANES)
    weigh_columns<T, R, 1>(
        weights, weight_stride, values, upcoming, count, column, out, out_stride);
  const int rest = static_cast<int>(dim - column);
  if (rest == 0) return;
  for (int k = 0; k < count; ++k) {
    const Vec x = load_some(past(static_cast<const T*>(values[k]), column), rest);
    for (int r = 0; r < R; ++r) {
      float* to = out + r * out_stride + column;
      write(to, fma(broadcast(weights[r * weight_stride + k]), x, load(to)));
    }
  }
}

// f(R, first row) for all rows, at most MOST at a time.
template <int MOST, class F>
inline void for_row_blocks(int rows, F&& f) {
  int first = 0;
  for (; first + MOST <= rows; first += MOST) f(std::integral_constant<int, MOST>{}, first);
  if constexpr (MOST > 1) {
    if (first < rows)
      for_row_blocks<MOST - 1>(rows - first, [&](auto block, int r) { f(block, first + r); });
  }
}

template <class T>
void dot_rows(
    const float* rows, int64_t row_stride, int num_rows, const void* const* keys,
    const void* const* upcoming, int count, int64_t dim, float* scores, int64_t score_stride) {
  for_row_blocks<MOST_ROWS>(num_rows, [&](auto block, int first) {
    const float* from = rows + first * row_stride;
    float* to = scores + first * score_stride;
    if constexpr (TURNS_KEYS<T, block()>)
      dot_turned<block()>(from, row_stride, keys, upcoming, count, dim, to, score_stride);
    else
      dot_block<T, block()>(from, row_stride, keys, upcoming, count, dim, to, score_stride);
  });
}

template <class T>
void weigh_rows(
    const float* weights, int64_t weight_stride, int num_rows, const void* const* values,
    const void* const* upcoming, int count, int64_t dim, float* out, int64_t out_stride) {
  for_row_blocks<MOST_ROWS>(num_rows, [&](auto block, int first) {
    weigh_block<T, block()>(
        weights + first * weight_stride, weight_stride, values, upcoming, count, dim,
        out + first * out_stride, out_stride);
  });
}

}  // namespace ascend_kv::cpu
