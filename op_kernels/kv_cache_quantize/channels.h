// A scale belongs to a column of a [tokens, dim] matrix: channel. Where a tile holds the matrix,
// its scales are found and used at once; else they are given, by the caller or by the kernels
// before.
#pragma once
#include "items.h"
#include "tiles.h"

namespace ascend_kv {

template <typename T>
class QuantizeChannels : public QuantizeTiles<T> {
public:
    using QuantizeTiles<T>::QuantizeTiles;

    __aicore__ inline void Process(TPipe &pipe, const QuantizeTensors &tensors)
    {
        const KvCacheQuantizeTiling &t = this->t_;
        this->Init(pipe, tensors, ChannelItem::TileValues(t), t.cols);
        int64_t group = -1;
        Range range = ItemsOfCore<ChannelItem>(t);
        for (int64_t number = range.begin; number < range.end; ++number) {
            ChannelItem item = ChannelItem::Of(t, number);
            LocalTensor<float> x = this->LoadValues(item.at, item.view);
            if (item.group != group) {
                group = item.group;
                FindScales(item, x);
            }
            StepsByCol(this->Scratch(), x,
                       Given() ? this->scales_.scale : this->scales_.divisor,
                       this->scales_.zero_point, t.symmetric != 0, item.view);
            if (Given()) {
                DropInfiniteSteps(this->Scratch(), item.view);
            }
            this->StoreCodes(item.at, item.view);
        }
    }

private:
    __aicore__ inline bool Given() const { return this->t_.is_static != 0 || this->t_.passes > 1; }

    __aicore__ inline void FindScales(const ChannelItem &item, const LocalTensor<float> &x)
    {
        uint32_t count = item.view.cols;
        int64_t at = item.group * count;
        if (Given()) {
            this->ReadScales(at, count);
        } else {
            FindExtremes(this->scales_, x, this->Scratch(), item.Groups(), false);
            this->scales_.FromExtremes(count);
            this->WriteScales(at, count);
            this->scales_.FindDivisor(count);
        }
    }
};

}  // namespace ascend_kv
