// RMSNorm of pooled rows: x / sqrt(mean of squares + eps) * weight.
//
// Where a row's channels lie on several cores, each writes the sum of its squares to the workspace,
// some of them add these up, and all read the roots. The workspace holds rows of a float for each
// window of a round: the sums of part 0, of part 1, ..., then the roots.
#pragma once
#include "../common/scales.h"
#include "pool.h"

namespace ascend_kv {

class EntryNorm {
public:
    __aicore__ inline void Init(TPipe &pipe, const CompressTensors &tensors,
                                const HcaCompressTiling &tiling)
    {
        t_ = &tiling;
        source_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.norm_weight));
        workspace_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.workspace));
        pipe.InitBuffer(weight_in_, ONE_BUFFER, tiling.stride * sizeof(float));
        pipe.InitBuffer(squares_, tiling.finish_rows * tiling.stride * sizeof(float));
        pipe.InitBuffer(norms_, REPEAT_LANES * (sizeof(float) + BLOCK_BYTES));
        Duplicate(norms_.Get<float>(), 0.0f, REPEAT_LANES);  // FillBlocks reads whole blocks
        VectorDone();
        if (tiling.joint != 0) {
            uint32_t most = MostSums();
            uint32_t kept = RoundUp<uint32_t>(tiling.kept_rows, FLOATS_PER_BLOCK);
            pipe.InitBuffer(sums_out_, BUFFERS, Larger(most, kept) * sizeof(float));
            uint32_t read = Larger<uint32_t>(Parts(tiling) * most, kept);
            pipe.InitBuffer(exchange_in_, ONE_BUFFER, read * sizeof(float));
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
        LocalTensor<float> weight = weight_in_.AllocTensor<float>();
        LoadRows(weight, source_[channel], Line(channels));
        weight_in_.EnQue(weight);
        weight_ = weight_in_.DeQue<float>();
    }

    __aicore__ inline void End()
    {
        if (channel_ >= 0) {
            weight_in_.FreeTensor(weight_);
            channel_ = -1;
        }
    }

    // Rows with all their channels.
    __aicore__ inline void Whole(const LocalTensor<float> &rows, const View &view)
    {
        LocalTensor<float> norms = norms_.Get<float>();
        SumSquares(norms, rows, view);
        Roots(norms, view.rows);
        Scale(rows, view);
    }

    // Windows that follow each other, in one part: BeginSums, Add of all rows, HandOver.
    __aicore__ inline void BeginSums() { sums_ = sums_out_.AllocTensor<float>(); }

    // Rows whose first is the windows' `at`-th.
    __aicore__ inline void Add(const LocalTensor<float> &rows, const View &view, uint32_t at)
    {
        SumSquares(sums_[at], rows, view);
    }

    // `window`: the first one's place in the round.
    __aicore__ inline void HandOver(int64_t part, int64_t window, uint32_t count)
    {
        Send(part * Pitch() + window, count);
    }

    // Between HandOver and Join of a round of `windows` windows, on every core.
    __aicore__ inline void Exchange(int64_t windows)
    {
        SyncAll();
        Range range = CoreRange(windows, t_->cores, GetBlockIdx(), SUMS_GRANULE);
        if (range.begin < range.end) {
            uint32_t parts = Parts(*t_);
            uint32_t count = range.end - range.begin;
            View view{parts, count, RoundUp(count, FLOATS_PER_BLOCK)};
            LocalTensor<float> sums = exchange_in_.AllocTensor<float>();
            LoadRows(sums, workspace_[range.begin], view, (Pitch() - count) * sizeof(float));
            exchange_in_.EnQue(sums);
            sums = exchange_in_.DeQue<float>();
            ReduceCols<SumReduce>(sums, view);
            Roots(sums, count);
            BeginSums();
            CopyTile(sums_, sums, Line(count));
            VectorDone();
            exchange_in_.FreeTensor(sums);
            Send(parts * Pitch() + range.begin, count);
        }
        SyncAll();
    }

    // The rows of the windows of a HandOver, when the round's norms are known.
    __aicore__ inline void Join(const LocalTensor<float> &rows, const View &view, int64_t window)
    {
        LocalTensor<float> roots = exchange_in_.AllocTensor<float>();
        LoadRows(roots, workspace_[Parts(*t_) * Pitch() + window], Line(view.rows));
        exchange_in_.EnQue(roots);
        roots = exchange_in_.DeQue<float>();
        for (uint32_t row = 0; row < view.rows; row += REPEAT_LANES) {
            uint32_t count = Smaller(REPEAT_LANES, view.rows - row);
            CopyTile(norms_.Get<float>(), roots[row], Line(count));
            VectorDone();
            Scale(rows[row * view.stride], View{count, view.cols, view.stride});
        }
        exchange_in_.FreeTensor(roots);
    }

private:
    __aicore__ inline int64_t Pitch() const { return RoundUp(t_->round_windows, SUMS_GRANULE); }

    __aicore__ inline uint32_t MostSums() const
    {
        int64_t granules = DivUp(t_->round_windows, SUMS_GRANULE);
        return DivUp<int64_t>(granules, t_->cores) * SUMS_GRANULE;
    }

    __aicore__ inline void Send(int64_t to, uint32_t count)
    {
        sums_out_.EnQue(sums_);
        sums_ = sums_out_.DeQue<float>();
        StoreRows(workspace_[to], sums_, Line(count));
        sums_out_.FreeTensor(sums_);
    }

    __aicore__ inline void SumSquares(const LocalTensor<float> &sums,
                                      const LocalTensor<float> &rows, const View &view)
    {
        LocalTensor<float> squares = squares_.Get<float>();
        ApplyTile<MulOp>(squares, rows, rows, view);
        VectorDone();
        ReduceRows<SumReduce>(sums, squares, view);
    }

    // Sums of squares -> sqrt(mean + eps).
    __aicore__ inline void Roots(const LocalTensor<float> &sums, uint32_t count)
    {
        Muls(sums, sums, t_->norm_factor, count);
        VectorDone();
        Adds(sums, sums, t_->norm_eps, count);
        VectorDone();
        Sqrt(sums, sums, count);
        VectorDone();
    }

    __aicore__ inline void Scale(const LocalTensor<float> &rows, const View &view)
    {
        LocalTensor<float> norms = norms_.Get<float>();
        LocalTensor<float> by_row = norms[REPEAT_LANES];
        Scales::FillBlocks(by_row, norms, view.rows);
        VectorDone();
        ApplyByRow<DivOp>(rows, rows, by_row, view);
        VectorDone();
        ApplyByCol<MulOp>(rows, rows, weight_, view);
        VectorDone();
    }

    const HcaCompressTiling *t_;
    int64_t channel_ = -1;
    GlobalTensor<float> source_;
    GlobalTensor<float> workspace_;
    TQue<TPosition::VECIN, 1> weight_in_;
    TQue<TPosition::VECIN, 1> exchange_in_;  // all parts' sums, or roots
    TQue<TPosition::VECOUT, 1> sums_out_;
    TBuf<TPosition::VECCALC> squares_;
    TBuf<TPosition::VECCALC> norms_;
    LocalTensor<float> weight_;
    LocalTensor<float> sums_;
};

}  // namespace ascend_kv
