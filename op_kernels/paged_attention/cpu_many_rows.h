// Products of many rows with a tile of cached tokens: what a prefill does. The tile is converted to
// float once, keys with their channels as rows, and then it is two matrix products.
#pragma once

#include "../common/cpu_paged.h"
#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

// One stored vector as floats, 0 from `dim` up to whole vectors.
template <class T>
void convert_row(const void* from, int64_t dim, float* to) {
  const T* row = static_cast<const T*>(from);
  for_vectors(dim, [&](int64_t c, int count) { store(to + c, load_at(row, c, count)); });
}

// Scales of groups of channels, and their zero points: applied to each value.
inline void apply_groups(const Parameter& scale, const Parameter& zero_point, int64_t block,
                         int64_t head, int64_t token, int64_t dim, float* row) {
  if (read_by_block(scale, zero_point)) {
    const int64_t factors = scale.place(block, head, 0);
    const int64_t shifts = zero_point.data ? zero_point.place(block, head, 0) : 0;
    for_vectors(dim, [&](int64_t c, int count) {
      Vec x = load(row + c) * scale.of_block(factors, c, count);
      if (zero_point.data) x = x + zero_point.of_block(shifts, c, count);
      store_at(row, c, count, x);
    });
    return;
  }
  const auto for_groups = [&](const Parameter& p, auto&& apply) {
    const int64_t first = p.place(block, head, token), size = p.group_size;
    for (int64_t group = 0; group < dim / size; ++group) {
      const float x = p.get(first + group * p.channel);
      for (int64_t c = group * size; c < (group + 1) * size; ++c) apply(row[c], x);
    }
  };
  for_groups(scale, [](float& value, float x) { value *= x; });
  if (zero_point.data) for_groups(zero_point, [](float& value, float x) { value += x; });
}

// LANES rows [LANES, padded] become columns `column` to column + LANES of [padded, stride].
inline void turn_rows(const float* rows, int64_t padded, float* turned, int64_t stride, int column) {
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec square[LANES];
    for (int k = 0; k < LANES; ++k) square[k] = load(rows + k * padded + c);
    transpose(square);
    for (int k = 0; k < LANES; ++k) write(turned + (c + k) * stride + column, square[k]);
  }
}

template <int R, int C>
inline void multiply_block(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t inner, float* out,
    int64_t out_stride, bool add) {
  Vec sums[R][C];
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) {
      sums[r][c] = add ? load(out + r * out_stride + c * LANES) : Vec{};
    });
  });
  for (int64_t i = 0; i < inner; ++i) {
    Vec x[C];
    repeat<C>([&](auto c) { x[c] = load(b + i * b_stride + c * LANES); });
    repeat<R>([&](auto r) {
      const Vec y = broadcast(a[r * a_stride + i]);
      repeat<C>([&](auto c) { sums[r][c] = fma(y, x[c], sums[r][c]); });
    });
  }
  repeat<R>([&](auto r) {
    repeat<C>([&](auto c) { write(out + r * out_stride + c * LANES, sums[r][c]); });
  });
}

template <int C>
inline void multiply_columns(
    const float* a, int64_t a_stride, int rows, const float* b, int64_t b_stride, int64_t inner,
    float* out, int64_t out_stride, bool add) {
  int r = 0;
  for (; r + 6 <= rows; r += 6)
    multiply_block<6, C>(
        a + r * a_stride, a_stride, b, b_stride, inner, out + r * out_stride, out_stride, add);
  a += r * a_stride, out += r * out_stride;
  switch (rows - r) {
    case 5: multiply_block<5, C>(a, a_stride, b, b_stride, inner, out, out_stride, add); break;
    case 4: multiply_block<4, C>(a, a_stride, b, b_stride, inner, out, out_stride, add); break;
    case 3: multiply_block<3, C>(a, a_stride, b, b_stride, inner, out, out_stride, add); break;
    case 2: multiply_block<2, C>(a, a_stride, b, b_stride, inner, out, out_stride, add); break;
    case 1: multiply_block<1, C>(a, a_stride, b, b_stride, inner, out, out_stride, add); break;
  }
}

// out [rows, columns] = (add: +=) a [rows, inner] . b [inner, columns], columns in whole vectors.
inline void multiply(
    const float* a, int64_t a_stride, int rows, const float* b, int64_t b_stride, int64_t inner,
    int64_t columns, float* out, int64_t out_stride, bool add) {
  constexpr int C = LANES == 8 ? 2 : 4;
  int64_t c = 0;
  for (; c + C * LANES <= columns; c += C * LANES)
    multiply_columns<C>(a, a_stride, rows, b + c, b_stride, inner, out + c, out_stride, add);
  for (; c < columns; c += LANES)
    multiply_columns<1>(a, a_stride, rows, b + c, b_stride, inner, out + c, out_stride, add);
}

}  // namespace ascend_kv::cpu
