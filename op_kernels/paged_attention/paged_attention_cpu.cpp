// paged_attention on a CPU. What it computes is said in ascend_kv/ops/paged_attention.py; how the
// work is cut, in cpu_call.h; the arithmetic, in cpu_item.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <atomic>

#include "../common/cpu_operators.h"
#include "../common/cpu_tensors.h"
#include "cpu_item.h"

namespace ascend_kv::cpu {
namespace {

// Below so many multiplications waking another thread costs more than it saves.
constexpr int64_t SERIAL_WORK = 1 << 16;
// Positions and windows beyond it are taken to it: no key is at such a position.
constexpr int64_t FAR = int64_t{1} << 60;

int64_t whole_blocks(int64_t tokens, int64_t block_size) {
  return (tokens + block_size - 1) / block_size;
}

// The sequences that have queries, with the numbers of the blocks that are read.
bool read_sequences(
    const at::Tensor& tables, at::IntArrayRef query_lengths, at::IntArrayRef kv_lengths,
    int64_t num_blocks, Call& call) {
  const IntReader table(tables);
  int64_t start = 0;
  for (size_t row = 0; row < kv_lengths.size(); ++row) {
    const int64_t queries = query_lengths[row], length = kv_lengths[row];
    const int64_t last = whole_blocks(length, call.block_size);
    if (queries < 0 || length < 0 || last > tables.size(1)) return false;
    if (!call.query_positions && queries > length) return false;
    if (queries > 0) {
      Sequence s{start, queries, length, 0, static_cast<int64_t>(call.blocks.size())};
      if (call.ordered() && call.window && length) {
        const int64_t seen = call.first_seen(call.position(s, 0));
        s.first_block = std::clamp<int64_t>(seen, 0, length - 1) / call.block_size;
      }
      if (!read_blocks(table, row, s.first_block, last, num_blocks, call.blocks)) return false;
      call.sequences.push_back(s);
    }
    start += queries;
  }
  return true;
}

// Every position of a cached token must be one that the bias has.
bool positions_fit(const Call& call, int64_t width) {
  for (const Sequence& s : call.sequences) {
    for (int64_t token = s.first_block * call.block_size; token < s.kv_length; ++token) {
      const int64_t at = token / call.block_size - s.first_block;
      const int32_t* place = call.key_positions +
                             call.blocks[s.blocks_start + at] * call.position_block +
                             token % call.block_size * call.position_token;
      for (int64_t n = 0; n < call.kv_heads; ++n) {
        const int32_t position = place[n * call.position_head];
        if (position < 0 || position >= width) return false;
      }
    }
  }
  return true;
}

bool read_bias(const at::Tensor& bias, int64_t tokens, at::IntArrayRef kv_lengths, Call& call) {
  if (bias.dim() != 3 || bias.size(0) != tokens || bias.size(1) != call.heads) return false;
  call.bias = bias.const_data_ptr<float>();
  call.bias_token = bias.stride(0), call.bias_head = bias.stride(1);
  if (call.key_positions) return positions_fit(call, bias.size(2));
  return std::all_of(kv_lengths.begin(), kv_lengths.end(), [&](int64_t length) {
    return length <= bias.size(2);
  });
}

bool read_offset(
    const at::Tensor& offset, const at::Tensor& frequencies, const at::Tensor* query, Call& call) {
  if (call.key_positions) {
    not_served = "a key offset of keys that have positions of their own";
    return false;
  }
  if (call.bias || call.dim % 2) return false;
  if (offset.scalar_type() != at::kFloat || frequencies.scalar_type() != at::kDouble) return false;
  if (offset.sizes() != at::IntArrayRef{call.kv_heads, call.dim}) return false;
  if (frequencies.sizes() != at::IntArrayRef{call.dim / 2}) return false;
  KeyOffset& out = call.offset;
  out.tables = RotaryTables::of(frequencies.const_data_ptr<double>(), call.dim / 2);
  out.data = offset.const_data_ptr<float>();
  if (!query) return true;
  const auto type = type_of(*query);
  if (!type || is_quantized(*type)) return false;
  out.query = static_cast<const char*>(query->const_data_ptr());
  out.query_type = *type;
  out.query_token = query->stride(0) * bytes_of_type(*type);
  out.query_head = query->stride(1) * bytes_of_type(*type);
  return true;
}

void run(const Call& call, const Plan& plan) {
  const at::Tensor kept = plan.part_floats
                              ? at::empty({plan.part_floats}, at::TensorOptions(at::kFloat))
                              : at::Tensor();
  float* parts = kept.defined() ? kept.mutable_data_ptr<float>() : nullptr;
  const auto items = static_cast<int64_t>(plan.items.size());
  const int64_t threads =
      plan.work < SERIAL_WORK ? 1 : std::min<int64_t>(at::get_num_threads(), items);
  // the heads of one range of keys to one thread, as long as that leaves each thread enough to do
  const int64_t step = items >= 8 * threads * call.kv_heads ? call.kv_heads : 1;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    if (begin == end) return;
    for (int64_t low = next.fetch_add(step); low < items; low = next.fetch_add(step))
      for (int64_t i = low; i < std::min(low + step, items); ++i)
        ItemRun(call, plan.items[i], scratch).run(parts);
  });
  const auto merges = static_cast<int64_t>(plan.merges.size());
  at::parallel_for(0, merges, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t row = 0; row < plan.merges[i].queries * call.group(); ++row)
        merge_row(call, plan.merges[i], row, parts);
  });
}

}  // namespace

