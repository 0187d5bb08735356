// Attention over INT8 and INT4 codes in whole numbers of 16 bits, on AVX2: one instruction
// multiplies 16 of them and adds each two products, where float32 takes two instructions, after two
// that convert.
//
// What codes are multiplied with, queries and weights, is rounded to 16 bits against the largest of
// its row (of a tile), and the sums of the products are exact. A step multiplies pairs: two
// channels of a key with those of a query, and the values of two tokens with their weights.
#pragma once

#include <algorithm>
#include <utility>

#include "../common/cpu_paged.h"
#include "../common/cpu_vector.h"
#include "cpu_ask_for.h"
#include "cpu_softmax.h"
#include "cpu_whole_numbers.h"

namespace ascend_kv::cpu {

#if defined(ASCEND_KV_AVX2)

class WordUnit {
 public:
  static int bits() { return 16; }
  static bool serves(const Side& side, int, int64_t dim) {
    return (side.type == Type::INT8 || side.type == Type::INT4) &&
           side.scale.kind != Parameter::GROUP && dim <= MOST_CHANNELS;
  }
  static int64_t floats(int rows, int64_t dim) {
    const int64_t channels = round_up(dim, STRIP);
    const int64_t floats =
        TILE * channels / 2 + rows * (QUERY_WORDS / 2 + TILE / 2 + channels + 2);
    return round_up(floats, LINE_BYTES / 4);  // what follows begins at a line too
  }

  WordUnit(const Side& key, const Side& value, int rows, int64_t dim, float* memory)
      : rows_(rows), dim_(dim), channels_(round_up(dim, STRIP)),
        packed_keys_(key.type == Type::INT4), packed_values_(value.type == Type::INT4) {
    const auto take = [&](int64_t count) { return std::exchange(memory, memory + count); };
    turned_keys_ = reinterpret_cast<int8_t*>(take(TILE * channels_ / 4));
    values_ = reinterpret_cast<int8_t*>(take(TILE * channels_ / 4));
    queries_ = reinterpret_cast<int16_t*>(take(rows * QUERY_WORDS / 2));
    weights_ = reinterpret_cast<int16_t*>(take(rows * TILE / 2));
    sums_ = take(rows * channels_);
    query_steps_ = take(rows);
    weight_sizes_ = memory;
    std::fill(sums_, sums_ + rows * channels_, 0.0f);
  }

  // The rows that dot() multiplies. False: one of them is not to be had in whole numbers.
  bool load_rows(const float* rows, int64_t stride) {
    for (int r = 0; r < rows_; ++r) {
      const float* row = rows + r * stride;
      const float size = largest_size<true>(row, dim_);
      if (!has_whole_numbers(size)) return false;
      query_steps_[r] = size / LARGEST;
      for (int64_t c = 0; c < channels_; c += CHUNK)
        put_words(row + c, dim_ - c, size, queries_ + r * QUERY_WORDS + c);
    }
    return true;
  }

  // Before each tile: TILE keys and values of the next one, null where they are not the unit's.
  void start_tile(const void* const* next_keys, const void* const* next_values) {
    upcoming_.start(
        next_keys, packed_keys_ ? dim_ / 2 : dim_, next_values, packed_values_ ? dim_ / 2 : dim_);
  }
  void ask_for_some() { upcoming_.ask_for_some(); }

  // scores[r * TILE + k] = rows[r] . keys[k], for `count` keys and perhaps some after them.
  template <class F>
  void dot(const void* const* keys, int count, float* scores, F&& meanwhile) {
    if (packed_keys_) dot_codes<Nibbles>(keys, count, scores);
    else dot_codes<int8_t>(keys, count, scores);
    meanwhile();
  }

  // Values that weights are to come for, `count` of them: the codes of two tokens become pairs, in
  // rows of 2 * channels_ bytes. Of a strip's four vectors of pairs the middle two change places.
  void take_values(const void* const* values, int count) {
    if (packed_values_) pair_values<Nibbles>(values, count);
    else pair_values<int8_t>(values, count);
  }

