// One item of attention: the scores of its rows over its keys, tile by tile, their softmax, and the
// weighted values. A row is one query with one query head.
#pragma once

#include <optional>
#include <vector>

#include "cpu_call.h"
#include "cpu_few_rows.h"
#include "cpu_finish.h"
#include "cpu_many_rows.h"
#include "cpu_softmax.h"
#include "cpu_tile.h"
#include "cpu_unit.h"

namespace ascend_kv::cpu {

// The kernels of one storage type.
struct TypeKernels {
  decltype(&dot_rows<float>) dot;
  decltype(&weigh_rows<float>) weigh;
  decltype(&convert_row<float>) convert;
};

template <class T>
constexpr TypeKernels KERNELS_OF = {dot_rows<T>, weigh_rows<T>, convert_row<T>};

inline const TypeKernels& kernels_of(Type type) {
  switch (type) {
    case Type::HALF: return KERNELS_OF<Half>;
    case Type::BFLOAT: return KERNELS_OF<BFloat>;
    case Type::INT8: return KERNELS_OF<int8_t>;
    case Type::E4M3: return KERNELS_OF<E4M3>;
    case Type::E5M2: return KERNELS_OF<E5M2>;
    case Type::INT4: return KERNELS_OF<Nibbles>;
    default: return KERNELS_OF<float>;
  }
}

// Memory of a thread, kept from call to call.
struct Scratch {
  std::vector<float> floats;
  std::vector<double> turned;
  std::vector<std::pair<int64_t, int64_t>> seen;

  // Begins at a cache line: a vector that lies across two takes twice as long to read.
  float* take(int64_t count) {
    constexpr uintptr_t LINE_FLOATS = LINE_BYTES / sizeof(float);
    const auto wanted = static_cast<size_t>(count) + LINE_FLOATS;
    if (floats.size() < wanted) floats.resize(wanted);
    const auto start = reinterpret_cast<uintptr_t>(floats.data());
    return floats.data() + (-start % LINE_BYTES) / sizeof(float);
  }
};

class ItemRun {
 public:
  ItemRun(const Call& call, const Item& item, Scratch& scratch)
      : call_(call), item_(item), sequence_(call.sequences[item.sequence]),
        tile_(call, item) {
    rows_ = static_cast<int>(item.queries * call.group());
    by_block_ = read_by_block(call.key.scale, call.key.zero_point);
    // runs of tokens in one block are to begin where a vector of scores does
    const bool lined_up =
        by_block_ && call.block_size % LANES == 0 && item.first_key % LANES == 0;
    few_ = rows_ <= FEW_ROWS && (call.key.scale.kind != Parameter::GROUP || lined_up) &&
           call.value.scale.kind != Parameter::GROUP;
    unit_keys_ = Unit::serves(call.key, rows_, call.dim) &&
                 (lacks_by_row() || !call.offset.tables);
    unit_values_ = Unit::serves(call.value, rows_, call.dim);
    const bool any_unit = unit_keys_ || unit_values_;
    const int64_t rows = round_up(rows_, LANES), width = call.padded;
    float* next = scratch.take(
        rows * ((by_block_ ? 3 : 2) * width + TILE + 6) + TILE +
        (few_ ? 0 : (2 * TILE + LANES) * width) + offset_floats() +
        (any_unit ? Unit::floats(rows_, call.dim) : 0));
    const auto carve = [&](int64_t count) { return std::exchange(next, next + count); };
    if (any_unit) {
      unit_.emplace(
          call.key, call.value, rows_, call.dim, carve(Unit::floats(rows_, call.dim)));
    }
    query_ = carve(rows * width);
    sums_ = carve(rows * width);
    if (by_block_) block_query_ = carve(rows * width);
    scores_ = carve(rows * TILE);
    query_sum_ = carve(rows);
    shift_ = carve(rows);
    bias_ = carve(TILE);
    if (!few_) {
      turned_keys_ = carve(TILE * width);
      values_ = carve(TILE * width);
      converted_ = carve(LANES * width);
    }
    states_ = {carve(rows), carve(rows), carve(rows), carve(rows)};
    if (const RotaryTables* tables = call.offset.tables.get()) {
      place_.emplace(*tables, lacks_by_row(), carve(TilePlace::floats(*tables)), scratch.turned);
      if (lacks_by_row()) lacking_.emplace(*tables, rows_, next);
    }
    std::fill(states_.largest, states_.largest + rows, NOTHING);
    std::fill(states_.total, states_.total + rows, 0.0f);
    std::fill(states_.zero, states_.zero + rows, 0.0f);
    scratch.seen.resize(rows_);
    seen_ = scratch.seen.data();
  }

