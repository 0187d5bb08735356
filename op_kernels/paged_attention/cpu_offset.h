// What scores lack where keys are stored without an offset b that a rotary embedding turns by R(n):
// q . R(n) b. It is given back tile by tile, in one of two ways.
//
// Many rows: R(n) b is added to the converted keys, once for all of them (add_offset).
//
// Few rows: with a = q1 b1 + q2 b2 and b = q2 b1 - q1 b2 of each pair of channels a score lacks a
// sum of waves, a cos(n w) + b sin(n w) (RowOffsets; how they are added up: cpu_rotary.h).
#pragma once

#include "../common/cpu_paged.h"
#include "cpu_rotary.h"

namespace ascend_kv::cpu {

// The offset of one call; `tables` is null where there is none.
struct KeyOffset {
  std::shared_ptr<const RotaryTables> tables;
  const float* data = nullptr;  // [N, D], contiguous
  const char* query = nullptr;  // null: the call's own
  Type query_type = Type::FLOAT;
  int64_t query_token = 0, query_head = 0;  // strides in bytes
};

// Adds R(n) b to a tile of keys, channels as rows [D, TILE], that are multiplied by their scales
// first: of each column (null: none) and of each row (by channel).
template <class ScaleOf>
inline void add_offset(
    const RotaryTables& tables, const float* turn, const float* offset, const float* token_scale,
    ScaleOf&& scale_of, int columns, float* keys) {
  const int64_t pairs = tables.pairs();
  for (int64_t j = 0; j < pairs; ++j) {
    const float c = turn[tables.place(j)], s = turn[tables.width + tables.place(j)];
    const float b1 = offset[j], b2 = offset[pairs + j];
    const Vec x = broadcast(b1 * c - b2 * s), y = broadcast(b2 * c + b1 * s);
    const Vec x_scale = broadcast(scale_of(j)), y_scale = broadcast(scale_of(pairs + j));
    const float* cosines = tables.turns() + j * 2 * TILE;
    float *first = keys + j * TILE, *second = first + pairs * TILE;
    for (int k = 0; k < columns; k += LANES) {
      const Vec cosine = load(cosines + k), sine = load(cosines + TILE + k);
      const Vec scale = token_scale ? load(token_scale + k) : broadcast(1.0f);
      const Vec of_first = fma(-y, sine, x * cosine), of_second = fma(x, sine, y * cosine);
      write(first + k, fma(load(first + k), scale * x_scale, of_first));
      write(second + k, fma(load(second + k), scale * y_scale, of_second));
    }
  }
}

// What the scores of a few rows lack, tile after tile.
class RowOffsets {
 public:
  static int64_t floats(const RotaryTables& tables, int rows) {
    return rows * (2 * tables.width + turned_floats(tables) + NODES + TILE);
  }

  RowOffsets(const RotaryTables& tables, int rows, float* memory)
      : tables_(tables), rows_(rows), stride_(turned_floats(tables)) {
    waves_ = std::exchange(memory, memory + rows * 2 * tables.width);
    turned_ = std::exchange(memory, memory + rows * stride_);
    stretch_ = std::exchange(memory, memory + rows * NODES);
    bias_ = memory;
    std::fill(waves_, waves_ + rows * 2 * tables.width, 0.0f);
  }

  // Row r is this query, which meets this offset [D].
  void load_row(int r, const float* query, const float* offset) {
    float* to = waves_ + r * 2 * tables_.width;
    load_pairs(0, tables_.slow, query, offset, to);
    load_pairs(tables_.slow, tables_.slowest, query, offset, to + tables_.slow_at);
    load_pairs(tables_.slowest, tables_.pairs(), query, offset, to + tables_.slowest_at);
  }

  // [rows, TILE], of the tile that is next from this place.
  const float* make(const TilePlace& place) {
    for_row_blocks<MOST_ROWS>(rows_, [&](auto block, int first) {
      constexpr int R = block();
      const int64_t slow = tables_.slow, slowest = tables_.slowest, pairs = tables_.pairs();
      float* turned = turned_ + first * stride_;
      if (slowest < pairs && place.tile() == 0) {
        turn_rows<R>(place.turn(), first, tables_.slowest_at, tables_.width);
        add_up<R>(
            turned + NODES + tables_.slowest_at, pairs - slowest,
            tables_.nodes() + (slowest - slow) * NODES, nullptr, stretch_ + first * NODES, NODES);
      }
      turn_rows<R>(place.turn(), first, 0, tables_.slowest_at);
      if (slow < pairs) {
        const float* stretch = slowest < pairs ? tables_.stretch(place.tile()) : nullptr;
        add_up<R>(
            turned + NODES + tables_.slow_at, slowest - slow, tables_.nodes(), stretch,
            turned + 2 * slow, stride_, stretch_ + first * NODES);
      }
      for (int column = 0; column < HALF_TILE; column += LANES)
        make_columns<R>(turned, column, bias_ + first * TILE);
    });
    return bias_;
  }