  // Multiplies weights [rows, TILE] with `count` values and adds to the sums. False: the weights
  // are not to be had in whole numbers, and nothing was added.
  bool take_weights(const float* weights, int count) {
    for (int r = 0; r < rows_; ++r) {
      weight_sizes_[r] = largest_size<true>(weights + r * TILE, count);
      if (!has_whole_numbers(weight_sizes_[r])) return false;
    }
    for (int r = 0; r < rows_; ++r) {
      for (int k = 0; k < count; k += CHUNK)
        put_words(weights + r * TILE + k, count - k, weight_sizes_[r], weights_ + r * TILE + k);
    }
    for (int64_t strip = 0; strip < dim_; strip += STRIP) {
      repeat<2>([&](auto half) {
        multiply<TILE>(
            weights_, (count + 1) / 2, values_ + 2 * (strip + half * CHUNK), 2 * channels_,
            [&](int r, int vector, __m256i sum) {
              float* to = sums_ + r * channels_ + strip + half * LANES + vector * CHUNK;
              write(to, fma(floats_of(sum), broadcast(weight_sizes_[r] / LARGEST), load(to)));
            });
      });
    }
    upcoming_.ask_for_rest();
    return true;
  }
  void weigh() {}

  void scale(int row, float factor) { scale_row(sums_ + row * channels_, channels_, factor); }

  // Adds the sums to out [rows, padded], where padded is dim in whole vectors.
  void add_sums(float* out, int64_t padded) const {
    for (int r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < padded; c += LANES) {
        float* to = out + r * padded + c;
        write(to, load(to) + load(sums_ + r * channels_ + c));
      }
    }
  }

 private:
  static constexpr int CHUNK = 16;  // codes that become a vector of words
  static constexpr int STRIP = 32;  // a vector of codes
  static constexpr float LARGEST = 32767;
  // Sums of products of codes and 16 bits must fit 32 bits.
  static constexpr int MOST_CHANNELS = 512;
  static constexpr int QUERY_WORDS = MOST_CHANNELS + 32;  // of a row, which are no whole pages apart
  static constexpr int ROWS_AT_ONCE = 4;  // more would not fit the registers

  static Vec floats_of(__m256i x) { return _mm256_cvtepi32_ps(x); }

