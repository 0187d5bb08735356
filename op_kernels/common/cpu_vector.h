// One vector of floats for the CPU operators, as wide as the compiler was told the CPU is: 16 lanes
// with AVX-512, 8 with AVX2, else 4 (NEON, SSE). Arithmetic, comparisons and `mask ? a : b` are the
// compiler's own on its vector types; here is what those lack.
//
// Everything is compiled with -ffp-contract=off: a product and a sum round once each, as in the
// Python references, unless fma() is written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ascend_kv::cpu {

#define ASCEND_KV_INLINED __attribute__((always_inline))
#define ASCEND_KV_INLINE inline ASCEND_KV_INLINED

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ASCEND_KV_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ASCEND_KV_AVX2 1
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using Vec = float __attribute__((vector_size(LANES * 4)));
using Ints = int32_t __attribute__((vector_size(LANES * 4)));
using Words = uint32_t __attribute__((vector_size(LANES * 4)));
using Halves = uint16_t __attribute__((vector_size(LANES * 2)));
using Bytes = uint8_t __attribute__((vector_size(LANES)));
using Codes = int8_t __attribute__((vector_size(LANES)));

// Storage types as the kernels see them: only bytes.
struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };
struct E4M3 { uint8_t bits; };
struct E5M2 { uint8_t bits; };
struct Nibbles { uint8_t bits; };  // two codes of four bits, the first one low

// Channels in an element of a storage type.
template <class T>
constexpr int CHANNELS = 1;
template <>
inline constexpr int CHANNELS<Nibbles> = 2;

// Where channel `at` lies, even where two share an element.
template <class T>
inline T* past(T* from, int64_t at) { return from + at / CHANNELS<std::remove_const_t<T>>; }
template <class T>
constexpr int64_t bytes_of_channels(int64_t count) { return count * sizeof(T) / CHANNELS<T>; }

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline Vec broadcast(float x) { return x - Vec{}; }  // x - 0 is x, also for -0

