// Products of a few rows (queries, or weights of queries) with cached tokens, read where they lie
// and converted on the way: what a decode does. All rows share each read. While a token is worked
// on, the one that has its place in the next tile (`upcoming`) is asked for: a cache lies in blocks
// all over the memory, and no hardware guesses where the next one is.
#pragma once

#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

#define ASCEND_KV_INLINE inline __attribute__((always_inline))

constexpr int64_t LINE_BYTES = 64;

inline void ask_for(const void* stored, int64_t bytes) {
  for (int64_t c = 0; c < bytes; c += LINE_BYTES)
    __builtin_prefetch(static_cast<const char*>(stored) + c);
}

// Products of R rows with LANES keys, channel by channel; WIDTH: whole vectors of a key, or 0 where
// only the run knows.
template <class T, int R, int WIDTH>
struct KeyGroup {
  const float* rows;
  int64_t row_stride;
  const void* const* keys;
  const void* const* upcoming;
  int64_t dim;

  // A vector for each row, whose sum is its product with key k.
  ASCEND_KV_INLINE void one(int k, Vec* out) const {
    const T* key = static_cast<const T*>(keys[k]);
    for (int r = 0; r < R; ++r) out[r] = Vec{};
    ask_for(upcoming[k], (WIDTH > 0 ? WIDTH * LANES : dim) * sizeof(T));
    if constexpr (WIDTH > 0) {
      for (int c = 0; c < WIDTH; ++c) add(load(key + c * LANES), c * LANES, out);
    } else {
      any_width(key, out);
    }
  }
  __attribute__((noinline)) void any_width(const T* key, Vec* out) const {
    for_vectors(dim, [&](int64_t c, int count) { add(load_at(key, c, count), c, out); });
  }
  ASCEND_KV_INLINE void add(Vec x, int64_t c, Vec* out) const {
    for (int r = 0; r < R; ++r) out[r] = fma(load(rows + r * row_stride + c), x, out[r]);
  }

  // The keys k, k + D, k + 2 D, ...: lanes that differ in bits from D on are those of other keys.
  // Sums are joined as soon as there are two, so that few are alive.
  template <int D>
  ASCEND_KV_INLINE void all(int k, Vec* out) const {
    if constexpr (D == LANES) {
      one(k, out);
    } else {
      Vec other[R];
      all<2 * D>(k, out);
      all<2 * D>(k + D, other);
      for (int r = 0; r < R; ++r)
        out[r] = lower<D>(out[r], other[r], Lanes{}) + upper<D>(out[r], other[r], Lanes{});
    }
  }
};

// scores[r][k] = rows[r] . keys[k], for `count` keys, a multiple of LANES.
template <class T, int R, int WIDTH>
inline void dot_block(
    const float* rows, int64_t row_stride, const void* const* keys, const void* const* upcoming,
    int count, int64_t dim, float* scores, int64_t score_stride) {
  for (int first = 0; first < count; first += LANES) {
    Vec sums[R];
    const KeyGroup<T, R, WIDTH> group{rows, row_stride, keys + first, upcoming + first, dim};
    group.template all<1>(0, sums);
    for (int r = 0; r < R; ++r) write(scores + r * score_stride + first, sums[r]);
  }
}

// out[r] += sum over k of weights[r][k] * values[k], in C vectors of channels.
template <class T, int R, int C>
inline void weigh_columns(
    const float* weights, int64_t weight_stride, const void* const* values,
    const void* const* upcoming, int count, int64_t column, float* out, int64_t out_stride) {
  Vec sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * out_stride + column + c * LANES);
  for (int k = 0; k < count; ++k) {
    const T* value = static_cast<const T*>(values[k]) + column;
    ask_for(static_cast<const T*>(upcoming[k]) + column, C * LANES * sizeof(T));
    Vec x[C];
    for (int c = 0; c < C; ++c) x[c] = load(value + c * LANES);
    for (int r = 0; r < R; ++r) {
      const Vec weight = broadcast(weights[r * weight_stride + k]);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(weight, x[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) write(out + r * out_stride + column + c * LANES, sums[r][c]);
}

template <class T, int R>
inline void weigh_block(
    const float* weights, int64_t weight_stride, const void* const* values,
    const void* const* upcoming, int count, int64_t dim, float* out, int64_t out_stride) {
  constexpr int C = R > 4 || LANES == 8 ? 2 : 4;  // R * C sums stay in registers
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
    const Vec x = load_some(static_cast<const T*>(values[k]) + column, rest);
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
  for_row_blocks<4>(num_rows, [&](auto block, int first) {
    const auto run = [&](auto width) {
      dot_block<T, block(), width()>(
          rows + first * row_stride, row_stride, keys, upcoming, count, dim,
          scores + first * score_stride, score_stride);
    };
    if (dim == 64) run(std::integral_constant<int, 64 / LANES>{});
    else if (dim == 128) run(std::integral_constant<int, 128 / LANES>{});
    else run(std::integral_constant<int, 0>{});
  });
}

template <class T>
void weigh_rows(
    const float* weights, int64_t weight_stride, int num_rows, const void* const* values,
    const void* const* upcoming, int count, int64_t dim, float* out, int64_t out_stride) {
  for_row_blocks<LANES == 8 ? 4 : 8>(num_rows, [&](auto block, int first) {
    weigh_block<T, block()>(
        weights + first * weight_stride, weight_stride, values, upcoming, count, dim,
        out + first * out_stride, out_stride);
  });
}

}  // namespace ascend_kv::cpu
