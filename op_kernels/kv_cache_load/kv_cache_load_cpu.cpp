// kv_cache_load on a CPU. What it reads and gives back is said in ascend_kv/ops/kv_cache_load.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "../common/cpu_operators.h"
#include "../common/cpu_tensors.h"

namespace ascend_kv::cpu {
namespace {

// What stored keys lack: R(n) times an offset, half-split.
struct Offset {
  const float* data = nullptr;  // [N, D], contiguous, as the table
  const float* table = nullptr;  // [P, D / 2, 2]
  const int32_t* positions = nullptr;  // null: a token is at the position of its index
  int64_t position_block = 0, position_head = 0, position_token = 0;

  int64_t position(int64_t block, int64_t head, int64_t token, int64_t index) const {
    if (!positions) return index;
    return positions[block * position_block + head * position_head + token * position_token];
  }
  void add(int64_t head, int64_t position, int64_t dim, float* row) const {
    const float *first = data + head * dim, *second = first + dim / 2;
    const float* turns = table + position * dim;
    for (int64_t c = 0; c < dim / 2; ++c) {
      const float cosine = turns[2 * c], sine = turns[2 * c + 1];
      row[c] = row[c] + (first[c] * cosine - second[c] * sine);
      row[c + dim / 2] = row[c + dim / 2] + (second[c] * cosine + first[c] * sine);
    }
  }
};

struct LoadCall {
  int64_t heads, block_size, dim, longest;
  std::vector<int64_t> lengths;
  std::vector<int64_t> starts;  // of a sequence's blocks
  std::vector<int64_t> blocks;

  int64_t block(int64_t sequence, int64_t token) const {
    return blocks[starts[sequence] + token / block_size];
  }
};

// One stored vector as floats.
template <class T>
void decode(const Side& side, int64_t block, int64_t head, int64_t token, int64_t dim, float* to) {
  const T* from = reinterpret_cast<const T*>(side.at(block, head, token));
  const Parameter &scale = side.scale, &zero = side.zero_point;
  if (scale.kind == Parameter::NONE || scale.kind == Parameter::TOKEN) {
    const bool scaled = scale.data, shifted = zero.data;
    const Vec factor = broadcast(scaled ? scale.get(scale.place(block, head, token)) : 1.0f);
    const Vec shift = broadcast(shifted ? zero.get(zero.place(block, head, token)) : 0.0f);
    for_vectors(dim, [&](int64_t c, int count) {
      Vec x = load_at(from, c, count);
      if (scaled) x = x * factor;
      if (shifted) x = x + shift;
      store_at(to, c, count, x);
    });
    return;
  }
  for_vectors(dim, [&](int64_t c, int count) { store_at(to, c, count, load_at(from, c, count)); });
  for (int64_t c = 0; c < dim; ++c) to[c] = to[c] * scale.of_channel(block, head, token, c);
  if (!zero.data) return;
  for (int64_t c = 0; c < dim; ++c) to[c] = to[c] + zero.of_channel(block, head, token, c);
}

template <class To>
void load_row(
    const LoadCall& call, const Side& side, const Offset& offset, int64_t sequence, int64_t head,
    int64_t index, float* row, To* to) {
  const int64_t dim = call.dim;
  if (index >= call.lengths[sequence]) {
    std::fill(to, to + dim, To{});
    return;
  }
  const int64_t block = call.block(sequence, index), token = index % call.block_size;
  with_type(side.type, [&](auto type) {
    decode<decltype(type)>(side, block, head, token, dim, row);
  });
  if (offset.data) offset.add(head, offset.position(block, head, token, index), dim, row);
  for_vectors(dim, [&](int64_t c, int count) { store_at(to, c, count, load_at(row, c, count)); });
}

at::Tensor load_side(
    const LoadCall& call, const Side& side, const Offset& offset, at::ScalarType dtype) {
  const auto batch = static_cast<int64_t>(call.lengths.size());
  at::Tensor out = at::empty({batch, call.heads, call.longest, call.dim}, at::TensorOptions(dtype));
  if (out.numel() == 0) return out;
  char* data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t rows = batch * call.heads * call.longest;
  const int64_t grain = std::max<int64_t>(1, GRAIN_VALUES / call.dim);
  with_float_type(*type_of(out), [&](auto type) {
    using To = decltype(type);
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> row(call.dim);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t index = i % call.longest, n = i / call.longest % call.heads;
        load_row(call, side, offset, i / call.longest / call.heads, n, index, row.data(),
                 reinterpret_cast<To*>(data) + i * call.dim);
      }
    });
  });
  return out;
}

