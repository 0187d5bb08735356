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

struct RowState {
  int64_t first_seen, last_seen;  // positions
  float largest = NOTHING;  // score
  float total = 0;          // of exp(score - largest)
  float zero = 0;           // of the same times the values' zero points
};

// Dot products become weights, in place. `sum` is the query's own sum (for zero points), `shift` a
// constant of all its scores; `bias` is null or lies beside the scores. Returns what the sums so
// far must be multiplied by.
inline float weigh_scores(
    float* scores, const TileTokens& tokens, const Seen& seen, float sum, float shift,
    const float* bias, RowState& state) {
  const int whole = static_cast<int>(round_up(tokens.count, LANES));
  Ints lane;
  for (int l = 0; l < LANES; ++l) lane[l] = l;
  Vec most = broadcast(NOTHING);
  for (int k = 0; k < whole; k += LANES) {
    Vec s = load(scores + k);
    if (tokens.has_key_scale) s = s * load(tokens.key_scale + k);
    if (tokens.has_key_zero) s = fma(broadcast(sum), load(tokens.key_zero + k), s);
    s = s + shift;
    const int left = tokens.count - k;
    if (bias) s = s + load_at(bias, k, std::min(left, LANES));
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
  const float largest_now = std::max(state.largest, largest(most));
  // a tile of which nothing is seen leaves -inf: then every weight is exp(-inf) = 0
  const float base = largest_now == NOTHING ? 0.0f : largest_now;
  const float kept = state.largest == NOTHING ? 0.0f : exp_negative(state.largest - base);
  state.largest = largest_now;
  Vec total{}, zero{};
  for (int k = 0; k < whole; k += LANES) {
    Vec p = exp_negative(load(scores + k) - base);
    total = total + p;
    if (tokens.has_value_zero) zero = fma(p, load(tokens.value_zero + k), zero);
    if (tokens.has_value_scale) p = p * load(tokens.value_scale + k);
    write(scores + k, p);
  }
  state.total = state.total * kept + cpu::sum(total);
  state.zero = state.zero * kept + cpu::sum(zero);
  return kept;
}

inline void scale_row(float* row, int64_t padded, float factor) {
  for (int64_t c = 0; c < padded; c += LANES) write(row + c, load(row + c) * factor);
}

}  // namespace ascend_kv::cpu
