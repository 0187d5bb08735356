// A scale belongs to more values than a tile holds: head and layer. It is given here, by the
// caller or by the kernels before.
#pragma once
#include "items.h"
#include "tiles.h"

namespace ascend_kv {

template <typename T>
class QuantizeSpans : public QuantizeTiles<T> {
public:
    using QuantizeTiles<T>::QuantizeTiles;

    __aicore__ inline void Process(TPipe &pipe, const QuantizeTensors &tensors)
    {
        const KvCacheQuantizeTiling &t = this->t_;
        this->Init(pipe, tensors, t.tile_cols, 1);
        int64_t group = -1;
        Range range = ItemsOfCore<SpanItem>(t);
        for (int64_t number = range.begin; number < range.end; ++number) {
            SpanItem item = SpanItem::Of(t, number);
            LocalTensor<float> x = this->LoadValues(item.at, item.view);
            if (item.group != group) {
                group = item.group;
                this->ReadScales(group, 1);
                this->scales_.FillRows(this->scales_.scale, 1);
            }
            StepsByRow(this->Scratch(), this->scales_, x, item.Groups());
            DropInfiniteSteps(this->Scratch(), item.view);
            this->StoreCodes(item.at, item.view);
        }
    }
};

}  // namespace ascend_kv