bool read_blocks_of_all(const at::Tensor& tables, int64_t num_blocks, LoadCall& call) {
  const IntReader table(tables);
  for (size_t row = 0; row < call.lengths.size(); ++row) {
    const int64_t count = (call.lengths[row] + call.block_size - 1) / call.block_size;
    if (call.lengths[row] < 0 || count > tables.size(1)) return false;
    call.starts.push_back(call.blocks.size());
    if (!read_blocks(table, row, 0, count, num_blocks, call.blocks)) return false;
  }
  return true;
}

// Every position must be one that the table has.
bool positions_fit(const LoadCall& call, const Offset& offset, int64_t width) {
  for (size_t s = 0; s < call.lengths.size(); ++s) {
    if (!offset.positions && call.lengths[s] > width) return false;
    if (!offset.positions) continue;
    for (int64_t i = 0; i < call.lengths[s]; ++i) {
      for (int64_t n = 0; n < call.heads; ++n) {
        const int64_t at = offset.position(call.block(s, i), n, i % call.block_size, i);
        if (at < 0 || at >= width) return false;
      }
    }
  }
  return true;
}

at::ScalarType result_type(const Side& side, std::optional<at::ScalarType> asked) {
  if (asked) return *asked;
  return is_quantized(side.type) ? at::kFloat : scalar_type_of(side.type);
}

}  // namespace

std::optional<std::tuple<at::Tensor, at::Tensor>> kv_cache_load(
    const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& block_tables,
    at::IntArrayRef kv_lengths, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point,
    const MaybeTensor& key_offset, const MaybeTensor& rotary_table,
    const MaybeTensor& key_positions, std::optional<at::ScalarType> dtype) {
  Side key, value;
  if (!caches_agree(key_cache, value_cache)) return {};
  if (!read_side(key_cache, key_scale, key_zero_point, key)) return {};
  if (!read_side(value_cache, value_scale, value_zero_point, value)) return {};
  if (block_tables.dim() != 2 || !is_int(block_tables) || (dtype && !is_float(*dtype)) ||
      block_tables.size(0) != static_cast<int64_t>(kv_lengths.size()))
    return {};
  LoadCall call{key_cache.size(1), key_cache.size(2), channels_of(key_cache), 0, kv_lengths.vec(), {}, {}};
  if (call.block_size == 0 || call.dim == 0) return {};
  for (const int64_t length : call.lengths) call.longest = std::max(call.longest, length);
  if (!read_blocks_of_all(block_tables, key_cache.size(0), call)) return {};

  Offset offset;
  at::Tensor offsets, table;
  if (key_offset.has_value() != rotary_table.has_value()) return {};
  if (key_offset) {
    if (call.dim % 2 || key_offset->sizes() != at::IntArrayRef{call.heads, call.dim} ||
        rotary_table->dim() != 3 || rotary_table->size(1) != call.dim / 2 ||
        rotary_table->size(2) != 2)
      return {};
    offsets = key_offset->to(at::kFloat).contiguous();
    table = rotary_table->to(at::kFloat).contiguous();
    offset.data = offsets.const_data_ptr<float>();
    offset.table = table.const_data_ptr<float>();
    if (key_positions) {
      if (key_positions->scalar_type() != at::kInt ||
          key_positions->sizes() != key_cache.sizes().slice(0, 3))
        return {};
      offset.positions = key_positions->const_data_ptr<int32_t>();
      offset.position_block = key_positions->stride(0);
      offset.position_head = key_positions->stride(1);
      offset.position_token = key_positions->stride(2);
    }
    if (!positions_fit(call, offset, table.size(0))) return {};
  }
  return std::make_tuple(
      load_side(call, key, offset, result_type(key, dtype)),
      load_side(call, value, Offset{}, result_type(value, dtype)));
}

}  // namespace ascend_kv::cpu
