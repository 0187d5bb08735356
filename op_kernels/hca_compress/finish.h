// Pooled rows -> entries: RMSNorm, RoPE of the last channels at the window's position, one
// rounding to the entries' type.
#pragma once
#include "../common/scales.h"
#include "pool.h"

namespace ascend_kv {

template <typename T>
class EntryFinish {
public:
    __aicore__ inline void Init(TPipe &pipe, const CompressTensors &tensors, GM_ADDR entries,
                                const HcaCompressTiling &tiling)
    {
        t_ = &tiling;
        sequences_ = tensors.sequences;
        entries_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(entries));
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.rotary_table));
        uint32_t rows = tiling.finish_rows;
        pipe.InitBuffer(out_, BUFFERS, rows * tiling.row_stride * sizeof(T));
        if (tiling.has_norm != 0) {
            pipe.InitBuffer(squares_, rows * tiling.row_stride * sizeof(float));
            pipe.InitBuffer(norms_, REPEAT_LANES * (sizeof(float) + BLOCK_BYTES));
            Duplicate(norms_.Get<float>(), 0.0f, REPEAT_LANES);
            VectorDone();
            ReadWeight(pipe, tensors.norm_weight);
        }
        if (tiling.rotary_dim != 0) {
            pipe.InitBuffer(table_in_, ONE_BUFFER, rows * tiling.rotary_dim * sizeof(float));
            pipe.InitBuffer(turned_, 3 * rows * tiling.rotary_dim * sizeof(float));
            InitPairs(pipe);
        }
    }

    // `count` rows, whose first is entry `entry`; they are destroyed.
    __aicore__ inline void Run(const LocalTensor<float> &pooled, int64_t entry, uint32_t count)
    {
        View view{count, static_cast<uint32_t>(t_->dim), static_cast<uint32_t>(t_->row_stride)};
        if (t_->has_norm != 0) {
            Norm(pooled, view);
        }
        if (t_->rotary_dim != 0) {
            for (WindowRuns runs(*t_, sequences_, entry, entry + count); runs.Valid();) {
                WindowRun run = runs.Take(count);
                Turn(pooled[(run.entry - entry) * t_->row_stride], run);
            }
        }
        LocalTensor<T> rounded = out_.template AllocTensor<T>();
        if constexpr (std::is_same_v<T, float>) {
            CopyTile(rounded, pooled, view);
        } else {
            FromFloat32(rounded, pooled, view);
        }
        VectorDone();
        out_.EnQue(rounded);
        rounded = out_.template DeQue<T>();
        StoreRows(entries_[entry * t_->dim], rounded, view);
        out_.FreeTensor(rounded);
    }