 private:
  // A row of turned waves: the fast ones, then NODES sums over what fills up their last vector,
  // then the others.
  static int64_t turned_floats(const RotaryTables& tables) { return tables.width + NODES; }

  // Amplitudes of cosines and sines in turns, and the same with each two exchanged.
  void load_pairs(
      int64_t from, int64_t to, const float* __restrict query, const float* __restrict offset,
      float* __restrict waves) const {
    float* __restrict exchanged = waves + tables_.width;
    const float *query_2 = query + tables_.pairs(), *offset_2 = offset + tables_.pairs();
    for (int64_t j = from; j < to; ++j, waves += 2, exchanged += 2) {
      const float even = query[j] * offset[j] + query_2[j] * offset_2[j];
      const float odd = query_2[j] * offset[j] - query[j] * offset_2[j];
      waves[0] = even, waves[1] = odd;
      exchanged[0] = odd, exchanged[1] = even;
    }
  }

  // a cos + b sin, and b cos - a sin.
  template <int R>
  void turn_rows(const float* turn, int row, int64_t first, int64_t last) const {
    const int64_t width = tables_.width;
    for (int64_t j = first; j < last; j += LANES) {
      const Vec cosine = load(turn + j), sine = load(turn + width + j);
      const float* waves = waves_ + row * 2 * width + j;
      float* to = turned_ + row * stride_ + (j < tables_.slow_at ? 0 : NODES) + j;
      for (int r = 0; r < R; ++r, waves += 2 * width, to += stride_)
        write(to, fma(load(waves), cosine, load(waves + width) * sine));
    }
  }

  // Even and odd parts in turns at each node above 0: of so many waves, by a table of [NODES] for
  // each, and of NODES numbers `more`, by another.
  template <int R>
  void add_up(
      const float* waves, int64_t count, const float* table, const float* more_table, float* to,
      int64_t to_stride, const float* more = nullptr) const {
    for (int column = 0; column < NODES; column += LANES) {
      Vec sums[R] = {};
      for (int64_t j = 0; j < count; ++j) {
        const Vec at_nodes = load(table + j * NODES + column);
        repeat<R>([&](auto r) {
          sums[r] = fma(broadcast_two(waves + r * stride_ + 2 * j), at_nodes, sums[r]);
        });
      }
      for (int k = 0; more_table && k < NODES; ++k) {
        const Vec at_nodes = load(more_table + k * NODES + column);
        repeat<R>([&](auto r) {
          sums[r] = fma(broadcast(more[r * NODES + k]), at_nodes, sums[r]);
        });
      }
      repeat<R>([&](auto r) { write(to + r * to_stride + column, sums[r]); });
    }
  }

  // LANES positions after the middle of the tile, and as many before it.
  template <int R>
  void make_columns(const float* turned, int column, float* bias) const {
    Vec even[R] = {}, odd[R] = {};
    const float* table = tables_.columns() + column;
    for (int64_t i = 0; i < tables_.inner(); ++i) {
      const Vec of_even = load(table + i * TILE), of_odd = load(table + i * TILE + HALF_TILE);
      repeat<R>([&](auto r) {
        const float* two = turned + r * stride_ + 2 * i;
        even[r] = fma(broadcast(two[0]), of_even, even[r]);
        odd[r] = fma(broadcast(two[1]), of_odd, odd[r]);
      });
    }
    repeat<R>([&](auto r) {
      float* middle = bias + r * TILE + HALF_TILE;
      write(middle + column, even[r] + odd[r]);
      write(middle - column - LANES, backwards(even[r] - odd[r], Lanes{}));
    });
  }

  static Vec broadcast_two(const float* from) {
    using Twos = int64_t __attribute__((vector_size(LANES * 4)));
    return bits_of<Vec>(Twos{} + read<int64_t>(from));
  }
  template <int... L>
  static Vec backwards(Vec x, std::integer_sequence<int, L...>) {
    return ASCEND_KV_SHUFFLE(x, x, (LANES - 1 - L)...);
  }

  const RotaryTables& tables_;
  int rows_;
  int64_t stride_;
  float *waves_, *turned_, *stretch_, *bias_;
};

}  // namespace ascend_kv::cpu
