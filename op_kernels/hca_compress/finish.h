// Normed rows -> entries: RoPE of the last channels at the window's position, one rounding to the
// entries' type.
#pragma once
#include "pool.h"

namespace ascend_kv {

class EntryFinish {
public:
    __aicore__ inline void Init(TPipe &pipe, const CompressTensors &tensors, GM_ADDR entries,
                                const HcaCompressTiling &tiling)
    {
        t_ = &tiling;
        entries_ = entries;
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.rotary_table));
        uint32_t rows = tiling.finish_rows;
        pipe.InitBuffer(out_, BUFFERS, rows * tiling.stride * ElementBytes(tiling.out_element));
        if (tiling.rotary_dim != 0) {
            uint32_t dim = Smaller(tiling.rotary_dim, tiling.stride);
            pipe.InitBuffer(table_in_, ONE_BUFFER, rows * dim * sizeof(float));
            pipe.InitBuffer(turned_, 3 * rows * dim * sizeof(float));
            InitPairs(pipe, dim);
        }
    }

    // The rows of a run of windows, from channel `channel` on; they are destroyed.
    __aicore__ inline void Run(const LocalTensor<float> &rows, const WindowRun &run,
                               int64_t channel, uint32_t channels)
    {
        View view{static_cast<uint32_t>(run.count), channels, static_cast<uint32_t>(t_->stride)};
        if (t_->rotary_dim != 0) {
            int64_t first = Larger(channel, t_->dim - t_->rotary_dim);
            if (first < channel + channels) {
                Turn(rows[first - channel], run, first, channel + channels - first);
            }
        }
        if (t_->out_element == HALF) {
            Store<half>(rows, view, run.entry, channel);
        } else if (t_->out_element == BFLOAT16) {
            Store<bfloat16_t>(rows, view, run.entry, channel);
        } else {
            Store<float>(rows, view, run.entry, channel);
        }
    }

private:
    template <typename E>
    __aicore__ inline void Store(const LocalTensor<float> &rows, const View &view, int64_t entry,
                                 int64_t channel)
    {
        LocalTensor<E> rounded = out_.template AllocTensor<E>();
        if constexpr (std::is_same_v<E, float>) {
            CopyTile(rounded, rows, view);
        } else {
            FromFloat32(rounded, rows, view);
        }
        VectorDone();
        out_.EnQue(rounded);
        rounded = out_.template DeQue<E>();
        GlobalTensor<E> entries;
        entries.SetGlobalBuffer(reinterpret_cast<__gm__ E *>(entries_));
        StoreRows(entries[entry * t_->dim + channel], rounded, view,
                  (t_->dim - view.cols) * sizeof(E));
        out_.FreeTensor(rounded);
    }

    // Byte offsets within a row of pairs: of each element's other one, of its pair's first and of
    // its second; and the sign of the sine: first * cos - second * sin, second * cos + first * sin.
    __aicore__ inline void InitPairs(TPipe &pipe, uint32_t dim)
    {
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

    // RoPE of `dim` channels, `channel` and on, of the rows; window w is at position ratio * w.
    __aicore__ inline void Turn(const LocalTensor<float> &rows, const WindowRun &run,
                                int64_t channel, uint32_t dim)
    {
        uint32_t count = run.count;
        int64_t pitch = t_->ratio * t_->rotary_dim;
        int64_t column = channel - (t_->dim - t_->rotary_dim);
        LocalTensor<float> table = table_in_.AllocTensor<float>();
        LoadRows(table, table_[run.window * pitch + column], View{count, dim, dim},
                 (pitch - dim) * sizeof(float));
        table_in_.EnQue(table);
        table = table_in_.DeQue<float>();
        LocalTensor<float> cosine = turned_.Get<float>();
        LocalTensor<float> sine = cosine[count * dim];
        LocalTensor<float> others = sine[count * dim];
        for (uint32_t row = 0; row < count; ++row) {
            uint32_t table_byte = row * dim * sizeof(float);
            uint32_t row_byte = row * t_->stride * sizeof(float);
            Gather(cosine[row * dim], table, first_, table_byte, dim);
            Gather(sine[row * dim], table, second_, table_byte, dim);
            Gather(others[row * dim], rows, other_, row_byte, dim);
        }
        VectorDone();
        table_in_.FreeTensor(table);
        ApplyByCol<MulOp>(sine, sine, sign_, View{count, dim, dim});
        VectorDone();
        ApplyTile<MulOp>(others, others, sine, Line(count * dim));
        View view{count, dim, static_cast<uint32_t>(t_->stride)};
        ApplyWith<MulOp>(rows, view, cosine, dim);
        VectorDone();
        ApplyWith<AddOp>(rows, view, others, dim);
        VectorDone();
    }

    const HcaCompressTiling *t_;
    GM_ADDR entries_;
    GlobalTensor<float> table_;
    TQue<TPosition::VECOUT, 1> out_;
    TQue<TPosition::VECIN, 1> table_in_;
    TBuf<TPosition::VECCALC> turned_;
    TBuf<TPosition::VECCALC> pairs_;
    LocalTensor<uint32_t> other_;
    LocalTensor<uint32_t> first_;
    LocalTensor<uint32_t> second_;
    LocalTensor<float> sign_;
};

}  // namespace ascend_kv
