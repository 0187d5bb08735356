// Attention over INT8 codes on the matrix unit of Intel's Xeons (AMX, from Sapphire Rapids on),
// where one instruction multiplies 16 x 64 by 64 x 16 bytes. Cached keys enter it as they lie,
// values with the bytes of four tokens side by side. What they are multiplied with, queries and
// weights, enters as whole numbers of 24 bits, byte by byte, and the sums of the products are exact:
// all that is rounded is a query or a weight, to 24 bits against the largest of its row.
//
// Rows go in groups of 8: the high and middle bytes of a group fill a tile, the low ones half of
// another.
#pragma once

#include <algorithm>
#include <utility>

#include "../common/cpu_paged.h"
#include "../common/cpu_vector.h"
#include "cpu_ask_for.h"
#include "cpu_softmax.h"
#include "cpu_whole_numbers.h"

#if defined(ASCEND_KV_AVX512) && defined(__AMX_TILE__) && defined(__AMX_INT8__) && \
    defined(__linux__)
#define ASCEND_KV_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ascend_kv::cpu {

#if defined(ASCEND_KV_AMX)

// Linux lends the unit's registers to a process that asks for them.
inline bool has_matrix_unit() {
  static const bool granted = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return granted;
}

class MatrixUnit {
 public:
  static int bits() { return has_matrix_unit() ? 24 : 0; }
  static bool serves(const Side& side, int rows, int64_t dim) {
    return side.type == Type::INT8 && side.scale.kind != Parameter::GROUP && rows >= LEAST_ROWS &&
           dim <= MOST_CHANNELS && has_matrix_unit();
  }
  static int64_t floats(int rows, int64_t dim) {
    const int64_t groups = groups_of(rows), chunks = chunks_of(dim);
    const int64_t tiles = groups * (chunks + 1) * 2 + chunks * (KEY_TILES + 4) + 4 * KEY_TILES + 16;
    return tiles * TILE_BYTES / 4 + groups * ROWS * (chunks * CHUNK + 2);
  }

