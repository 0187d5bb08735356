// hca_compress: windows of `ratio` tokens -> one entry each, by gated pooling per channel, then
// RMSNorm and RoPE. With overlap a window also sees the first half of the channels (a) of the
// tokens of the window before.
//
// Where the tiling says joint, cores wait for each other: it takes no more cores than there are.
#include "kernel_operator.h"

#include "finish.h"
#include "norm.h"

namespace ascend_kv {

// A core's windows of a round, all of them in some channels.
struct Piece {
    int64_t part;
    int64_t channel;
    uint32_t channels;
    int64_t begin;  // entries
    int64_t end;
};

// Walks a core's pieces of the entries `first` to `last`. Parts begin at different windows, so that
// cores whose parts lie in the same 512 bytes of a token, which take their turn there, seldom meet.
class Pieces {
public:
    __aicore__ inline Pieces(const HcaCompressTiling &tiling, int64_t first, int64_t last)
        : t_(tiling), first_(first), count_(last - first)
    {
        range_ = PartsRange(count_, Parts(tiling), tiling.cores, GetBlockIdx());
    }

    __aicore__ inline bool Valid() const { return range_.begin < range_.end; }

    __aicore__ inline Piece Take()
    {
        int64_t part = range_.begin / count_;
        int64_t inside = range_.begin % count_;
        int64_t window = (inside + part * count_ / Parts(t_)) % count_;
        int64_t channel = part * t_.chunk;
        int64_t count = Smaller(Smaller(count_ - inside, count_ - window),
                                range_.end - range_.begin);
        range_.begin += count;
        uint32_t channels = Smaller<int64_t>(t_.chunk, t_.dim - channel);
        return {part, channel, channels, first_ + window, first_ + window + count};
    }

private:
    const HcaCompressTiling &t_;
    int64_t first_;
    int64_t count_;
    Range range_;
};

template <typename T>
class Compress {
public:
    __aicore__ inline Compress(const CompressTensors &tensors, const HcaCompressTiling &tiling)
        : tensors_(tensors), t_(tiling)
    {
    }

    __aicore__ inline void Process(TPipe &pipe, GM_ADDR entries)
    {
        pool_.Init(pipe, tensors_, t_);
        finish_.Init(pipe, tensors_, entries, t_);
        if (t_.has_norm != 0) {
            norm_.Init(pipe, tensors_, t_);
        }
        pipe.InitBuffer(kept_, t_.kept_rows * t_.stride * sizeof(float));
        for (int64_t first = 0; first < t_.windows; first += t_.round_windows) {
            int64_t last = Smaller(t_.windows, first + t_.round_windows);
            PoolRound(first, last);
            if (t_.joint != 0) {
                norm_.Exchange(last - first);
                FinishRound(first, last);
            }
        }
        pool_.End();
        norm_.End();
    }

private:
    __aicore__ inline View Rows(int64_t count, const Piece &piece) const
    {
        return {static_cast<uint32_t>(count), piece.channels, static_cast<uint32_t>(t_.stride)};
    }

    __aicore__ inline void PoolRound(int64_t first, int64_t last)
    {
        LocalTensor<float> rows = kept_.Get<float>();
        for (Pieces pieces(t_, first, last); pieces.Valid();) {
            Piece piece = pieces.Take();
            pool_.BeginPart(piece.channel, piece.channels);
            if (t_.joint != 0) {
                norm_.BeginSums();
            }
            for (WindowRuns runs(t_, tensors_.sequences, piece.begin, piece.end); runs.Valid();) {
                WindowRun run = runs.Take(pool_.Most(runs.AtStart()));
                pool_.Pool(run, rows);
                if (t_.joint != 0) {
                    norm_.Add(rows, Rows(run.count, piece), run.entry - piece.begin);
                    rows = rows[run.count * t_.stride];
                    continue;
                }
                if (t_.has_norm != 0) {
                    norm_.BeginPart(piece.channel, piece.channels);
                    norm_.Whole(rows, Rows(run.count, piece));
                }
                finish_.Run(rows, run, piece.channel, piece.channels);
            }
            if (t_.joint != 0) {
                norm_.HandOver(piece.part, piece.begin - first, piece.end - piece.begin);
            }
        }
    }

    // The rows that PoolRound kept, in the same order.
    __aicore__ inline void FinishRound(int64_t first, int64_t last)
    {
        LocalTensor<float> rows = kept_.Get<float>();
        for (Pieces pieces(t_, first, last); pieces.Valid();) {
            Piece piece = pieces.Take();
            norm_.BeginPart(piece.channel, piece.channels);
            norm_.Join(rows, Rows(piece.end - piece.begin, piece), piece.begin - first);
            for (WindowRuns runs(t_, tensors_.sequences, piece.begin, piece.end); runs.Valid();) {
                WindowRun run = runs.Take(t_.finish_rows);
                finish_.Run(rows, run, piece.channel, piece.channels);
                rows = rows[run.count * t_.stride];
            }
        }
    }

    const CompressTensors &tensors_;
    const HcaCompressTiling &t_;
    WindowPool<T> pool_;
    EntryNorm norm_;
    EntryFinish finish_;
    TBuf<TPosition::VECCALC> kept_;
};

}  // namespace ascend_kv

// sequences: int32 [B, 4]: each sequence's first token in kv, first entry, index of its first
// window, 0. A sequence has at least the tokens of its windows. previous_kv and previous_gate: the
// a half of the window before, of sequences whose first window is not 0. What the tiling does not
// call for may be null.
extern "C" __global__ __aicore__ void hca_compress(
    GM_ADDR kv, GM_ADDR gate, GM_ADDR sequences, GM_ADDR position_bias, GM_ADDR previous_kv,
    GM_ADDR previous_gate, GM_ADDR norm_weight, GM_ADDR rotary_table, GM_ADDR workspace,
    GM_ADDR entries, HcaCompressTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);  // vector cores that may wait for each other
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::CompressTensors tensors{kv,          gate,          sequences,   position_bias,
                                       previous_kv, previous_gate, norm_weight, rotary_table,
                                       workspace};
    AscendC::TPipe pipe;
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::Compress<half>(tensors, tiling).Process(pipe, entries);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::Compress<bfloat16_t>(tensors, tiling).Process(pipe, entries);
    } else {
        ascend_kv::Compress<float>(tensors, tiling).Process(pipe, entries);
    }
}
