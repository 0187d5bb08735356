// Gated pooling of windows: per channel, the softmax over a window's tokens of gate + bias, times
// kv, summed. Tiles of tokens stream through; of a window only its running maximum, denominator
// and sum are kept (the softmax of Milakov and Gimelshein, 2018), all in float32.
//
// Where a part has fewer channels than a vector has lanes, `fold` tokens lie side by side in a row of
// 64 lanes: each lane goes through every fold-th token by itself, and lanes of one channel meet at
// the window's end.
#pragma once
#include "../common/reduce.h"
#include "windows.h"

namespace ascend_kv {

struct CompressTensors {
    GM_ADDR kv;              // [T, C]
    GM_ADDR gate;
    GM_ADDR sequences;       // int32 [B, 4]
    GM_ADDR position_bias;   // [ratio, C] float32
    GM_ADDR previous_kv;     // [B, ratio, D]
    GM_ADDR previous_gate;
    GM_ADDR norm_weight;     // [D] float32
    GM_ADDR rotary_table;    // [P, rotary_dim / 2, 2] float32
    GM_ADDR workspace;       // norm.h
};

template <typename T>
class WindowPool {
public:
    __aicore__ inline void Init(TPipe &pipe, const CompressTensors &tensors,
                                const HcaCompressTiling &tiling)
    {
        t_ = &tiling;
        kv_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(tensors.kv));
        gate_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(tensors.gate));
        previous_kv_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(tensors.previous_kv));
        previous_gate_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(tensors.previous_gate));
        bias_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.position_bias));
        uint32_t tile = tiling.tile_rows * tiling.stride;
        lanes_ = tiling.fold * tiling.stride;
        uint32_t half_tile = DivUp(tiling.tile_rows / tiling.fold, 2) * lanes_;
        uint32_t state = tiling.tile_windows * lanes_;
        pipe.InitBuffer(in_, BUFFERS, 2 * tile * sizeof(T));
        pipe.InitBuffer(floats_, (2 * tile + half_tile) * sizeof(float));
        pipe.InitBuffer(states_, (3 * state + lanes_) * sizeof(float));
        values_ = floats_.Get<float>();
        gates_ = values_[tile];
        scratch_ = gates_[tile];
        highest_ = states_.Get<float>();
        denominator_ = highest_[state];
        sum_ = denominator_[state];
        correction_ = sum_[state];
        if (tiling.bias_stays != 0) {
            uint32_t halves = tiling.overlap != 0 ? 2 : 1;
            pipe.InitBuffer(bias_in_, 1, halves * tiling.ratio * tiling.stride * sizeof(float));
        } else if (tiling.has_bias != 0) {
            pipe.InitBuffer(bias_in_, BUFFERS, tile * sizeof(float));
        }
    }

    // Channels `channel` and on from now; End after the last.
    __aicore__ inline void BeginPart(int64_t channel, uint32_t channels)
    {
        if (channel == channel_) {
            return;
        }
        End();
        channel_ = channel;
        channels_ = channels;
        if (t_->bias_stays == 0) {
            return;
        }
        LocalTensor<float> tile = bias_in_.AllocTensor<float>();
        uint32_t halves = t_->overlap != 0 ? 2 : 1;
        for (uint32_t half = 0; half < halves; ++half) {
            LoadBias(tile[half * t_->ratio * t_->stride], half, 0, t_->ratio);
        }
        bias_in_.EnQue(tile);
        bias_tile_ = bias_in_.DeQue<float>();
    }

    __aicore__ inline void End()
    {
        if (channel_ >= 0 && t_->bias_stays != 0) {
            bias_in_.FreeTensor(bias_tile_);
        }
        channel_ = -1;
    }

    // The most windows of `run` that Pool takes at once: those of a tile, but a sequence's first
    // window, whose predecessor lies elsewhere, alone.
    __aicore__ inline int64_t Most(bool first) const
    {
        return first && t_->overlap != 0 ? 1 : t_->tile_windows;
    }

    // The channels of the run's windows -> rows of `pooled`.
    __aicore__ inline void Pool(const WindowRun &run, const LocalTensor<float> &pooled)
    {
        uint32_t windows = run.count;
        // Below every gate, and still a number: no gate yet weighs exp(lowest - highest) = 0.
        const float lowest = -3.0e38f;
        Duplicate(highest_, lowest, windows * lanes_);
        Duplicate(denominator_, 0.0f, windows * lanes_);
        Duplicate(sum_, 0.0f, windows * lanes_);
        VectorDone();
        if (t_->overlap != 0) {
            if (!run.first) {
                Stream(kv_, gate_, run.token - t_->ratio, Channels(*t_), channel_, 0, windows);
            } else if (run.window > 0) {
                Stream(previous_kv_, previous_gate_, run.sequence * t_->ratio, t_->dim, channel_,
                       0, windows);
            }
        }
        uint32_t own = t_->overlap;
        Stream(kv_, gate_, run.token, Channels(*t_), own * t_->dim + channel_, own, windows);
        for (uint32_t window = 0; window < windows; ++window) {
            uint32_t at = window * lanes_;
            if (t_->fold > 1) {
                MeetLanes(at);
            }
            ApplyTile<DivOp>(pooled[window * t_->stride], sum_[at], denominator_[at],
                             Line(channels_));
        }
        VectorDone();
    }