private:
    __aicore__ inline void ReadWeight(TPipe &pipe, GM_ADDR norm_weight)
    {
        GlobalTensor<float> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(norm_weight));
        pipe.InitBuffer(weight_, t_->row_stride * sizeof(float));
        LoadRows(weight_.Get<float>(), source, Line(t_->dim));
        TEventID loaded = pipe.FetchEventID(HardEvent::MTE2_V);
        SetFlag<HardEvent::MTE2_V>(loaded);
        WaitFlag<HardEvent::MTE2_V>(loaded);
    }

    // x / sqrt(mean of squares + eps) * weight
    __aicore__ inline void Norm(const LocalTensor<float> &rows, const View &view)
    {
        LocalTensor<float> squares = squares_.Get<float>();
        LocalTensor<float> norms = norms_.Get<float>();
        LocalTensor<float> by_row = norms[REPEAT_LANES];
        ApplyTile<MulOp>(squares, rows, rows, view);
        VectorDone();
        ReduceRows<SumReduce>(norms, squares, view);
        Muls(norms, norms, t_->norm_factor, view.rows);
        VectorDone();
        Adds(norms, norms, t_->norm_eps, view.rows);
        VectorDone();
        Sqrt(norms, norms, view.rows);
        VectorDone();
        Scales::FillBlocks(by_row, norms, view.rows);
        VectorDone();
        ApplyByRow<DivOp>(rows, rows, by_row, view);
        VectorDone();
        ApplyByCol<MulOp>(rows, rows, weight_.Get<float>(), view);
        VectorDone();
    }

    // Byte offsets within a row of pairs: of each element's other one, of its pair's first and of
    // its second; and the sign of the sine: first * cos - second * sin, second * cos + first * sin.
    __aicore__ inline void InitPairs(TPipe &pipe)
    {
        uint32_t dim = t_->rotary_dim;
        pipe.InitBuffer(pairs_, 4 * dim * sizeof(float));
        other_ = pairs_.Get<uint32_t>();
        first_ = other_[dim];
        second_ = other_[2 * dim];
        sign_ = other_[3 * dim].ReinterpretCast<float>();
        for (uint32_t i = 0; i < dim; ++i) {
            other_.SetValue(i, (i ^ 1) * sizeof(float));
            first_.SetValue(i, (i & ~1u) * sizeof(float));
            second_.SetValue(i, (i | 1) * sizeof(float));
            sign_.SetValue(i, i % 2 == 0 ? -1.0f : 1.0f);
        }
        TEventID written = pipe.FetchEventID(HardEvent::S_V);
        SetFlag<HardEvent::S_V>(written);
        WaitFlag<HardEvent::S_V>(written);
    }

    // RoPE of the last channels of the rows of a run; window w is at position ratio * w.
    __aicore__ inline void Turn(const LocalTensor<float> &rows, const WindowRun &run)
    {
        uint32_t dim = t_->rotary_dim;
        uint32_t count = run.count;
        LocalTensor<float> table = table_in_.AllocTensor<float>();
        LoadRows(table, table_[run.window * t_->ratio * dim], View{count, dim, dim},
                 (t_->ratio - 1) * dim * sizeof(float));
        table_in_.EnQue(table);
        table = table_in_.DeQue<float>();
        LocalTensor<float> cosine = turned_.Get<float>();
        LocalTensor<float> sine = cosine[count * dim];
        LocalTensor<float> others = sine[count * dim];
        uint32_t column = t_->dim - dim;
        for (uint32_t row = 0; row < count; ++row) {
            uint32_t table_byte = row * dim * sizeof(float);
            uint32_t row_byte = (row * t_->row_stride + column) * sizeof(float);
            Gather(cosine[row * dim], table, first_, table_byte, dim);
            Gather(sine[row * dim], table, second_, table_byte, dim);
            Gather(others[row * dim], rows, other_, row_byte, dim);
        }
        VectorDone();
        table_in_.FreeTensor(table);
        ApplyByCol<MulOp>(sine, sine, sign_, View{count, dim, dim});
        VectorDone();
        ApplyTile<MulOp>(others, others, sine, Line(count * dim));
        View view{count, dim, static_cast<uint32_t>(t_->row_stride)};
        ApplyWith<MulOp>(rows[column], view, cosine, dim);
        VectorDone();
        ApplyWith<AddOp>(rows[column], view, others, dim);
        VectorDone();
    }

    const HcaCompressTiling *t_;
    GM_ADDR sequences_;
    GlobalTensor<T> entries_;
    GlobalTensor<float> table_;
    TQue<TPosition::VECOUT, 1> out_;
    TQue<TPosition::VECIN, 1> table_in_;
    TBuf<TPosition::VECIN> weight_;
    TBuf<TPosition::VECCALC> squares_;
    TBuf<TPosition::VECCALC> norms_;
    TBuf<TPosition::VECCALC> turned_;
    TBuf<TPosition::VECCALC> pairs_;
    LocalTensor<uint32_t> other_;
    LocalTensor<uint32_t> first_;
    LocalTensor<uint32_t> second_;
    LocalTensor<float> sign_;
};

}  // namespace ascend_kv