template <class V, class T>
inline V read(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
inline void write(T* to, const V& v) { std::memcpy(to, &v, sizeof v); }

template <class To, class From>
inline To bits_of(const From& v) {
  static_assert(sizeof(To) == sizeof(From));
  return read<To>(&v);
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(ASCEND_KV_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(ASCEND_KV_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Where one is NaN the second is taken, in both.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
inline Vec magnitude(Vec a) { return bits_of<Vec>(bits_of<Words>(a) & 0x7fffffffu); }

// f(0) to f(N - 1), the numbers known when compiling: arrays that are only indexed by them stay in
// registers, where a loop that the compiler unrolls late would leave them in memory.
template <class F, int... I>
ASCEND_KV_INLINE void repeat(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
ASCEND_KV_INLINE void repeat(F&& f) {
  repeat(f, std::make_integer_sequence<int, N>{});
}

// ---- what storage types hold, as floats ------------------------------------------------------

inline Vec load(const float* from) { return read<Vec>(from); }

inline Vec load(const int8_t* from) {
#if defined(ASCEND_KV_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits_of<__m128i>(read<Codes>(from))));
#elif defined(ASCEND_KV_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#elif defined(__aarch64__)
  int32_t four;
  std::memcpy(&four, from, 4);
  const int8x8_t codes = vreinterpret_s8_s32(vdup_n_s32(four));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes))));
#else
  return __builtin_convertvector(read<Codes>(from), Vec);
#endif
}

inline Vec load(const BFloat* from) {
  const Words wide = __builtin_convertvector(read<Halves>(from), Words);
  return bits_of<Vec>(wide << 16);
}

inline Vec load(const Half* from) {
#if defined(ASCEND_KV_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(ASCEND_KV_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)from)));
#else
  const Words h = __builtin_convertvector(read<Halves>(from), Words);
  // the exponent's bias put right by a multiplication, which also normalizes denormals
  const Words shifted = (h & 0x7fffu) << 13;
  const Vec scaled = bits_of<Vec>(shifted) * 0x1p112f;
  const Vec special = bits_of<Vec>(shifted | 0x7f800000u);
  const Vec value = (h & 0x7c00u) == 0x7c00u ? special : scaled;
  return bits_of<Vec>(bits_of<Words>(value) | ((h & 0x8000u) << 16));
#endif
}

// An FP8 number is the upper byte of a half (E5M2), or nearly (E4M3).
inline Vec load(const E5M2* from) {
  const Halves half = __builtin_convertvector(read<Bytes>(from), Halves) << 8;
  return load(reinterpret_cast<const Half*>(&half));
}
inline Vec load(const E4M3* from) {
  const Halves bits = __builtin_convertvector(read<Bytes>(from), Halves);
  const Halves size = bits & 0x7f;
  // the exponent's bias is 8 less than a half's; all bits set is NaN, as a half's exponent is then
  Halves half = ((bits & 0x80) << 8) | (size << 7);
  half |= size == 0x7f ? Halves{} + 0x7c00 : Halves{};
  return load(reinterpret_cast<const Half*>(&half)) * 256.0f;
}

inline Vec load(const Nibbles* from) {
  using Pairs = uint16_t __attribute__((vector_size(LANES)));
  using Packed = uint8_t __attribute__((vector_size(LANES / 2)));
  const Pairs both = __builtin_convertvector(read<Packed>(from), Pairs);
  const Codes codes = bits_of<Codes>((both & 0x0f) | ((both & 0xf0) << 4));
  const Codes extended = (codes ^ 8) - 8;
  return load(reinterpret_cast<const int8_t*>(&extended));
}

// Fewer than LANES of them; the other lanes are 0.
template <class T>
inline Vec load_some(const T* from, int count) {
  T held[LANES] = {};
  std::memcpy(held, from, bytes_of_channels<T>(count));
  return load(held);
}

// ---- floats, as storage types hold them: to the nearest, half to even ------------------------

inline void store(float* to, Vec v) { write(to, v); }

inline void store(BFloat* to, Vec v) {
  const Words w = bits_of<Words>(v);
  const Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  const Words kept = v == v ? rounded : Words{} + 0x7fc0u;
  write(to, __builtin_convertvector(kept, Halves));
}

inline void store(Half* to, Vec v) {
#if defined(ASCEND_KV_AVX512)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(ASCEND_KV_AVX2)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16((uint16_t*)to, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#else
  const Vec size = magnitude(v);
  // beyond half range the product overflows; below its normals the sum rounds where halves do
  const Vec normal = (size * 0x1p112f) * 0x1p-110f;
  Words bias = bits_of<Words>(size) & 0x7f800000u;
  bias = bias < 0x38800000u ? Words{} + 0x38800000u : bias;
  const Words rounded = bits_of<Words>(bits_of<Vec>(bias + 0x07800000u) + normal);
  const Words half = ((rounded >> 13) & 0x7c00u) + (rounded & 0xfffu);
  const Words kept = v == v ? half : Words{} + 0x7e00u;
  const Words sign = (bits_of<Words>(v) >> 16) & 0x8000u;
  write(to, __builtin_convertvector(kept | sign, Halves));
#endif
}

// Whole numbers of -128 to 127.
inline void store(int8_t* to, Vec v) {
  const Ints whole = __builtin_convertvector(v, Ints);
#if defined(ASCEND_KV_AVX512)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(bits_of<__m512i>(whole)));
#elif defined(ASCEND_KV_AVX2)
  const __m256i w = bits_of<__m256i>(whole);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
#elif defined(__aarch64__)
  const int16x4_t words = vmovn_s32(whole);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  std::memcpy(to, &four, 4);
#else
  write(to, __builtin_convertvector(whole, Codes));
#endif
}

// To the nearest, half to even, up to 2^22; beyond 2^31, and of NaN, some whole number.
inline Ints nearest(Vec v) {
#if defined(ASCEND_KV_AVX512)
  return bits_of<Ints>(_mm512_cvtps_epi32(v));
#elif defined(ASCEND_KV_AVX2)
  return bits_of<Ints>(_mm256_cvtps_epi32(v));
#elif defined(__aarch64__)
  return bits_of<Ints>(vcvtnq_s32_f32(v));
#else
  const Vec magic = broadcast(0x1.8p23f);  // the sum has no bits left for fractions
  const Vec whole = magnitude(v) < 0x1p22f ? (v + magic) - magic : v;
  return __builtin_convertvector(whole, Ints);
#endif
}
inline Vec floats_of(Ints v) { return __builtin_convertvector(v, Vec); }

// Four vectors at a time; what is beyond -128 to 127 becomes the nearer of these.
inline void store_saturated(int8_t* to, const Ints* v) {
#if defined(ASCEND_KV_AVX2)
  const auto x = [&](int i) { return bits_of<__m256i>(v[i]); };
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(x(0), x(1)), _mm256_packs_epi32(x(2), x(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (int i = 0; i < 4; ++i) {
#if defined(ASCEND_KV_AVX512)
    const __m128i codes = _mm512_cvtsepi32_epi8(bits_of<__m512i>(v[i]));
    _mm_storeu_si128((__m128i*)(to + i * LANES), codes);
#else
    const Ints most = Ints{} + 127, least = Ints{} - 128;
    const Ints high = v[i] > most ? most : v[i];
    store(to + i * LANES, floats_of(high < least ? least : high));
#endif
  }
#endif
}

// Numbers up to the largest of the type.
template <int MANTISSA, int BIAS, class T>
inline void store_fp8(T* to, Vec v) {
  constexpr int SHIFT = 23 - MANTISSA;
  const Words bits = bits_of<Words>(magnitude(v));
  const Words even = bits + ((1u << (SHIFT - 1)) - 1u) + ((bits >> SHIFT) & 1u);
  const Words normal = (even >> SHIFT) - (static_cast<uint32_t>(127 - BIAS) << MANTISSA);
  // below the smallest normal: whole units, the largest of which is the smallest normal
  const Vec magic = broadcast(0x1.8p23f);
  const Vec units = (magnitude(v) * static_cast<float>(1 << (BIAS + MANTISSA - 1)) + magic) - magic;
  const Words small = bits_of<Words>(__builtin_convertvector(units, Ints));
  const Words code = bits < (static_cast<uint32_t>(128 - BIAS) << 23) ? small : normal;
  const Words sign = (bits_of<Words>(v) >> 24) & 0x80u;
  write(to, __builtin_convertvector(code | sign, Bytes));
}
inline void store(E4M3* to, Vec v) { store_fp8<3, 7>(to, v); }
inline void store(E5M2* to, Vec v) { store_fp8<2, 15>(to, v); }

// Whole numbers of -8 to 7.
inline void store(Nibbles* to, Vec v) {
  using Pairs = uint16_t __attribute__((vector_size(LANES)));
  using Packed = uint8_t __attribute__((vector_size(LANES / 2)));
  Pairs both;
  store(reinterpret_cast<int8_t*>(&both), v);
  write(to, __builtin_convertvector((both & 0x0f) | ((both >> 4) & 0xf0), Packed));
}

template <class T>
inline void store_some(T* to, Vec v, int count) {
  T held[LANES];
  store(held, v);
  std::memcpy(to, held, bytes_of_channels<T>(count));
}

inline float to_float(Half x) { return load_some(&x, 1)[0]; }
inline float round_to_half(float x) {
  Half half[LANES];
  store(half, broadcast(x));
  return load(half)[0];
}

// ---- over rows of any length -----------------------------------------------------------------

// f(first, count) for every vector of a row of n, count being LANES but perhaps for the last.
template <class F>
inline void for_vectors(int64_t n, F&& f) {
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) f(c, LANES);
  if (c < n) f(c, static_cast<int>(n - c));
}

template <class T>
inline Vec load_at(const T* from, int64_t at, int count) {
  from = past(from, at);
  return count == LANES ? load(from) : load_some(from, count);
}
template <class T>
inline void store_at(T* to, int64_t at, int count, Vec v) {
  to = past(to, at);
  if (count == LANES) store(to, v);
  else store_some(to, v, count);
}

// ---- across lanes ----------------------------------------------------------------------------

// Lanes of a and b put together: lane l is From(l) of a, or of b from LANES on.
#if defined(__clang__)
#define ASCEND_KV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ASCEND_KV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
using Lanes = std::make_integer_sequence<int, LANES>;

// The lanes without bit D of a, and between them those of b; and the lanes with it.
template <int D, int... L>
inline Vec lower(Vec a, Vec b, std::integer_sequence<int, L...>) {
  return ASCEND_KV_SHUFFLE(a, b, ((L & D) ? (L ^ D) + LANES : L)...);
}
template <int D, int... L>
inline Vec upper(Vec a, Vec b, std::integer_sequence<int, L...>) {
  return ASCEND_KV_SHUFFLE(a, b, ((L & D) ? L + LANES : L ^ D)...);
}

// Whether every lane of a comparison holds.
inline bool all(Ints mask) {
#if defined(ASCEND_KV_AVX512)
  return _mm512_movepi32_mask(bits_of<__m512i>(mask)) == 0xffff;
#elif defined(ASCEND_KV_AVX2)
  return _mm256_movemask_ps(bits_of<__m256>(mask)) == 0xff;
#elif defined(__aarch64__)
  return vminvq_u32(bits_of<uint32x4_t>(mask)) != 0;
#else
  bool every = true;
  for (int l = 0; l < LANES; ++l) every &= mask[l] != 0;
  return every;
#endif
}

// Over all lanes, halves against halves.
template <int D = LANES / 2>
inline float sum(Vec v) {
  if constexpr (D == 0) return v[0];
  else return sum<D / 2>(v + upper<D>(v, v, Lanes{}));
}
template <int D = LANES / 2>
inline float largest(Vec v) {
  if constexpr (D == 0) return v[0];
  else return largest<D / 2>(larger(v, upper<D>(v, v, Lanes{})));
}
inline float smallest(Vec v) { return -largest(-v); }

// Of numbers that are not negative the larger has the larger bits, and NaN the largest.
inline Words larger_bits(Words a, Words b) { return a > b ? a : b; }
template <int D = LANES / 2>
inline uint32_t largest_bits(Words v) {
  if constexpr (D == 0) return v[0];
  else return largest_bits<D / 2>(larger_bits(v, bits_of<Words>(upper<D>(
                 bits_of<Vec>(v), bits_of<Vec>(v), Lanes{}))));
}

// Lane l of the result joins all lanes of v[l], by `with`; v is overwritten. A tree, the same on
// every call.
template <int D = LANES / 2, class With>
inline Vec join_each(Vec* v, With with) {
  if constexpr (D == 0) {
    return v[0];
  } else {
    for (int k = 0; k < D; ++k)
      v[k] = with(lower<D>(v[k], v[k + D], Lanes{}), upper<D>(v[k], v[k + D], Lanes{}));
    return join_each<D / 2>(v, with);
  }
}
inline Vec sum_each(Vec* v) {
  return join_each(v, [](Vec a, Vec b) { return a + b; });
}
inline Vec largest_each(Vec* v) { return join_each(v, larger); }

// Lane i of v[k] and lane k of v[i] change places.
template <int D = LANES / 2>
inline void transpose(Vec* v) {
  if constexpr (D > 0) {
    for (int k = 0; k < LANES; ++k) {
      if (k & D) continue;
      const Vec a = v[k], b = v[k + D];
      v[k] = lower<D>(a, b, Lanes{});
      v[k + D] = upper<D>(a, b, Lanes{});
    }
    transpose<D / 2>(v);
  }
}

// ---- exponential -----------------------------------------------------------------------------

// exp(x) for x <= 0, NaN for NaN, 0 below -87.3 (where floats are denormal); within 2 units in
// the last place. Range reduction by Cody and Waite, then a polynomial of degree 6 on
// [-ln 2 / 2, ln 2 / 2], its error spread evenly by reweighted least squares.
inline Vec exp_negative(Vec x) {
  const Vec magic = broadcast(0x1.8p23f);
  const Vec shifted = fma(x, broadcast(0x1.715476p0f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0x1.62e4p-1f), x);
  r = fma(n, broadcast(-0x1.7f7d1cp-20f), r);
  Vec p = broadcast(0x1.6a23dcp-10f);
  p = fma(p, r, broadcast(0x1.123a2p-7f));
  p = fma(p, r, broadcast(0x1.5558f2p-5f));
  p = fma(p, r, broadcast(0x1.555492p-3f));
  p = fma(p, r, broadcast(0x1.fffffcp-2f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  const Words power = (bits_of<Words>(shifted) + 127u) << 23;
  return x < -87.3f ? Vec{} : p * bits_of<Vec>(power);
}

inline float exp_negative(float x) { return exp_negative(broadcast(x))[0]; }

}  // namespace ascend_kv::cpu
