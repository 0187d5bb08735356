// Each scale belongs to one row that fits a tile: token_head, group, and short heads and layers.
#pragma once
#include "tiles.h"

namespace ascend_kv {

template <typename T>
class QuantizeRows : public QuantizeTiles<T> {
public:
    using QuantizeTiles<T>::QuantizeTiles;

    __aicore__ inline void Process(TPipe &pipe, const QuantizeTensors &tensors)
    {
        const KvCacheQuantizeTiling &t = this->t_;
        this->Init(pipe, tensors, t.tile_rows * t.stride, t.tile_rows);
        Range range = CoreRange(t.groups, t.cores, GetBlockIdx(), t.granule);
        for (int64_t row = range.begin; row < range.end; row += t.tile_rows) {
            Tile(row, this->Rows(Smaller<int64_t>(t.tile_rows, range.end - row)));
        }
    }

private:
    __aicore__ inline void Tile(int64_t row, const View &view)
    {
        LocalTensor<float> x = this->LoadValues(row * this->t_.cols, view);
        LocalTensor<float> scratch = this->Scratch();
        Scales &scales = this->scales_;
        bool given = this->t_.is_static != 0;
        if (given) {
            this->ReadScales(row, view.rows);
        } else {
            FindExtremes(scales, x, scratch, RowGroups(view), false);
            scales.FromExtremes(view.rows);
            this->WriteScales(row, view.rows);
            scales.FindDivisor(view.rows);
        }
        scales.FillRows(given ? scales.scale : scales.divisor, view.rows);
        StepsByRow(scratch, scales, x, view);
        if (given) {
            DropInfiniteSteps(scratch, view);
        }
        this->StoreCodes(row * this->t_.cols, view);
    }
};

}  // namespace ascend_kv