  MatrixUnit(const Side&, const Side&, int rows, int64_t dim, float* memory)
      : rows_(rows), chunks_(chunks_of(dim)), dim_(dim) {
    const int64_t all_rows = groups_of(rows) * ROWS;
    const auto take = [&](int64_t tiles) {
      return reinterpret_cast<int8_t*>(std::exchange(memory, memory + tiles * TILE_BYTES / 4));
    };
    queries_ = take(groups_of(rows) * chunks_ * 2);
    keys_ = take(KEY_TILES * chunks_);
    values_ = take(4 * chunks_);
    weights_ = take(groups_of(rows) * 2);
    scores_ = reinterpret_cast<int32_t*>(take(4 * KEY_TILES));
    weighed_ = reinterpret_cast<int32_t*>(take(16));
    sums_ = std::exchange(memory, memory + all_rows * chunks_ * CHUNK);
    query_steps_ = std::exchange(memory, memory + all_rows);
    weight_sizes_ = memory;
    std::fill(sums_, sums_ + all_rows * chunks_ * CHUNK, 0.0f);
    _tile_storeconfig(&before_);
    Tiles mine;
    mine.palette = 1;
    for (int tile = 0; tile < 8; ++tile) mine.bytes[tile] = LINE_BYTES, mine.rows[tile] = LANES;
    _tile_loadconfig(&mine);
  }
  ~MatrixUnit() { _tile_loadconfig(&before_); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  // The rows that dot() multiplies. False: the unit cannot take one of them.
  bool load_rows(const float* rows, int64_t stride) {
    constexpr float MOST = 0x7f7f00;  // rounded up it still fits three signed bytes
    for (int r = 0; r < rows_; ++r) {
      const float* row = rows + r * stride;
      const float size = largest_size<true>(row, dim_);
      if (!has_whole_numbers(size)) return false;
      const float inverse = size > 0 ? MOST / size : 0;
      query_steps_[r] = size / MOST;
      int8_t* group = queries_ + r / ROWS * chunks_ * 2 * TILE_BYTES;
      for (int64_t c = 0; c < chunks_ * CHUNK; c += LANES) {
        const Ints number = c < dim_ ? nearest(load(row + c) * inverse) : Ints{};
        const Ints low = signed_byte(number), rest = (number - low) >> 8;
        const Ints middle = signed_byte(rest), high = (rest - middle) >> 8;
        int8_t* tile = group + c / CHUNK * 2 * TILE_BYTES;
        put_column(high, r % ROWS, c % CHUNK, tile);
        put_column(middle, ROWS + r % ROWS, c % CHUNK, tile);
        put_column(low, r % ROWS, c % CHUNK, tile + TILE_BYTES);
      }
    }
    return true;
  }

  // Before each tile: TILE keys and values of the next one, null where they are not the unit's.
  void start_tile(const void* const* next_keys, const void* const* next_values) {
    upcoming_.start(next_keys, dim_, next_values, dim_);
  }
  void ask_for_some() { upcoming_.ask_for_some(); }

  // scores[r * TILE + k] = rows[r] . keys[k], for `count` keys, a multiple of LANES. The unit works
  // on while other units are busy: on weights that wait, and while meanwhile() is called.
  template <class F>
  void dot(const void* const* keys, int count, float* scores, F&& meanwhile) {
    Keys at[KEY_TILES];
    const int tiles = count / LANES;
    for (int i = 0; i < tiles; ++i)
      at[i] = lay_out(keys + i * LANES, keys_ + i * chunks_ * TILE_BYTES);
    const int groups = groups_of(rows_);
    for (int group = 0; group < groups; ++group) {
      int i = 0;
      for (; i + 2 <= tiles; i += 2) multiply_keys<2>(at + i, group, i);
      if (i < tiles) multiply_keys<1>(at + i, group, i);
      if (group > 0) {
        finish_scores(group - 1, tiles, scores);
      } else {
        multiply_weights();
        meanwhile();
      }
    }
    finish_scores(groups - 1, tiles, scores);
    add_waiting();
  }

  // Values that weights are to come for, `count` of them; no weights may wait.
  void take_values(const void* const* values, int count) {
    for (int k = 0; k < count; k += 4) {
      if (k % LANES == 0) ask_for_some();
      int8_t* to = values_ + (k / LANES + k / 4 % 4 * 4) * LINE_BYTES;  // as weights lie
      int64_t c = 0;
      for (; c + CHUNK <= dim_; c += CHUNK, to += 4 * TILE_BYTES)
        interleave([&](int i) { return codes_at(values[k + i], c); }, to);
      if (c < dim_) interleave([&](int i) { return last_codes(values[k + i], c); }, to);
    }
  }

  // Takes weights [rows, TILE] of `count` values. They wait for dot() or weigh(). False: the unit
  // cannot take one of them.
  bool take_weights(const float* weights, int count) {
    for (int r = 0; r < rows_; ++r) {
      // the unit takes their bytes as numbers without signs
      weight_sizes_[r] = largest_size<false>(weights + r * TILE, count);
      if (!has_whole_numbers(weight_sizes_[r])) return false;
    }
    for (int r = 0; r < rows_; ++r) {
      split_weights(r, weights + r * TILE, count);
      ask_for_some();
    }
    waiting_ = true;
    return true;
  }

  // Adds weights that wait, times their values, to the sums.
  void weigh() {
    multiply_weights();
    add_waiting();
  }

  void scale(int row, float factor) {
    scale_row(sums_ + row * chunks_ * CHUNK, chunks_ * CHUNK, factor);
  }

  // Adds the sums to out [rows, padded], where padded is dim in whole vectors.
  void add_sums(float* out, int64_t padded) const {
    for (int r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < padded; c += CHUNK) {
        Vec x[4];
        repeat<4>([&](auto m) { x[m] = load(sums_ + r * chunks_ * CHUNK + c + m * LANES); });
        change_places<2, 8, 4>(x);
        change_places<1, 4, 4>(x);
        for (int64_t m = 0; m < 4 && c + m * LANES < padded; ++m) {
          float* to = out + r * padded + c + m * LANES;
          write(to, load(to) + x[m]);
        }
      }
    }
  }