int64_t whole_number_bits() { return Unit::bits(); }

std::optional<std::tuple<at::Tensor, at::Tensor>> paged_attention(
    const at::Tensor& given_query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const at::Tensor& block_tables, at::IntArrayRef query_lengths, at::IntArrayRef kv_lengths,
    double softmax_scale, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
    const MaybeTensor& key_zero_point, const MaybeTensor& value_zero_point, bool causal,
    int64_t window, const MaybeTensor& sinks, const MaybeTensor& score_bias,
    const MaybeTensor& key_positions, const MaybeTensor& query_positions,
    const MaybeTensor& entries, const MaybeTensor& key_offset,
    const MaybeTensor& rotary_frequencies, const MaybeTensor& offset_query) {
#if defined(ASCEND_KV_AMX)
  if (!has_matrix_unit())
    TORCH_WARN_ONCE(
        "ascend_kv: the system refuses this process the CPU's matrix unit (AMX), for which its "
        "operators were compiled; attention over INT8 is slower without it");
#endif
  Call call{};
  if (entries) {
    not_served = "lists of entries";
    return {};
  }
  if (!caches_agree(key_cache, value_cache)) return {};
  if (!read_side(key_cache, key_scale, key_zero_point, call.key)) return {};
  if (!read_side(value_cache, value_scale, value_zero_point, call.value)) return {};
  const at::Tensor query = channels_together(given_query);
  const auto query_type = type_of(query);
  if (query.dim() != 3 || !query_type || is_quantized(*query_type)) return {};
  const int64_t tokens = query.size(0), num_blocks = key_cache.size(0);
  call.heads = query.size(1), call.dim = query.size(2);
  call.kv_heads = key_cache.size(1), call.block_size = key_cache.size(2);
  if (call.dim != channels_of(key_cache) || call.dim == 0 || call.kv_heads == 0 ||
      call.heads % call.kv_heads || call.block_size == 0)
    return {};
  call.padded = round_up(call.dim, LANES);
  call.causal = causal, call.window = std::min(window, FAR);
  call.query = static_cast<const char*>(query.const_data_ptr());
  call.query_type = *query_type;
  call.query_token = query.stride(0) * bytes_of_type(*query_type);
  call.query_head = query.stride(1) * bytes_of_type(*query_type);
  call.softmax_scale = static_cast<float>(softmax_scale);

  if (block_tables.dim() != 2 || !is_int(block_tables) || window < 0 ||
      block_tables.size(0) != static_cast<int64_t>(kv_lengths.size()) ||
      query_lengths.size() != kv_lengths.size())
    return {};
  int64_t asked = 0;
  for (const int64_t length : query_lengths) asked += length;
  if (asked != tokens) return {};
  std::vector<int64_t> positions;
  if (query_positions) {
    if (!is_int(*query_positions) || query_positions->sizes() != at::IntArrayRef{tokens}) return {};
    const IntReader read(*query_positions);
    for (int64_t t = 0; t < tokens; ++t) positions.push_back(std::clamp(read(t), -FAR, FAR));
    call.query_positions = &positions;
  }
  if (key_positions) {
    if (key_positions->scalar_type() != at::kInt ||
        key_positions->sizes() != key_cache.sizes().slice(0, 3))
      return {};
    call.key_positions = key_positions->const_data_ptr<int32_t>();
    call.position_block = key_positions->stride(0);
    call.position_head = key_positions->stride(1);
    call.position_token = key_positions->stride(2);
  }
  if (!read_sequences(block_tables, query_lengths, kv_lengths, num_blocks, call)) return {};
  at::Tensor logits, bias;
  if (sinks) {
    if (sinks->sizes() != at::IntArrayRef{call.heads}) return {};
    logits = sinks->to(at::kFloat);
    call.sinks = logits.const_data_ptr<float>();
    call.sink_stride = logits.stride(0);
  }
  if (score_bias) {
    bias = channels_together(score_bias->to(at::kFloat));
    if (!read_bias(bias, tokens, kv_lengths, call)) return {};
  }

  at::Tensor offset, frequencies, plain;
  if (key_offset.has_value() != rotary_frequencies.has_value()) return {};
  if (key_offset) {
    offset = key_offset->contiguous(), frequencies = rotary_frequencies->contiguous();
    if (offset_query) plain = channels_together(*offset_query);
    if (plain.defined() && plain.sizes() != query.sizes()) return {};
    if (!read_offset(offset, frequencies, plain.defined() ? &plain : nullptr, call)) return {};
  }

  at::Tensor output = at::empty(query.sizes(), query.options());
  at::Tensor log_sum_exp = at::empty({tokens, call.heads}, query.options().dtype(at::kFloat));
  call.output = static_cast<char*>(output.mutable_data_ptr());
  call.log_sum_exp = log_sum_exp.mutable_data_ptr<float>();
  run(call, make_plan(call));
  return std::make_tuple(output, log_sum_exp);
}

}  // namespace ascend_kv::cpu
