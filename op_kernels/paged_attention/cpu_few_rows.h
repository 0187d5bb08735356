// Products of a few rows (queries, or weights of queries) with cached tokens, read where they lie
// and converted on the way: what a decode does. All rows share each read. While a token is worked
// on, a later one is asked for: a cache lies in blocks all over the memory, and no hardware guesses
// where the next one is.
#pragma once

#include <algorithm>

#include "../common/cpu_vector.h"
#include "cpu_ask_for.h"
#include "cpu_softmax.h"
#include "cpu_turned_keys.h"

namespace ascend_kv::cpu {

// Up to so many rows are served here.
constexpr int FEW_ROWS = 8;
// AVX2 has 16 registers, the others 32. So that more than four rows fit there they are packed:
// vectors of all rows side by side, which products read from memory.
constexpr int MOST_ROWS = LANES == 8 ? 4 : FEW_ROWS;
constexpr int64_t MOST_PACKED = 256;  // channels, of what lies on the stack

// Sums of each of R rows that stay in registers.
template <int R>
constexpr int SUMS = (R > MOST_ROWS ? 14 : LANES == 8 ? 8 : LANES == 16 ? 28 : 16) / R;

// Products of R rows with K keys, channel by channel: parts[r * LANES + k] is a vector whose sum is
// rows[r] . keys[k].
template <class T, int R, int K, bool PACKED>
ASCEND_KV_INLINE void dot_keys(
    const float* rows, int64_t row_stride, const void* const* keys, int64_t dim, Vec* parts) {
  const T* from[K];
  Vec sums[R][K];
  repeat<K>([&](auto k) {
    from[k] = static_cast<const T*>(keys[k]);
    ask_for(keys[k + AHEAD], bytes_of_channels<T>(dim));
    repeat<R>([&](auto r) { sums[r][k] = Vec{}; });
  });
  const auto add = [&](int64_t at, auto&& read_key) ASCEND_KV_INLINED {
    Vec x[K];
    repeat<K>([&](auto k) { x[k] = read_key(past(from[k], at)); });
    repeat<R>([&](auto r) {
      const Vec q = load(PACKED ? rows + at * R + r * LANES : rows + r * row_stride + at);
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
template <class T, int R, bool PACKED>
inline void dot_block(
    const float* rows, int64_t row_stride, const void* const* keys, int count, int64_t dim,
    float* scores, int64_t score_stride) {
  constexpr int K = SUMS<R> >= 4 ? 4 : SUMS<R> >= 2 ? 2 : 1;
  for (int first = 0; first < count; first += LANES) {
    Vec parts[R * LANES];
    for (int k = 0; k < LANES; k += K)
      dot_keys<T, R, K, PACKED>(rows, row_stride, keys + first + k, dim, parts + k);
    for (int r = 0; r < R; ++r)
      write(scores + r * score_stride + first, sum_each(parts + r * LANES));
  }
}

// out[r] += sum over k of weights[r][k] * values[k], in C vectors of channels.
template <class T, int R, int C, bool PACKED, bool ASKS>
inline void weigh_columns(
    const float* weights, int64_t weight_stride, const void* const* values, int count,
    int64_t column, float* out, int64_t out_stride) {
  Vec sums[R][C];
  float* to = out + column;
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) { sums[r][c] = load(to + r * out_stride + c * LANES); });
  });
  for (int k = 0; k < count; ++k) {
    const T* value = past(static_cast<const T*>(values[k]), column);
    if constexpr (ASKS)
      ask_for(
          past(static_cast<const T*>(values[k + AHEAD]), column),
          bytes_of_channels<T>(C * LANES));
    Vec x[C];
    repeat<C>([&](auto c) { x[c] = load(past(value, c * LANES)); });
    repeat<R>([&](auto r) {
      const Vec weight = PACKED ? load(weights + (k * R + r) * LANES)
                                : broadcast(weights[r * weight_stride + k]);
      repeat<C>([&](auto c) { sums[r][c] = fma(weight, x[c], sums[r][c]); });
    });
  }
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) { write(to + r * out_stride + c * LANES, sums[r][c]); });
  });
}