 private:
  // With fewer rows than LEAST_ROWS the vectors are as fast, from memory faster (measured).
  static constexpr int ROWS = 8, LEAST_ROWS = 5, CHUNK = 64, TILE_BYTES = 1024;
  static constexpr int KEY_TILES = TILE / LANES, TILE_NUMBERS = TILE_BYTES / 4;
  // Sums of products with two bytes of a query must fit 32 bits.
  static constexpr int64_t MOST_CHANNELS = 256;
  static constexpr float MOST_WEIGHT = 0x1p24f - 0x1p8f;  // rounded up it still has 24 bits

  struct alignas(64) Tiles {  // as the processor reads it
    uint8_t palette = 0, start_row = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // LANES keys as the unit reads them: the first, and the bytes from each to the next.
  struct Keys {
    const char* first;
    int64_t stride;
  };

  static int groups_of(int rows) { return (rows + ROWS - 1) / ROWS; }
  static int chunks_of(int64_t dim) { return static_cast<int>((dim + CHUNK - 1) / CHUNK); }

  static Ints signed_byte(Ints x) { return (x << 24) >> 24; }
  static Bytes low_bytes(Ints x) {
    return bits_of<Bytes>(_mm512_cvtepi32_epi8(bits_of<__m512i>(x)));
  }
  // What the compiler may not know: the unit reads and writes memory.
  static void settle() { asm volatile("" ::: "memory"); }

  // The low bytes of LANES channels from c, four in a row of the tile.
  static void put_column(Ints numbers, int column, int64_t c, int8_t* tile) {
    const Bytes bytes = low_bytes(numbers);
    for (int i = 0; i < 4; ++i)
      std::memcpy(
          tile + (c / 4 + i) * LINE_BYTES + column * 4,
          reinterpret_cast<const char*>(&bytes) + 4 * i, 4);
  }

  // In each block of lanes bit D of the lane and bit STEP of the number of the vector, of COUNT,
  // change places.
  template <int STEP, int D, int COUNT>
  static void change_places(Vec* v) {
    repeat<COUNT>([&](auto k) {
      if constexpr (!(k & STEP)) {
        const Vec a = v[k], b = v[k + STEP];
        v[k] = lower<D>(a, b, Lanes{});
        v[k + STEP] = upper<D>(a, b, Lanes{});
      }
    });
  }

  Keys lay_out(const void* const* keys, int8_t* copies) const {
    const auto* first = static_cast<const char*>(keys[0]);
    const int64_t stride = static_cast<const char*>(keys[1]) - first;
    bool as_they_lie = dim_ % CHUNK == 0;
    for (int k = 2; k < LANES; ++k) as_they_lie &= keys[k] == first + k * stride;
    if (as_they_lie) return {first, stride};
    for (int k = 0; k < LANES; ++k) {
      int8_t* to = copies + k * chunks_ * CHUNK;
      int64_t c = 0;
      for (; c + CHUNK <= dim_; c += CHUNK) _mm512_store_si512(to + c, codes_at(keys[k], c));
      if (c < dim_) _mm512_store_si512(to + c, last_codes(keys[k], c));
    }
    return {reinterpret_cast<const char*>(copies), chunks_ * CHUNK};
  }

  static __m512i codes_at(const void* codes, int64_t c) {
    return _mm512_loadu_si512(static_cast<const int8_t*>(codes) + c);
  }
  // Fewer than CHUNK, and 0.
  __m512i last_codes(const void* codes, int64_t c) const {
    const __mmask64 held = (__mmask64{1} << (dim_ - c)) - 1;
    return _mm512_maskz_loadu_epi8(held, static_cast<const int8_t*>(codes) + c);
  }