  // CHUNK numbers, of which `count` are there, as words; of what comes after, 0.
  static void put_words(const float* from, int64_t count, float size, int16_t* to) {
    const Vec inverse = broadcast(size > 0 ? LARGEST / size : 0);
    const auto whole = [&](int64_t first) {
      const int64_t some = std::clamp<int64_t>(count - first, 0, LANES);
      return _mm256_cvtps_epi32(load_at(from, first, static_cast<int>(some)) * inverse);
    };
    const __m256i words = _mm256_packs_epi32(whole(0), whole(LANES));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(words, 0xd8));
  }

  // f(c, read) for each COUNT channels: read(stored) are their codes, 0 past the last channel.
  template <class T, int COUNT, class F>
  ASCEND_KV_INLINE void for_pieces(F&& f) const {
    int64_t c = 0;
    for (; c + COUNT <= dim_; c += COUNT)
      f(c, [c](const void* stored) ASCEND_KV_INLINED {
        return read_codes<COUNT>(past(static_cast<const T*>(stored), c));
      });
    if (c == dim_) return;
    f(c, [this, c](const void* stored) {
      T held[COUNT] = {};
      std::memcpy(held, past(static_cast<const T*>(stored), c), bytes_of_channels<T>(dim_ - c));
      return read_codes<COUNT>(held);
    });
  }
  template <int COUNT>
  static ASCEND_KV_INLINE auto read_codes(const int8_t* from) {
    if constexpr (COUNT == STRIP) return _mm256_loadu_si256((const __m256i*)from);
    else return _mm_loadu_si128((const __m128i*)from);
  }
  template <int COUNT>
  static ASCEND_KV_INLINE auto read_codes(const Nibbles* from) {
    const __m128i four_bits = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
    const auto codes = [&](__m128i x) { return _mm_sub_epi8(_mm_xor_si128(x, sign), sign); };
    const __m128i both = COUNT == STRIP ? _mm_loadu_si128((const __m128i*)from)
                                        : _mm_loadl_epi64((const __m128i*)from);
    const __m128i first = _mm_and_si128(both, four_bits);
    const __m128i second = _mm_and_si128(_mm_srli_epi16(both, 4), four_bits);
    const __m128i low = codes(_mm_unpacklo_epi8(first, second));
    if constexpr (COUNT == CHUNK) return low;
    else return _mm256_set_m128i(codes(_mm_unpackhi_epi8(first, second)), low);
  }

  template <class T>
  void pair_values(const void* const* values, int count) {
    for (int k = 0; k < count; k += 2) {
      if (k % 8 == 0) ask_for_some();
      auto* to = (__m256i*)(values_ + k * channels_);
      for_pieces<T, STRIP>([&](int64_t, auto&& read) ASCEND_KV_INLINED {
        const __m256i a = read(values[k]), b = read(values[k + 1]);
        _mm256_store_si256(to++, _mm256_unpacklo_epi8(a, b));
        _mm256_store_si256(to++, _mm256_unpackhi_epi8(a, b));
      });
    }
  }

  template <class T>
  void dot_codes(const void* const* keys, int count, float* scores) {
    if (rows_ == 1) dot_keys<T, 1>(keys, count, scores);
    else if (rows_ == 2) dot_keys<T, 2>(keys, count, scores);
    else dot_turned<T>(keys, count, scores);
  }

  // One or two rows: channel by channel, and the sums are summed over their lanes.
  template <class T, int R>
  void dot_keys(const void* const* keys, int count, float* scores) {
    constexpr int K = 4;
    for (int first = 0; first < count; first += LANES) {
      ask_for_some();
      ask_for_some();
      Vec parts[R][LANES];
      for (int k = 0; k < LANES; k += K) {
        const void* from[K];
        __m256i sums[R][K];
        repeat<K>([&](auto i) {
          from[i] = keys[first + k + i];
          repeat<R>([&](auto r) { sums[r][i] = _mm256_setzero_si256(); });
        });
        for_pieces<T, CHUNK>([&](int64_t c, auto&& read) ASCEND_KV_INLINED {
          __m256i x[K];
          repeat<K>([&](auto i) { x[i] = _mm256_cvtepi8_epi16(read(from[i])); });
          repeat<R>([&](auto r) {
            const __m256i query =
                _mm256_load_si256((const __m256i*)(queries_ + r * QUERY_WORDS + c));
            repeat<K>([&](auto i) { sums[r][i] = add_products(sums[r][i], x[i], query); });
          });
        });
        repeat<R>([&](auto r) {
          repeat<K>([&](auto i) { parts[r][k + i] = bits_of<Vec>(sums[r][i]); });
        });
      }
      for (int r = 0; r < R; ++r) {
        const Vec sums = join_each(parts[r], [](Vec a, Vec b) {
          return bits_of<Vec>(bits_of<Ints>(a) + bits_of<Ints>(b));
        });
        write(scores + r * TILE + first, floats_of(bits_of<__m256i>(sums)) * query_steps_[r]);
      }
    }
  }

  // More rows: the keys are turned, so that a vector is two channels of each of LANES keys, and sums
  // end as scores.
  template <class T>
  void dot_turned(const void* const* keys, int count, float* scores) {
    for (int k = 0; k < count; k += CHUNK) {
      ask_for_some();
      ask_for_some();
      for_pieces<T, CHUNK>([&](int64_t c, auto&& read) ASCEND_KV_INLINED {
        turn(keys + k, read, turned_keys_ + c * TILE + 2 * k);
      });
    }
    const auto pairs = static_cast<int>(round_up(dim_, CHUNK) / 2);
    for (int k = 0; k < count; k += CHUNK) {
      multiply<QUERY_WORDS>(
          queries_, pairs, turned_keys_ + 2 * k, 2 * TILE, [&](int r, int vector, __m256i sum) {
            write(scores + r * TILE + k + vector * LANES, floats_of(sum) * query_steps_[r]);
          });
    }
  }

  // A chunk of channels of CHUNK keys: rows of 2 * TILE bytes, one for each two channels.
  template <class Read>
  static ASCEND_KV_INLINE void turn(const void* const* keys, Read&& read, int8_t* to) {
    __m256i rows[LANES], zipped[LANES];
    repeat<LANES>([&](auto k) {
      rows[k] = _mm256_inserti128_si256(
          _mm256_castsi128_si256(read(keys[k])), read(keys[LANES + k]), 1);
    });
    repeat<3>([&](auto) {
      repeat<LANES / 2>([&](auto k) {
        zipped[2 * k] = _mm256_unpacklo_epi16(rows[k], rows[k + LANES / 2]);
        zipped[2 * k + 1] = _mm256_unpackhi_epi16(rows[k], rows[k + LANES / 2]);
      });
      repeat<LANES>([&](auto k) { rows[k] = zipped[k]; });
    });
    repeat<LANES>([&](auto i) { _mm256_store_si256((__m256i*)(to + i * 2 * TILE), rows[i]); });
  }

  static __m256i add_products(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  }

  // For each row of a, STRIDE words, and two vectors of columns of b the sums over `pairs` of two
  // words times two codes of each column: finish(row, vector, sums).
  template <int STRIDE, class F>
  ASCEND_KV_INLINE void multiply(
      const int16_t* a, int pairs, const int8_t* b, int64_t b_stride, F&& finish) {
    int first = 0;
    for (int blocks = (rows_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; blocks > 0; --blocks) {
      const int rows = (rows_ - first + blocks - 1) / blocks;  // none much fewer than others
      repeat<ROWS_AT_ONCE>([&](auto r) {
        constexpr int R = r + 1;
        if (rows == R)
          multiply_rows<R, STRIDE>(
              a + first * STRIDE, pairs, b, b_stride,
              [&](int i, int v, __m256i sum) { finish(first + i, v, sum); });
      });
      first += rows;
      ask_for_some();
    }
  }

  template <int R, int STRIDE, class F>
  static ASCEND_KV_INLINE void multiply_rows(
      const int16_t* a, int pairs, const int8_t* b, int64_t b_stride, F&& finish) {
    __m256i sums[R][2];
    repeat<R>([&](auto r) { sums[r][0] = sums[r][1] = _mm256_setzero_si256(); });
#pragma GCC unroll 4  // a compiler that does not copies its sums from register to register
    for (int i = 0; i < pairs; ++i, a += 2, b += b_stride) {
      __m256i x[2];
      repeat<2>([&](auto v) {
        x[v] = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)b + v));
      });
      repeat<R>([&](auto r) {
        const __m256i two = _mm256_set1_epi32(read<int32_t>(a + r * STRIDE));
        repeat<2>([&](auto v) { sums[r][v] = add_products(sums[r][v], x[v], two); });
      });
    }
    repeat<R>([&](auto r) { repeat<2>([&](auto v) { finish(r, v, sums[r][v]); }); });
  }

  int rows_;
  int64_t dim_, channels_;  // channels_: dim in whole strips
  bool packed_keys_, packed_values_;  // two codes a byte
  Upcoming upcoming_;
  int8_t *turned_keys_, *values_;
  int16_t *queries_, *weights_;
  float *sums_, *query_steps_, *weight_sizes_;
};

#endif

}  // namespace ascend_kv::cpu