private:
    // Tokens `row` and on, `ratio` for each of `windows` windows; `half`: which rows of the bias.
    __aicore__ inline void Stream(const GlobalTensor<T> &kv, const GlobalTensor<T> &gate,
                                  int64_t row, int64_t width, int64_t column, uint32_t half,
                                  uint32_t windows)
    {
        uint32_t ratio = t_->ratio;
        uint32_t rows = windows * ratio;
        for (uint32_t first = 0; first < rows; first += t_->tile_rows) {
            uint32_t count = Smaller<uint32_t>(t_->tile_rows, rows - first);
            LoadTile(kv, gate, (row + first) * width + column, width, count);
            if (t_->has_bias != 0 && t_->bias_stays == 0) {
                LocalTensor<float> tile = bias_in_.AllocTensor<float>();
                LoadBias(tile, half, first % ratio, Smaller(count, ratio));
                bias_in_.EnQue(tile);
                bias_tile_ = bias_in_.DeQue<float>();
            }
            for (uint32_t at = 0; at < count;) {
                uint32_t in_window = (first + at) % ratio;
                uint32_t piece = Smaller(ratio - in_window, count - at);
                uint32_t bias_row = t_->bias_stays != 0 ? half * ratio + in_window : 0;
                Update((first + at) / ratio, at, piece, bias_row);
                at += piece;
            }
            if (t_->has_bias != 0 && t_->bias_stays == 0) {
                bias_in_.FreeTensor(bias_tile_);
            }
        }
    }

    __aicore__ inline View Rows(uint32_t rows) const
    {
        return {rows, channels_, static_cast<uint32_t>(t_->stride)};
    }

    __aicore__ inline void LoadTile(const GlobalTensor<T> &kv, const GlobalTensor<T> &gate,
                                    int64_t at, int64_t width, uint32_t rows)
    {
        View view = Rows(rows);
        uint32_t gap_bytes = (width - channels_) * sizeof(T);
        uint32_t gates_at = t_->tile_rows * t_->stride;
        LocalTensor<T> tile = in_.template AllocTensor<T>();
        LoadRows(tile, kv[at], view, gap_bytes);
        LoadRows(tile[gates_at], gate[at], view, gap_bytes);
        in_.EnQue(tile);
        tile = in_.template DeQue<T>();
        ToFloats(values_, tile, view);
        ToFloats(gates_, tile[gates_at], view);
        VectorDone();
        in_.FreeTensor(tile);
    }

    __aicore__ inline void ToFloats(const LocalTensor<float> &dst, const LocalTensor<T> &src,
                                    const View &view)
    {
        if constexpr (std::is_same_v<T, float>) {
            CopyTile(dst, src, view);
        } else {
            ToFloat32(dst, src, view);
        }
    }

    __aicore__ inline void LoadBias(const LocalTensor<float> &dst, uint32_t half, uint32_t row,
                                    uint32_t rows)
    {
        int64_t width = Channels(*t_);
        int64_t at = row * width + half * t_->dim + channel_;
        LoadRows(dst, bias_[at], Rows(rows), (width - channels_) * sizeof(float));
    }

    // `rows` rows of the tile, from `at` on, count in with window `window`.
    __aicore__ inline void Update(uint32_t window, uint32_t at, uint32_t rows, uint32_t bias_row)
    {
        uint32_t fold = t_->fold;
        View view{rows / fold, fold * channels_, lanes_};
        View line = Line(view.cols);
        LocalTensor<float> gates = gates_[at * t_->stride];
        LocalTensor<float> values = values_[at * t_->stride];
        LocalTensor<float> highest = highest_[window * lanes_];
        LocalTensor<float> denominator = denominator_[window * lanes_];
        LocalTensor<float> sum = sum_[window * lanes_];
        if (t_->has_bias != 0) {
            ApplyTile<AddOp>(gates, gates, bias_tile_[bias_row * t_->stride], view);
            VectorDone();
        }
        ReduceColsTo<MaxReduce>(scratch_, gates, view);
        ApplyTile<MaxOp>(scratch_, scratch_, highest, line);
        VectorDone();
        ApplyTile<SubOp>(correction_, highest, scratch_, line);
        ApplyByCol<SubOp>(gates, gates, scratch_, view);
        VectorDone();
        CopyTile(highest, scratch_, line);
        ExpTile(correction_, correction_, line);
        ExpTile(gates, gates, view);
        VectorDone();
        ApplyTile<MulOp>(values, values, gates, view);
        ApplyTile<MulOp>(denominator, denominator, correction_, line);
        ApplyTile<MulOp>(sum, sum, correction_, line);
        VectorDone();
        ReduceCols<SumReduce>(gates, view);
        ReduceCols<SumReduce>(values, view);
        ApplyTile<AddOp>(denominator, denominator, gates, line);
        ApplyTile<AddOp>(sum, sum, values, line);
        VectorDone();
    }

    // The lanes of a window's state, from `at` on, to the first `stride` of them.
    __aicore__ inline void MeetLanes(uint32_t at)
    {
        View view{static_cast<uint32_t>(t_->fold), channels_, channels_};
        LocalTensor<float> weight = highest_[at];
        ReduceColsTo<MaxReduce>(scratch_, weight, view);
        ApplyByCol<SubOp>(weight, weight, scratch_, view);
        VectorDone();
        ExpTile(weight, weight, view);
        VectorDone();
        ApplyTile<MulOp>(denominator_[at], denominator_[at], weight, view);
        ApplyTile<MulOp>(sum_[at], sum_[at], weight, view);
        VectorDone();
        ReduceCols<SumReduce>(denominator_[at], view);
        ReduceCols<SumReduce>(sum_[at], view);
    }

    const HcaCompressTiling *t_;
    int64_t channel_ = -1;
    uint32_t channels_;
    uint32_t lanes_;  // of a window's state
    GlobalTensor<T> kv_;
    GlobalTensor<T> gate_;
    GlobalTensor<T> previous_kv_;
    GlobalTensor<T> previous_gate_;
    GlobalTensor<float> bias_;
    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECIN, 1> bias_in_;
    TBuf<TPosition::VECCALC> floats_;
    TBuf<TPosition::VECCALC> states_;
    LocalTensor<float> bias_tile_;
    LocalTensor<float> values_;
    LocalTensor<float> gates_;
    LocalTensor<float> scratch_;
    LocalTensor<float> highest_;
    LocalTensor<float> denominator_;
    LocalTensor<float> sum_;
    LocalTensor<float> correction_;
};

}  // namespace ascend_kv
