// Products of a few rows (queries, or weights of queries) with cached tokens, read where they lie
// and converted on the way: what a decode does. All rows share each read.
#pragma once

#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

// scores[r][k] = rows[r] . keys[k], for `count` keys, a multiple of LANES.
template <class T, int R>
inline void dot_block(
    const float* rows, int64_t row_stride, const void* const* keys, int count, int64_t dim,
    float* scores, int64_t score_stride) {
  const int64_t whole = dim / LANES * LANES;
  const int rest = static_cast<int>(dim - whole);
  for (int first = 0; first < count; first += LANES) {
    Vec parts[R][LANES];
    for (int k = 0; k < LANES; ++k) {
      const T* key = static_cast<const T*>(keys[first + k]);
      Vec sums[R] = {};
      for (int64_t c = 0; c < whole; c += LANES) {
        const Vec x = load(key + c);
        for (int r = 0; r < R; ++r) sums[r] = fma(load(rows + r * row_stride + c), x, sums[r]);
      }
      if (rest) {
        const Vec x = load_some(key + whole, rest);
        for (int r = 0; r < R; ++r) sums[r] = fma(load(rows + r * row_stride + whole), x, sums[r]);
      }
      for (int r = 0; r < R; ++r) parts[r][k] = sums[r];
    }
    for (int r = 0; r < R; ++r) write(scores + r * score_stride + first, sum_each(parts[r]));
  }
}

// out[r] += sum over k of weights[r][k] * values[k], in C vectors of channels.
template <class T, int R, int C>
inline void weigh_columns(
    const float* weights, int64_t weight_stride, const void* const* values, int count,
    int64_t column, float* out, int64_t out_stride) {
  Vec sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * out_stride + column + c * LANES);
  for (int k = 0; k < count; ++k) {
    const T* value = static_cast<const T*>(values[k]) + column;
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
    const float* weights, int64_t weight_stride, const void* const* values, int count,
    int64_t dim, float* out, int64_t out_stride) {
  constexpr int C = LANES == 8 ? 2 : 4;  // R * C sums stay in registers
  int64_t column = 0;
  for (; column + C * LANES <= dim; column += C * LANES)
    weigh_columns<T, R, C>(weights, weight_stride, values, count, column, out, out_stride);
  for (; column + LANES <= dim; column += LANES)
    weigh_columns<T, R, 1>(weights, weight_stride, values, count, column, out, out_stride);
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

// f<R>(first row) for all rows, at most 4 at a time.
template <class F>
inline void for_row_blocks(int rows, F&& f) {
  int first = 0;
  for (; first + 4 <= rows; first += 4) f(std::integral_constant<int, 4>{}, first);
  switch (rows - first) {
    case 1: f(std::integral_constant<int, 1>{}, first); break;
    case 2: f(std::integral_constant<int, 2>{}, first); break;
    case 3: f(std::integral_constant<int, 3>{}, first); break;
  }
}

template <class T>
void dot_rows(
    const float* rows, int64_t row_stride, int num_rows, const void* const* keys, int count,
    int64_t dim, float* scores, int64_t score_stride) {
  for_row_blocks(num_rows, [&](auto block, int first) {
    dot_block<T, block()>(
        rows + first * row_stride, row_stride, keys, count, dim, scores + first * score_stride,
        score_stride);
  });
}

template <class T>
void weigh_rows(
    const float* weights, int64_t weight_stride, int num_rows, const void* const* values,
    int count, int64_t dim, float* out, int64_t out_stride) {
  for_row_blocks(num_rows, [&](auto block, int first) {
    weigh_block<T, block()>(
        weights + first * weight_stride, weight_stride, values, count, dim,
        out + first * out_stride, out_stride);
  });
}

}  // namespace ascend_kv::cpu