template <class T, int R, bool PACKED>
inline void weigh_block(
    const float* weights, int64_t weight_stride, const void* const* values, int count,
    int64_t dim, float* out, int64_t out_stride) {
  constexpr int C = std::min(4, SUMS<R>), WIDTH = C * LANES;
  // Columns of whole lines are asked for one by one. Narrower ones would ask for each line often,
  // the first time too late: values of the next tile are asked for, some before each column.
  constexpr bool ASKS = bytes_of_channels<T>(WIDTH) >= LINE_BYTES;
  const auto weigh = [&](auto vectors, int64_t column) {
    weigh_columns<T, R, vectors(), PACKED, ASKS>(
        weights, weight_stride, values, count, column, out, out_stride);
  };
  const int64_t whole = dim / WIDTH * WIDTH;
  int64_t column = 0, asked = 0;
  for (; column < whole; column += WIDTH) {
    if constexpr (!ASKS)
      for (; asked * whole < TILE * (column + WIDTH); ++asked)
        ask_for(values[TILE + asked], bytes_of_channels<T>(dim));
    weigh(std::integral_constant<int, C>{}, column);
  }
  for (; column + LANES <= dim; column += LANES) weigh(std::integral_constant<int, 1>{}, column);
  const int rest = static_cast<int>(dim - column);
  if (rest == 0) return;
  for (int k = 0; k < count; ++k) {
    const Vec x = load_some(past(static_cast<const T*>(values[k]), column), rest);
    for (int r = 0; r < R; ++r) {
      float* to = out + r * out_stride + column;
      const float* weight = weights + (PACKED ? (k * R + r) * LANES : r * weight_stride + k);
      write(to, fma(broadcast(*weight), x, load(to)));
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

// f(R), if it is more than MOST_ROWS.
template <int R = MOST_ROWS + 1, class F>
inline bool for_packed_rows(int rows, F&& f) {
  if constexpr (R <= FEW_ROWS) {
    if (rows != R) return for_packed_rows<R + 1>(rows, f);
    f(std::integral_constant<int, R>{});
    return true;
  }
  return false;
}

// Of keys and values, here and below, the addresses of 2 * TILE are given, the second half those of
// the next tile; `count` of the first half are multiplied.
template <class T>
void dot_rows(
    const float* rows, int64_t row_stride, int num_rows, const void* const* keys, int count,
    int64_t dim, float* scores, int64_t score_stride) {
  const auto dot_packed = [&](auto block) {
    constexpr int R = block();
    alignas(LINE_BYTES) float packed[R * MOST_PACKED];
    float* to = packed;
    for (int64_t c = 0; c < dim; c += LANES)
      for (int r = 0; r < R; ++r, to += LANES) write(to, load(rows + r * row_stride + c));
    dot_block<T, R, true>(packed, 0, keys, count, dim, scores, score_stride);
  };
  if (dim <= MOST_PACKED && for_packed_rows(num_rows, dot_packed)) return;
  for_row_blocks<MOST_ROWS>(num_rows, [&](auto block, int first) {
    const float* from = rows + first * row_stride;
    float* to = scores + first * score_stride;
    if constexpr (TURNS_KEYS<T, block()>)
      dot_turned<block()>(from, row_stride, keys, count, dim, to, score_stride);
    else
      dot_block<T, block(), false>(from, row_stride, keys, count, dim, to, score_stride);
  });
}

template <class T>
void weigh_rows(
    const float* weights, int64_t weight_stride, int num_rows, const void* const* values, int count,
    int64_t dim, float* out, int64_t out_stride) {
  const auto weigh_packed = [&](auto block) {
    constexpr int R = block();
    alignas(LINE_BYTES) float packed[R * TILE * LANES];
    float* to = packed;
    for (int k = 0; k < count; ++k)
      for (int r = 0; r < R; ++r, to += LANES) write(to, broadcast(weights[r * weight_stride + k]));
    weigh_block<T, R, true>(packed, 0, values, count, dim, out, out_stride);
  };
  if (for_packed_rows(num_rows, weigh_packed)) return;
  for_row_blocks<MOST_ROWS>(num_rows, [&](auto block, int first) {
    weigh_block<T, block(), false>(
        weights + first * weight_stride, weight_stride, values, count, dim,
        out + first * out_stride, out_stride);
  });
}

}  // namespace ascend_kv::cpu