  // `parts`: where items that are one of several leave their sums.
  void run(float* parts);

 private:
  void load_queries();
  Seen seen_by(int row) const;
  const float* bias_of(int row);
  void score();
  void score_by_block();
  void turn_keys();
  void sum_values();
  // Few rows, and queries that do not fit the keys to which an offset would be added.
  bool lacks_by_row() const { return few_ || rows_ <= FEW_ROWS || call_.offset.query; }
  bool lacks_by_key() const { return place_ && !lacking_; }
  int64_t offset_floats() const {
    if (!call_.offset.tables) return 0;
    const RotaryTables& tables = *call_.offset.tables;
    return TilePlace::floats(tables) + (lacks_by_row() ? RowOffsets::floats(tables, rows_) : 0);
  }
  void load_offset(int row, int64_t token, int64_t query_head, const float* query);

  const Call& call_;
  const Item& item_;
  const Sequence& sequence_;
  int rows_;
  bool few_, by_block_;
  std::optional<Unit> unit_;
  bool unit_keys_, unit_values_;  // what it multiplies
  float *query_, *sums_, *scores_, *query_sum_, *shift_, *bias_;
  float* block_query_ = nullptr;
  float *turned_keys_ = nullptr, *values_ = nullptr, *converted_ = nullptr;
  RowStates states_;
  std::optional<TilePlace> place_;
  std::optional<RowOffsets> lacking_;
  const float* lacks_ = nullptr;  // of the tile, [rows, TILE]
  std::pair<int64_t, int64_t>* seen_;  // first and last position that a row sees
  TileReader tile_;
};

inline Vec load_query(Type type, const char* row, int64_t c, int count) {
  switch (type) {
    case Type::HALF: return load_at(reinterpret_cast<const Half*>(row), c, count);
    case Type::BFLOAT: return load_at(reinterpret_cast<const BFloat*>(row), c, count);
    default: return load_at(reinterpret_cast<const float*>(row), c, count);
  }
}

// The scaled queries. What static scales and zero points of the keys do to a score is done here.
inline void ItemRun::load_queries() {
  const int64_t group = call_.group(), head = item_.kv_head;
  const Parameter &scale = call_.key.scale, &zero = call_.key.zero_point;
  for (int r = 0; r < rows_; ++r) {
    const int64_t token = sequence_.query_start + item_.query + r / group;
    const char* from =
        call_.query + token * call_.query_token + (head * group + r % group) * call_.query_head;
    const int64_t position = call_.position(sequence_, item_.query + r / group);
    seen_[r] = {call_.first_seen(position), call_.last_seen(position)};
    float* to = query_ + r * call_.padded;
    Vec total{};
    for_vectors(call_.dim, [&](int64_t c, int count) {
      const Vec q = load_query(call_.query_type, from, c, count) * call_.softmax_scale;
      total = total + q;
      write(to + c, q);
    });
    query_sum_[r] = sum(total);
    shift_[r] = 0;
    if (zero.kind == Parameter::STATIC) {
      for (int64_t c = 0; c < call_.dim; ++c) shift_[r] += to[c] * zero.fixed(head, c);
    }
    if (lacking_) load_offset(r, token, head * group + r % group, to);
    if (scale.kind == Parameter::STATIC && !lacks_by_key()) {
      for (int64_t c = 0; c < call_.dim; ++c) to[c] *= scale.fixed(head, c);
    }
  }
  if (unit_keys_) unit_keys_ = unit_->load_rows(query_, call_.padded);
  if (!unit_keys_ && !unit_values_) unit_.reset();
}

// `query`: the row's, scaled, where the offset does not meet another.
inline void ItemRun::load_offset(int row, int64_t token, int64_t query_head, const float* query) {
  const KeyOffset& offset = call_.offset;
  if (offset.query) {
    const char* from = offset.query + token * offset.query_token + query_head * offset.query_head;
    for_vectors(call_.dim, [&](int64_t c, int count) {
      write(sums_ + c, load_query(offset.query_type, from, c, count) * call_.softmax_scale);
    });
    query = sums_;
  }
  lacking_->load_row(row, query, offset.data + item_.kv_head * call_.dim);
}

inline Seen ItemRun::seen_by(int row) const {
  const int64_t first = tile_.first(), count = tile_.tokens().count;
  auto [low, high] = seen_[row];
  if (call_.key_positions) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    constexpr int64_t least = std::numeric_limits<int32_t>::min();
    if (low > most || high < least) return {false, 1, 0};
    return {
        low <= least && high >= most, static_cast<int32_t>(std::max(low, least)),
        static_cast<int32_t>(std::min(high, most))};
  }
  if (low <= first && high >= first + count - 1) return {};
  low = std::clamp<int64_t>(low, first, first + count) - first;
  high = std::clamp<int64_t>(high, first - 1, first + count) - first;
  return {false, static_cast<int32_t>(low), static_cast<int32_t>(high)};
}

