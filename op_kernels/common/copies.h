// Moves of tiles between global memory and UB. DataCopyPad throughout: global addresses and row
// lengths need no alignment. Offsets into global memory are 64 bits wide.
#pragma once
#include "chunks.h"

namespace ascend_kv {

// 32-byte blocks in UB between the end of one row, padded to a block, and the next row.
template <typename T>
__aicore__ inline uint32_t GapBlocks(const View &view)
{
    return view.stride * sizeof(T) / BLOCK_BYTES - DivUp<uint32_t>(view.cols * sizeof(T), BLOCK_BYTES);
}

// Rows that lie `gap_bytes` apart in global memory -> a tile. Rows: at most MAX_COPY_BLOCKS.
template <typename T>
__aicore__ inline void LoadRows(const LocalTensor<T> &dst, const GlobalTensor<T> &src,
                                const View &view, uint32_t gap_bytes = 0)
{
    DataCopyPadExtParams<T> no_padding;
    uint32_t row_bytes = view.cols * sizeof(T);
    if (view.rows == 1 || (view.Dense() && gap_bytes == 0)) {
        DataCopyPad(dst, src, DataCopyExtParams{1, view.rows * row_bytes, 0, 0, 0}, no_padding);
        return;
    }
    uint16_t rows = view.rows;
    DataCopyPad(dst, src, DataCopyExtParams{rows, row_bytes, gap_bytes, GapBlocks<T>(view), 0},
                no_padding);
}

// A tile -> rows that lie `gap_bytes` apart in global memory.
template <typename T>
__aicore__ inline void StoreRows(const GlobalTensor<T> &dst, const LocalTensor<T> &src,
                                 const View &view, uint32_t gap_bytes = 0)
{
    uint32_t row_bytes = view.cols * sizeof(T);
    if (view.rows == 1 || (view.Dense() && gap_bytes == 0)) {
        DataCopyPad(dst, src, DataCopyExtParams{1, view.rows * row_bytes, 0, 0, 0});
        return;
    }
    uint16_t rows = view.rows;
    DataCopyPad(dst, src, DataCopyExtParams{rows, row_bytes, GapBlocks<T>(view), gap_bytes, 0});
}

}  // namespace ascend_kv
