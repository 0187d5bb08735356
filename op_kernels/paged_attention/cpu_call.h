// One call of paged_attention as addresses and numbers, and how it is cut into items of work.
//
// An item is some queries of one sequence, one KV head with its group of query heads, and a range
// of keys. How the work is cut depends on the sequence alone, never on threads or on the rest of
// the batch, and so do the bits of the results. Letters: geometry.py.
#pragma once

#include <algorithm>
#include <vector>

#include "../common/cpu_paged.h"
#include "../common/cpu_vector.h"
#include "cpu_offset.h"
#include "cpu_softmax.h"

namespace ascend_kv::cpu {

constexpr int MANY_ROWS = 96;  // of an item
// A sequence is cut along its keys where it has few items otherwise.
constexpr int64_t CHUNKS_WANTED = 64;
constexpr int64_t CHUNK_TOKENS = 1024;

struct Sequence {
  int64_t query_start, queries, kv_length;
  int64_t first_block;   // of which the number is known
  int64_t blocks_start;  // where the numbers begin
};

struct Call {
  Side key, value;
  int64_t heads, kv_heads, block_size, dim, padded;  // padded: dim in whole vectors
  bool causal;
  int64_t window;

  const char* query;
  Type query_type;
  int64_t query_token, query_head;  // strides in bytes
  float softmax_scale;

  const float* sinks;  // null: none, as what follows
  int64_t sink_stride;
  const float* bias;
  int64_t bias_token, bias_head;
  KeyOffset offset;
  const int32_t* key_positions;
  int64_t position_block, position_head, position_token;
  const std::vector<int64_t>* query_positions;

  std::vector<Sequence> sequences;
  std::vector<int64_t> blocks;

  char* output;          // [T, H, D], contiguous, the query's type
  float* log_sum_exp;    // [T, H]

  int64_t group() const { return heads / kv_heads; }
  bool ordered() const { return !key_positions && !query_positions; }

  int64_t position(const Sequence& s, int64_t query) const {
    if (query_positions) return (*query_positions)[s.query_start + query];
    return s.kv_length - s.queries + query;
  }
  // The positions that a query at `position` may see, both inclusive.
  int64_t first_seen(int64_t position) const {
    return window ? position - window + 1 : std::numeric_limits<int64_t>::min();
  }
  int64_t last_seen(int64_t position) const {
    return causal ? position : std::numeric_limits<int64_t>::max();
  }
};

struct Item {
  int32_t sequence, kv_head;
  int64_t query, queries;        // first and how many, of the sequence
  int64_t first_key, last_key;   // exclusive
  int64_t part;                  // where an item that is one of several leaves its sums, or -1
};

// Parts that belong together: `count` of them, one after another from `part`.
struct Merge {
  int32_t sequence, kv_head;
  int64_t query, queries, part, count;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int64_t part_floats = 0;
  int64_t work = 0;  // multiplications, for whether threads are worth waking
};

// Floats that a row leaves: its sums, then largest, total and zero.
inline int64_t part_row_floats(const Call& call) { return call.padded + LANES; }

inline Plan make_plan(const Call& call) {
  Plan plan;
  const int64_t group = call.group();
  for (size_t index = 0; index < call.sequences.size(); ++index) {
    const Sequence& s = call.sequences[index];
    const int64_t step = std::max<int64_t>(1, MANY_ROWS / group);
    const int64_t tiles = (s.queries + step - 1) / step;
    for (int64_t low = 0; low < s.queries; low += step) {
      const int64_t queries = std::min(step, s.queries - low);
      int64_t first = 0, last = s.kv_length;
      if (!call.key_positions) {  // then a key's position is its index
        int64_t lowest = std::numeric_limits<int64_t>::max(), highest = -1;
        for (int64_t q = low; q < low + queries; ++q) {
          const int64_t position = call.position(s, q);
          lowest = std::min(lowest, call.first_seen(position));
          highest = std::max(highest, call.last_seen(position));
        }
        first = std::clamp<int64_t>(lowest, 0, s.kv_length);
        last = std::clamp<int64_t>(highest, -1, s.kv_length - 1) + 1;
        last = std::max(last, first);
      }
      const int64_t keys = last - first;
      const int64_t wanted = std::max<int64_t>(1, CHUNKS_WANTED / tiles);
      const int64_t most = std::max<int64_t>(1, (keys + CHUNK_TOKENS - 1) / CHUNK_TOKENS);
      const int64_t chunks = std::min(wanted, most);
      const int64_t chunk = round_up(std::max<int64_t>(1, (keys + chunks - 1) / chunks), TILE);
      const int64_t count = std::max<int64_t>(1, (keys + chunk - 1) / chunk);
      const int64_t part = queries * group * part_row_floats(call);
      const auto row = static_cast<int32_t>(index);
      for (int64_t n = 0; count > 1 && n < call.kv_heads; ++n) {
        const int64_t where = plan.part_floats + n * count * part;
        plan.merges.push_back({row, static_cast<int32_t>(n), low, queries, where, count});
      }
      // heads innermost: what they read lies side by side
      for (int64_t c = 0; c < count; ++c) {
        const int64_t begin = first + c * chunk, end = std::min(begin + chunk, last);
        for (int64_t n = 0; n < call.kv_heads; ++n) {
          const int64_t where = count > 1 ? plan.part_floats + (n * count + c) * part : -1;
          plan.items.push_back({row, static_cast<int32_t>(n), low, queries, begin, end, where});
        }
      }
      if (count > 1) plan.part_floats += call.kv_heads * count * part;
      plan.work += queries * call.heads * keys * call.dim;
    }
  }
  return plan;
}

}  // namespace ascend_kv::cpu