inline const float* ItemRun::bias_of(int row) {
  if (lacks_) return lacks_ + row * TILE;
  if (!call_.bias) return nullptr;
  const int64_t group = call_.group();
  const float* bias = call_.bias +
                      (sequence_.query_start + item_.query + row / group) * call_.bias_token +
                      (item_.kv_head * group + row % group) * call_.bias_head;
  if (!call_.key_positions) return bias + tile_.first();
  const TileTokens& tokens = tile_.tokens();
  for (int k = 0; k < tokens.count; ++k) bias_[k] = bias[tokens.position[k]];
  return bias_;
}

// What the scales and zero points of a block's channels do to a score is done to the queries, once
// for its tokens of the tile.
inline void ItemRun::score_by_block() {
  const TypeKernels& kernels = kernels_of(call_.key.type);
  const Parameter &scale = call_.key.scale, &zero = call_.key.zero_point;
  const int64_t width = call_.padded;
  tile_.for_runs([&](int k, int n, int64_t block, int64_t) {
    float shifts[FEW_ROWS] = {};
    const int64_t factors = scale.place(block, item_.kv_head, 0);
    const int64_t zeros = zero.data ? zero.place(block, item_.kv_head, 0) : 0;
    for (int r = 0; r < rows_; ++r) {
      Vec total{};
      for_vectors(call_.dim, [&](int64_t c, int count) {
        const Vec q = load(query_ + r * width + c);
        write(block_query_ + r * width + c, q * scale.of_block(factors, c, count));
        if (zero.data) total = fma(q, zero.of_block(zeros, c, count), total);
      });
      shifts[r] = sum(total);
    }
    const int whole = static_cast<int>(round_up(n, LANES));
    kernels.dot(
        block_query_, width, rows_, tile_.keys() + k, whole, call_.dim, scores_ + k, TILE);
    for (int r = 0; r < rows_; ++r)
      for (int i = k; i < k + whole; ++i) scores_[r * TILE + i] += shifts[r];
  });
}

// The tile's keys as floats, channels as rows, with what all rows lack of them.
inline void ItemRun::turn_keys() {
  const int count = tile_.tokens().count, whole = static_cast<int>(round_up(count, LANES));
  const TypeKernels& kernels = kernels_of(call_.key.type);
  const int64_t width = call_.padded;
  for (int k = 0; k < whole; k += LANES) {
    for (int l = 0; l < LANES; ++l) {
      float* row = converted_ + l * width;
      kernels.convert(tile_.keys()[k + l], call_.dim, row);
      if (call_.key.scale.kind == Parameter::GROUP) {
        const auto [block, offset] = tile_.place_of(std::min(k + l, count - 1));
        apply_groups(
            call_.key.scale, call_.key.zero_point, block, item_.kv_head, offset, call_.dim, row);
      }
    }
    turn_rows(converted_, width, turned_keys_, TILE, k);
  }
  if (lacks_by_key()) {
    const Parameter& scale = call_.key.scale;
    TileTokens& tokens = tile_.tokens();
    add_offset(
        *call_.offset.tables, place_->turn(), call_.offset.data + item_.kv_head * call_.dim,
        tokens.has_key_scale ? tokens.key_scale : nullptr,
        [&](int64_t c) {
          return scale.kind == Parameter::STATIC ? scale.fixed(item_.kv_head, c) : 1.0f;
        },
        whole, turned_keys_);
    tokens.has_key_scale = false;
  }
}

