// Results of rows: from the sums of an item, or of the parts of a sequence that was cut.
#pragma once

#include <cmath>
#include <vector>

#include "cpu_call.h"
#include "cpu_softmax.h"

namespace ascend_kv::cpu {

// What one query head makes of the sums of its keys: the row of the output, and log-sum-exp.
inline void finish_row(
    const Call& call, int64_t token, int64_t head, const RowState& state, float* sums) {
  const int64_t kv_head = head / call.group();
  const float sink = call.sinks ? call.sinks[head * call.sink_stride] : NOTHING;
  float& log_sum_exp = call.log_sum_exp[token * call.heads + head];
  char* to = call.output + (token * call.heads + head) * call.dim * bytes_of_type(call.query_type);
  float factor = 0;
  if (state.total == 0) {  // a query that sees nothing
    log_sum_exp = sink;
  } else {
    const float largest = std::max(state.largest, sink);
    const float share = exp_negative(state.largest - largest);
    const float total = state.total * share + exp_negative(sink - largest);
    log_sum_exp = largest + std::log(total);
    factor = share / total;
  }
  const Parameter &scale = call.value.scale, &zero = call.value.zero_point;
  if (scale.kind == Parameter::STATIC)
    for (int64_t c = 0; c < call.dim; ++c) sums[c] *= scale.fixed(kv_head, c);
  if (zero.kind == Parameter::STATIC)
    for (int64_t c = 0; c < call.dim; ++c) sums[c] += state.total * zero.fixed(kv_head, c);
  for_vectors(call.dim, [&](int64_t c, int count) {
    const Vec x = state.total == 0 ? Vec{} : (load(sums + c) + state.zero) * factor;
    switch (call.query_type) {
      case Type::HALF: store_at(reinterpret_cast<Half*>(to), c, count, x); break;
      case Type::BFLOAT: store_at(reinterpret_cast<BFloat*>(to), c, count, x); break;
      default: store_at(reinterpret_cast<float*>(to), c, count, x);
    }
  });
}

// One row of a sequence that was cut along its keys.
inline void merge_row(const Call& call, const Merge& merge, int64_t row, const float* parts) {
  const int64_t width = call.padded, group = call.group(), stride = part_row_floats(call);
  const int64_t part_floats = merge.queries * group * stride;
  const float* first = parts + merge.part + row * stride;
  RowState state{};
  for (int64_t i = 0; i < merge.count; ++i)
    state.largest = std::max(state.largest, first[i * part_floats + width]);
  thread_local std::vector<float> sums;
  sums.assign(width, 0.0f);
  for (int64_t i = 0; i < merge.count; ++i) {
    const float* part = first + i * part_floats;
    if (part[width + 1] == 0) continue;  // nothing of it is seen
    const float share = exp_negative(part[width] - state.largest);
    state.total += part[width + 1] * share;
    state.zero += part[width + 2] * share;
    for (int64_t c = 0; c < width; c += LANES)
      write(&sums[c], fma(load(part + c), broadcast(share), load(&sums[c])));
  }
  const int64_t token = call.sequences[merge.sequence].query_start + merge.query + row / group;
  finish_row(call, token, merge.kv_head * group + row % group, state, sums.data());
}

}  // namespace ascend_kv::cpu
