// Products of five to eight rows with INT8 keys, on AVX-512: the keys of a group of query heads are
// turned, still as bytes, so that a vector is one channel of LANES keys. Sums then end as scores,
// where those of cpu_few_rows.h must be summed over their lanes for each row and key. Turning is
// paid once for all rows: with four or fewer it costs more than it saves (measured), and other
// vectors are too short to gain.
#pragma once

#include <algorithm>

#include "../common/cpu_vector.h"
#include "cpu_ask_for.h"

namespace ascend_kv::cpu {

// As dot_block of cpu_few_rows.h.
template <int R>
inline void dot_turned(
    const float* rows, int64_t row_stride, const void* const* keys, int count, int64_t dim,
    float* scores, int64_t score_stride);

#if defined(ASCEND_KV_AVX512)

template <class T, int ROWS>
constexpr bool TURNS_KEYS = std::is_same_v<T, int8_t> && ROWS >= 5;

constexpr int STRIP = 64;  // channels that are turned at a time, a vector of bytes
constexpr int MOST_TURNED = 4 * STRIP;

// LANES keys, MOST_TURNED channels of each. Two of them must not lie whole pages apart: loads from
// one would wait for stores to the other.
struct alignas(64) TurnedKeys {
  int8_t codes[MOST_TURNED * LANES];
  int8_t apart[5 * STRIP];

  const int8_t* channel(int64_t c) const {
    return codes + c / STRIP * (STRIP * LANES) + c % LANES * STRIP + c % STRIP / LANES * LANES;
  }
};

// LANES keys, `count` of their channels from c, up to STRIP: where `to` has channel 0, 1, 2 of all
// keys side by side are vectors STRIP apart, and within those, channels LANES apart.
inline void turn_strip(const void* const* keys, int64_t c, int count, int8_t* to) {
  const __mmask64 held = count < STRIP ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
  __m512i rows[LANES], zipped[LANES];
  repeat<LANES>([&](auto k) {
    rows[k] = _mm512_maskz_loadu_epi8(held, static_cast<const int8_t*>(keys[k]) + c);
  });
  repeat<4>([&](auto) {
    repeat<LANES / 2>([&](auto k) {
      zipped[2 * k] = _mm512_unpacklo_epi8(rows[k], rows[k + LANES / 2]);
      zipped[2 * k + 1] = _mm512_unpackhi_epi8(rows[k], rows[k + LANES / 2]);
    });
    repeat<LANES>([&](auto k) { rows[k] = zipped[k]; });
  });
  repeat<LANES>([&](auto k) { _mm512_store_si512(to + k * STRIP, rows[k]); });
}

// scores[r][k] (add: +=) rows[r] . keys[k], for C vectors of keys.
template <int R, int C>
inline void dot_turned_keys(
    const float* rows, int64_t row_stride, const TurnedKeys* keys, int channels, float* scores,
    int64_t score_stride, bool add) {
  Vec sums[R][C];
  repeat<R>([&](auto r) {
    repeat<C>([&](auto k) {
      sums[r][k] = add ? load(scores + r * score_stride + k * LANES) : Vec{};
    });
  });
  for (int first = 0; first < channels; first += LANES) {
    const int8_t* from[C];
    repeat<C>([&](auto k) { from[k] = keys[k].channel(first); });
    const float* q = rows + first;
    const int count = std::min(LANES, channels - first);
    for (int c = 0; c < count; ++c) {
      Vec x[C];
      repeat<C>([&](auto k) { x[k] = load(from[k] + c * STRIP); });
      repeat<R>([&](auto r) {
        const Vec y = broadcast(q[r * row_stride + c]);
        repeat<C>([&](auto k) { sums[r][k] = fma(y, x[k], sums[r][k]); });
      });
    }
  }
  repeat<R>([&](auto r) {
    repeat<C>([&](auto k) { write(scores + r * score_stride + k * LANES, sums[r][k]); });
  });
}

template <int R>
inline void dot_turned(
    const float* rows, int64_t row_stride, const void* const* keys, int count, int64_t dim,
    float* scores, int64_t score_stride) {
  TurnedKeys turned[2];
  for (int first = 0; first < count; first += 2 * LANES) {
    const int vectors = count - first > LANES ? 2 : 1;
    for (int k = first; k < first + vectors * LANES; ++k) ask_for(keys[k + AHEAD], dim);
    for (int64_t part = 0; part < dim; part += MOST_TURNED) {
      const int channels = static_cast<int>(std::min<int64_t>(MOST_TURNED, dim - part));
      for (int v = 0; v < vectors; ++v)
        for (int c = 0; c < channels; c += STRIP)
          turn_strip(
              keys + first + v * LANES, part + c, channels - c, turned[v].codes + c * LANES);
      const auto dot = vectors == 2 ? dot_turned_keys<R, 2> : dot_turned_keys<R, 1>;
      dot(rows + part, row_stride, turned, channels, scores + first, score_stride, part > 0);
    }
  }
}

#else

template <class T, int ROWS>
constexpr bool TURNS_KEYS = false;

#endif

}  // namespace ascend_kv::cpu
