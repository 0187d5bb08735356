// hca_decompress: every token gets the entry of its window: entries [W, D] -> [W * ratio, D].
// A row is read once, copied in UB a few times, and leaves in long bursts.
#include "kernel_operator.h"

#include "../common/copies.h"
#include "../common/values.h"
#include "hca_decompress_tiling.h"

namespace ascend_kv {

// T: any type of the element's size.
template <typename T>
class HcaDecompress {
public:
    __aicore__ inline HcaDecompress(TPipe &pipe, GM_ADDR entries, GM_ADDR rows,
                                    const HcaDecompressTiling &tiling)
        : t_(tiling)
    {
        entries_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(entries));
        rows_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(rows));
        pipe.InitBuffer(in_, BUFFERS, t_.stride * sizeof(T));
        pipe.InitBuffer(out_, BUFFERS, t_.copies * t_.stride * sizeof(T));
    }

    __aicore__ inline void Process()
    {
        Range range = CoreRange(t_.entries * t_.parts, t_.cores, GetBlockIdx(), 1);
        for (int64_t item = range.begin; item < range.end; ++item) {
            int64_t part = item % t_.parts;
            Spread(item / t_.parts, PartStart(t_, part), PartStart(t_, part + 1));
        }
    }

private:
    // Copies `first` to `last` of an entry.
    __aicore__ inline void Spread(int64_t entry, int64_t first, int64_t last)
    {
        LocalTensor<T> row = in_.template AllocTensor<T>();
        uint32_t whole = RoundUp<uint32_t>(t_.dim, BLOCK_BYTES / sizeof(T));
        uint8_t padding = whole - t_.dim;  // copies within UB take whole blocks
        uint32_t bytes = t_.dim * sizeof(T);
        DataCopyPad(row, entries_[entry * t_.dim], DataCopyExtParams{1, bytes, 0, 0, 0},
                    DataCopyPadExtParams<T>{padding > 0, 0, padding, static_cast<T>(0)});
        in_.EnQue(row);
        row = in_.template DeQue<T>();
        LocalTensor<T> copies = out_.template AllocTensor<T>();
        for (uint32_t copy = 0; copy < Smaller<int64_t>(t_.copies, last - first); ++copy) {
            DataCopy(copies[copy * t_.stride], row, whole);
        }
        in_.FreeTensor(row);
        out_.EnQue(copies);
        copies = out_.template DeQue<T>();
        for (int64_t copy = first; copy < last; copy += t_.copies) {
            uint32_t count = Smaller<int64_t>(t_.copies, last - copy);
            StoreRows(rows_[(entry * t_.ratio + copy) * t_.dim], copies,
                      View{count, static_cast<uint32_t>(t_.dim), static_cast<uint32_t>(t_.stride)});
        }
        out_.FreeTensor(copies);
    }

    const HcaDecompressTiling &t_;
    GlobalTensor<T> entries_;
    GlobalTensor<T> rows_;
    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECOUT, 1> out_;
};

}  // namespace ascend_kv

extern "C" __global__ __aicore__ void hca_decompress(GM_ADDR entries, GM_ADDR rows,
                                                     HcaDecompressTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    if (tiling.element_bytes == sizeof(float)) {
        ascend_kv::HcaDecompress<float>(pipe, entries, rows, tiling).Process();
    } else {
        ascend_kv::HcaDecompress<half>(pipe, entries, rows, tiling).Process();
    }
}
