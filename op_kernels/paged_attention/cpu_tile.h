// The keys and values of an item, tile after tile: where their vectors lie, and the scales, zero
// points and positions that belong to them.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu_call.h"
#include "cpu_softmax.h"

namespace ascend_kv::cpu {

class TileReader {
 public:
  TileReader(const Call& call, const Item& item)
      : call_(call), item_(item), sequence_(call.sequences[item.sequence]) {
    for (int k = 0; k < TILE; ++k) tokens_.position[k] = k;
    if (item_.first_key < item_.last_key) find_vectors(item_.first_key, TILE);
  }

  // The tile at `first` becomes the present one; they are taken in order.
  void move_to(int64_t first) {
    at_ += TILE;
    if (at_ + TILE == MOST) {
      std::copy(keys_ + at_, keys_ + MOST, keys_);
      std::copy(values_ + at_, values_ + MOST, values_);
      at_ = 0;
    }
    find_vectors(first + TILE, at_ + TILE);
    ask_for_parameters(first + TILE);
    read(first);
  }

  int64_t first() const { return first_; }
  TileTokens& tokens() { return tokens_; }
  const TileTokens& tokens() const { return tokens_; }
  // Addresses of the present tile's vectors, and after TILE of them those of the next.
  const void* const* keys() const { return keys_ + at_; }
  const void* const* values() const { return values_ + at_; }

  // f(k, n, block, offset): tokens k to k + n of the tile lie in one block, from there.
  template <class F>
  void for_runs(F&& f) const {
    for_runs(first_, tokens_.count, f);
  }
  // The block of token k of the tile, and the place in it.
  std::pair<int64_t, int64_t> place_of(int k) const {
    const int64_t token = first_ + k, block = token / call_.block_size - sequence_.first_block;
    return {call_.blocks[sequence_.blocks_start + block], token % call_.block_size};
  }

 private:
  static constexpr int MOST = 5 * TILE;  // what is known moves to the front once in four tiles

  int count_from(int64_t first) const {
    return static_cast<int>(std::clamp<int64_t>(item_.last_key - first, 0, TILE));
  }
  template <class F>
  void for_runs(int64_t first, int count, F&& f) const {
    if (count == 0) return;
    const int64_t size = call_.block_size, before = first / size;
    const int64_t* block =
        call_.blocks.data() + sequence_.blocks_start + before - sequence_.first_block;
    int64_t offset = first - before * size;
    for (int k = 0; k < count; ++block) {
      const int n = static_cast<int>(std::min<int64_t>(count - k, size - offset));
      f(k, n, *block, offset);
      k += n, offset = 0;
    }
  }
  void find_vectors(int64_t first, int at);
  void ask_for_parameters(int64_t first) const;
  void read(int64_t first);
  void read_parameter(const Parameter& p, bool& has, float* out) const;

  const Call& call_;
  const Item& item_;
  const Sequence& sequence_;
  // Where vectors lie: of the present tile, at `at_`, and of the next. After the last token its
  // address is repeated.
  const void *keys_[MOST], *values_[MOST];
  int at_ = 0;
  int64_t first_ = 0;
  TileTokens tokens_;
};

// Finds the vectors of a tile, which become the at-th and on of those that are known. Of a tile past
// the last key they are the vector before.
inline void TileReader::find_vectors(int64_t first, int at) {
  const int count = count_from(first);
  const void **keys = keys_ + at, **values = values_ + at;
  for_runs(first, count, [&](int k, int n, int64_t block, int64_t offset) {
    const char* key = call_.key.at(block, item_.kv_head, offset);
    const char* value = call_.value.at(block, item_.kv_head, offset);
    for (int i = k; i < k + n; ++i, key += call_.key.token, value += call_.value.token)
      keys[i] = key, values[i] = value;
  });
  for (int k = count; k < TILE; ++k) {
    keys[k] = keys[k - 1];
    values[k] = values[k - 1];
  }
}

// The scales of a tile that comes.
inline void TileReader::ask_for_parameters(int64_t first) const {
  for_runs(first, count_from(first), [&](int, int, int64_t block, int64_t offset) {
    for (const Side* side : {&call_.key, &call_.value})
      for (const Parameter* p : {&side->scale, &side->zero_point})
        if (p->kind == Parameter::TOKEN)
          __builtin_prefetch(p->address(p->place(block, item_.kv_head, offset)));
  });
}

inline void TileReader::read(int64_t first) {
  first_ = first;
  tokens_.count = count_from(first);
  if (call_.key_positions) {
    for_runs([&](int k, int n, int64_t block, int64_t offset) {
      const int32_t* positions = call_.key_positions + block * call_.position_block +
                                 item_.kv_head * call_.position_head +
                                 offset * call_.position_token;
      for (int i = 0; i < n; ++i) tokens_.position[k + i] = positions[i * call_.position_token];
    });
    for (int k = tokens_.count; k % LANES; ++k) tokens_.position[k] = 0;
  }
  read_parameter(call_.key.scale, tokens_.has_key_scale, tokens_.key_scale);
  read_parameter(call_.key.zero_point, tokens_.has_key_zero, tokens_.key_zero);
  read_parameter(call_.value.scale, tokens_.has_value_scale, tokens_.value_scale);
  read_parameter(call_.value.zero_point, tokens_.has_value_zero, tokens_.value_zero);
}

// Of each token; lanes past the last are 0.
inline void TileReader::read_parameter(const Parameter& p, bool& has, float* out) const {
  has = p.kind == Parameter::TOKEN;
  if (!has) return;
  for_runs([&](int k, int n, int64_t block, int64_t offset) {
    p.get_tokens(block, item_.kv_head, offset, n, out + k);
  });
  for (int k = tokens_.count; k % LANES; ++k) out[k] = 0;
}

}  // namespace ascend_kv::cpu
