// Softmax over tiles of keys, one after another: what is kept of the tiles so far is put right
// when a larger score turns up (Milakov and Gimelshein, 2018).
#pragma once

#include <algorithm>
#include <limits>

#include "../common/cpu_vector.h"

namespace ascend_kv::cpu {

constexpr int TILE = 64;  // keys of a tile
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What is known of the tokens of a tile, besides keys and values. Lanes past `count` may hold
// anything in positions and must be 0 in the scales.
struct TileTokens {
  int count = 0;
  bool has_key_scale = false, has_key_zero = false, has_value_scale = false,
       has_value_zero = false;
  float key_scale[TILE], key_zero[TILE], value_scale[TILE], value_zero[TILE];
  int32_t position[TILE];  // of the key, or its index in the tile
};

// What one query sees of a tile: positions first to last.
struct Seen {
  bool all = true;
  int32_t first = 0, last = 0;
};

// One row after all its tiles, or a part of them.
struct RowState {
  float largest = NOTHING;  // score
  float total = 0;          // of exp(score - largest)
  float zero = 0;           // of the same times the values' zero points
};

// The same of many rows, whole vectors of them, and what their sums so far must be multiplied by.
struct RowStates {
  float *largest, *total, *zero, *kept;

  RowState operator[](int r) const { return {largest[r], total[r], zero[r]}; }
  RowStates from(int r) const { return {largest + r, total + r, zero + r, kept + r}; }
};

// What a row brings to its dot products: the query's own sum (for zero points), a constant of all
// its scores, and a bias, null or beside the scores.
struct RowShift {
  float sum, constant;
  const float* bias;
};

// Dot products of one row become scores, in place; the largest in each lane is returned.
inline Vec shift_scores(
    float* scores, const TileTokens& tokens, const Seen& seen, const RowShift& shift) {
  Ints lane;
  for (int l = 0; l < LANES; ++l) lane[l] = l;
  Vec most = broadcast(NOTHING);
  for (int k = 0; k < tokens.count; k += LANES) {
    Vec s = load(scores + k);
    if (tokens.has_key_scale) s = s * load(tokens.key_scale + k);
    if (tokens.has_key_zero) s = fma(broadcast(shift.sum), load(tokens.key_zero + k), s);
    s = s + shift.constant;
    const int left = tokens.count - k;
    if (shift.bias) s = s + load_at(shift.bias, k, std::min(left, LANES));
    if (!seen.all || left < LANES) {
      Ints hidden = lane >= left;
      if (!seen.all) {
        const Ints position = read<Ints>(tokens.position + k);
        hidden = hidden | (position < seen.first) | (position > seen.last);
      }
      s = hidden ? broadcast(NOTHING) : s;
    }
    write(scores + k, s);
    most = larger(s, most);
  }
  return most;
}

// Scores of one row become weights, in place, times the values' scales.
inline void weigh_row(
    float* scores, const TileTokens& tokens, float base, Vec& total, Vec& zero) {
  total = zero = Vec{};
  for (int k = 0; k < tokens.count; k += LANES) {
    Vec p = exp_negative(load(scores + k) - base);
    total = total + p;
    if (tokens.has_value_zero) zero = fma(p, load(tokens.value_zero + k), zero);
    if (tokens.has_value_scale) p = p * load(tokens.value_scale + k);
    write(scores + k, p);
  }
}

// Dot products [rows, TILE] of up to LANES rows become weights, in place. `seen(r)` and `shift(r)`
// are asked for each row.
template <class SeenBy, class ShiftOf>
inline void weigh_scores(
    float* scores, int rows, const TileTokens& tokens, SeenBy&& seen, ShiftOf&& shift,
    const RowStates& states) {
  Vec lanes[LANES], zeros[LANES];
  for (int r = 0; r < LANES; ++r)
    lanes[r] = r < rows ? shift_scores(scores + r * TILE, tokens, seen(r), shift(r)) : Vec{};
  const Vec before = load(states.largest);
  const Vec largest = larger(largest_each(lanes), before);
  // of a row that sees nothing yet the largest is -inf: every weight is then exp(-inf) = 0
  const Vec base = largest == NOTHING ? Vec{} : largest;
  const Vec kept = exp_negative(before - base);
  for (int r = 0; r < LANES; ++r) {
    lanes[r] = zeros[r] = Vec{};
    if (r < rows) weigh_row(scores + r * TILE, tokens, base[r], lanes[r], zeros[r]);
  }
  store(states.largest, largest);
  store(states.kept, kept);
  store(states.total, load(states.total) * kept + sum_each(lanes));
  if (tokens.has_value_zero) store(states.zero, load(states.zero) * kept + sum_each(zeros));
}

inline void scale_row(float* row, int64_t padded, float factor) {
  for (int64_t c = 0; c < padded; c += LANES) write(row + c, load(row + c) * factor);
}

}  // namespace ascend_kv::cpu
