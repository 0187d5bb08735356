// The simplest double-buffered kernel: half to float, any length, every core its share of tiles.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kTile = 2048;

class CopyCast {
  public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, uint64_t size) {
        size_ = size;
        in_.SetGlobalBuffer((__gm__ half*)x, size);
        out_.SetGlobalBuffer((__gm__ float*)y, size);
        pipe_.InitBuffer(inQueue_, 2, kTile * sizeof(half));
        pipe_.InitBuffer(outQueue_, 2, kTile * sizeof(float));
    }
    __aicore__ inline void Process() {
        for (uint64_t start = GetBlockIdx() * kTile; start < size_;
             start += GetBlockNum() * kTile) {
            uint32_t count = static_cast<uint32_t>(size_ - start < kTile ? size_ - start : kTile);
            LocalTensor<half> input = inQueue_.AllocTensor<half>();
            DataCopyExtParams rows(1, count * sizeof(half), 0, 0, 0);
            DataCopyPad(input, in_[start], rows, DataCopyPadExtParams<half>(false, 0, 0, 0));
            inQueue_.EnQue(input);

            input = inQueue_.DeQue<half>();
            LocalTensor<float> output = outQueue_.AllocTensor<float>();
            Cast(output, input, RoundMode::CAST_NONE, count);
            outQueue_.EnQue(output);
            inQueue_.FreeTensor(input);

            output = outQueue_.DeQue<float>();
            rows.blockLen = count * sizeof(float);
            DataCopyPad(out_[start], output, rows);
            outQueue_.FreeTensor(output);
        }
    }

  private:
    TPipe pipe_;
    TQue<TPosition::VECIN, 2> inQueue_;
    TQue<TPosition::VECOUT, 2> outQueue_;
    GlobalTensor<half> in_;
    GlobalTensor<float> out_;
    uint64_t size_;
};

extern "C" __global__ __aicore__ void copy_cast(GM_ADDR x, GM_ADDR y, uint64_t size) {
    CopyCast op;
    op.Init(x, y, size);
    op.Process();
}