inline void ItemRun::score() {
  const int count = tile_.tokens().count, whole = static_cast<int>(round_up(count, LANES));
  const auto take_values = [&] {
    if (unit_values_) unit_->take_values(tile_.values(), count);
  };
  if (unit_) {
    unit_->start_tile(
        unit_keys_ ? tile_.keys() + TILE : nullptr,
        unit_values_ ? tile_.values() + TILE : nullptr);
  }
  if (unit_keys_) return unit_->dot(tile_.keys(), whole, scores_, take_values);
  take_values();
  if (few_ && by_block_) return score_by_block();
  const TypeKernels& kernels = kernels_of(call_.key.type);
  const int64_t width = call_.padded;
  if (few_)
    return kernels.dot(query_, width, rows_, tile_.keys(), whole, call_.dim, scores_, TILE);
  turn_keys();
  multiply(query_, width, rows_, turned_keys_, TILE, call_.dim, whole, scores_, TILE, false);
}

inline void ItemRun::sum_values() {
  const int count = tile_.tokens().count;
  if (unit_values_ && unit_->take_weights(scores_, count)) {
    if (!unit_keys_) unit_->weigh();
    return;
  }
  const TypeKernels& kernels = kernels_of(call_.value.type);
  const int64_t width = call_.padded;
  if (few_)
    return kernels.weigh(
        scores_, TILE, rows_, tile_.values(), count, call_.dim, sums_, width);
  for (int k = 0; k < count; ++k) {
    float* row = values_ + k * width;
    kernels.convert(tile_.values()[k], call_.dim, row);
    if (call_.value.scale.kind == Parameter::GROUP) {
      const auto [block, offset] = tile_.place_of(k);
      apply_groups(
          call_.value.scale, call_.value.zero_point, block, item_.kv_head, offset, call_.dim,
          row);
    }
  }
  multiply(scores_, TILE, rows_, values_, width, count, width, sums_, width, true);
}

inline void ItemRun::run(float* parts) {
  const int64_t width = call_.padded, group = call_.group();
  load_queries();
  std::fill(sums_, sums_ + rows_ * width, 0.0f);
  if (place_) place_->start(item_.first_key);
  for (int64_t first = item_.first_key; first < item_.last_key; first += TILE) {
    tile_.move_to(first);
    if (place_) place_->next();
    score();
    if (lacking_) lacks_ = lacking_->make(*place_);
    for (int low = 0; low < rows_; low += LANES) {
      weigh_scores(
          scores_ + low * TILE, std::min(LANES, rows_ - low), tile_.tokens(),
          [&](int r) {
            if (unit_) unit_->ask_for_some();  // here memory would be idle for long
            return seen_by(low + r);
          },
          [&](int r) {
            const float* bias = bias_of(low + r);
            return RowShift{query_sum_[low + r], shift_[low + r], bias};
          },
          states_.from(low));
    }
    for (int r = 0; r < rows_; ++r) {
      if (states_.kept[r] == 1.0f) continue;
      scale_row(sums_ + r * width, width, states_.kept[r]);
      if (unit_values_) unit_->scale(r, states_.kept[r]);
    }
    sum_values();
  }
  if (unit_values_) {
    unit_->weigh();
    unit_->add_sums(sums_, width);
  }
  for (int r = 0; r < rows_; ++r) {
    if (item_.part < 0) {
      const int64_t token = sequence_.query_start + item_.query + r / group;
      finish_row(call_, token, item_.kv_head * group + r % group, states_[r], sums_ + r * width);
      continue;
    }
    float* to = parts + item_.part + r * part_row_floats(call_);
    std::copy(sums_ + r * width, sums_ + (r + 1) * width, to);
    to[width] = states_.largest[r], to[width + 1] = states_.total[r],
    to[width + 2] = states_.zero[r];
  }
}

}  // namespace ascend_kv::cpu