  // C times LANES keys, the i-th ones and on, with the rows of a group.
  template <int C>
  void multiply_keys(const Keys* keys, int group, int i) {
    const int8_t* queries = queries_ + group * chunks_ * 2 * TILE_BYTES;
    int32_t* sums = scores_ + (group % 2 * KEY_TILES + i) * 2 * TILE_NUMBERS;
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int chunk = 0; chunk < chunks_; ++chunk, queries += 2 * TILE_BYTES) {
      _tile_loadd(6, queries, LINE_BYTES);
      _tile_loadd(7, queries + TILE_BYTES, LINE_BYTES);
      _tile_loadd(4, keys[0].first + chunk * CHUNK, keys[0].stride);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if constexpr (C == 2) {
        _tile_loadd(5, keys[1].first + chunk * CHUNK, keys[1].stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, sums, LINE_BYTES);
    _tile_stored(1, sums + TILE_NUMBERS, LINE_BYTES);
    if constexpr (C == 2) {
      _tile_stored(2, sums + 2 * TILE_NUMBERS, LINE_BYTES);
      _tile_stored(3, sums + 3 * TILE_NUMBERS, LINE_BYTES);
    }
    settle();
  }

  // Sums [LANES keys, high and middle bytes of a group's rows], and the same of the low bytes, as
  // scores.
  void finish_scores(int group, int tiles, float* scores) {
    const int32_t* sums = scores_ + group % 2 * KEY_TILES * 2 * TILE_NUMBERS;
    const int first = group * ROWS, last = std::min(first + ROWS, rows_);
    for (int i = 0; i < tiles; ++i, sums += 2 * TILE_NUMBERS) {
      ask_for_some();
      Vec x[ROWS];
      repeat<ROWS>([&](auto k) {  // lanes: all rows with key k, and with key k + 8
        const int32_t *one = sums + k * LANES, *other = one + ROWS * LANES;
        const auto both = [&](int at) {
          return bits_of<Ints>(_mm512_inserti64x4(
              _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(one + at))),
              _mm256_loadu_si256((const __m256i*)(other + at)), 1));
        };
        const Vec upper_bytes = floats_of((both(0) << 8) + both(ROWS));
        x[k] = fma(upper_bytes, broadcast(0x1p8f), floats_of(both(TILE_NUMBERS)));
      });
      change_places<4, 4, ROWS>(x);
      change_places<2, 2, ROWS>(x);
      change_places<1, 1, ROWS>(x);
      for (int r = first; r < last; ++r)
        write(scores + r * TILE + i * LANES, x[r - first] * query_steps_[r]);
    }
  }

  // CHUNK channels of four tokens, a row of four tiles, with the tokens' bytes beside one another:
  // column 4 L + e of tile m is channel 16 L + 4 m + e.
  template <class F>
  static void interleave(F&& codes_of, int8_t* to) {
    __m512i v[4];
    repeat<4>([&](auto i) { v[i] = codes_of(i); });
    const __m512i a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, c));
    _mm512_store_si512(to + TILE_BYTES, _mm512_unpackhi_epi16(a, c));
    _mm512_store_si512(to + 2 * TILE_BYTES, _mm512_unpacklo_epi16(b, d));
    _mm512_store_si512(to + 3 * TILE_BYTES, _mm512_unpackhi_epi16(b, d));
  }

  // A row's weights as bytes: high and middle ones in a tile of its group, low ones in the next.
  // Whole lines are written, which the unit can read before they are in the cache; byte
  // 16 i + 4 j + e is token 16 j + 4 i + e.
  void split_weights(int r, const float* weights, int count) {
    const float size = weight_sizes_[r], inverse = size > 0 ? MOST_WEIGHT / size : 0;
    __m512i x[4];
    repeat<4>([&](auto i) {
      const int k = i * LANES;
      const Ints number = k < count ? nearest(load(weights + k) * inverse) : Ints{};
      x[i] = _mm512_shuffle_epi8(bits_of<__m512i>(number), bytes_by_size());
    });
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    int8_t* to = weights_ + r / ROWS * 2 * TILE_BYTES + r % ROWS * LINE_BYTES;
    _mm512_store_si512(to, _mm512_unpacklo_epi64(b, d));
    _mm512_store_si512(to + ROWS * LINE_BYTES, _mm512_unpackhi_epi64(a, c));
    _mm512_store_si512(to + TILE_BYTES, _mm512_unpacklo_epi64(a, c));
  }

  // In each four numbers first the four low bytes, then the next ones.
  static __m512i bytes_by_size() {
    return _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }

  // All that waits is multiplied, and all but the last step added.
  void multiply_weights() {
    if (!waiting_) return;
    for (int step = 0; step < groups_of(rows_) * chunks_; ++step) {
      multiply_values(step);
      if (step > 0) add_weighed(step - 1);
    }
  }
  void add_waiting() {
    if (std::exchange(waiting_, false)) add_weighed(groups_of(rows_) * chunks_ - 1);
  }

  // Sums [a group's high and middle bytes, LANES channels], and of the low bytes, for each of the
  // four tiles of a chunk. A step is a chunk of a group.
  void multiply_values(int step) {
    const int8_t* weights = weights_ + step / chunks_ * 2 * TILE_BYTES;
    const int8_t* values = values_ + step % chunks_ * 4 * TILE_BYTES;
    int32_t* sums = weighed_ + step % 2 * 8 * TILE_NUMBERS;
    settle();
    if (step % chunks_ == 0) {
      _tile_loadd(4, weights, LINE_BYTES);
      _tile_loadd(5, weights + TILE_BYTES, LINE_BYTES);
    }
    repeat<2>([&](auto) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(6, values, LINE_BYTES);
      _tile_loadd(7, values + TILE_BYTES, LINE_BYTES);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 5, 6);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
      _tile_stored(0, sums, LINE_BYTES);
      _tile_stored(1, sums + TILE_NUMBERS, LINE_BYTES);
      _tile_stored(2, sums + 2 * TILE_NUMBERS, LINE_BYTES);
      _tile_stored(3, sums + 3 * TILE_NUMBERS, LINE_BYTES);
      values += 2 * TILE_BYTES, sums += 4 * TILE_NUMBERS;
    });
    settle();
  }

  void add_weighed(int step) {
    const int first = step / chunks_ * ROWS, last = std::min(first + ROWS, rows_);
    for (int r = first; r < last; ++r) {
      ask_for_some();
      const Vec unit = broadcast(weight_sizes_[r] / MOST_WEIGHT);
      const int32_t* sums = weighed_ + step % 2 * 8 * TILE_NUMBERS + (r - first) * LANES;
      float* to = sums_ + (r * chunks_ + step % chunks_) * CHUNK;
      repeat<4>([&](auto m) {
        const int32_t* of_row = sums + m * 2 * TILE_NUMBERS;
        const Ints high = read<Ints>(of_row), middle = read<Ints>(of_row + ROWS * LANES);
        const Ints low = read<Ints>(of_row + TILE_NUMBERS);
        const Vec sum = fma(floats_of(high), broadcast(0x1p16f), floats_of((middle << 8) + low));
        write(to + m * LANES, fma(sum, unit, load(to + m * LANES)));
      });
    }
  }

  int rows_, chunks_;
  int64_t dim_;
  bool waiting_ = false;  // weights
  Upcoming upcoming_;
  int8_t *queries_, *keys_, *values_, *weights_;
  int32_t *scores_, *weighed_;
  float *sums_, *query_steps_, *weight_sizes_;
  Tiles before_;  // torch's own products use the unit too
};

#endif

}  // namespace ascend_kv::cpu
