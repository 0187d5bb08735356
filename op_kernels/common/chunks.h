// A tile in UB as rows of elements, and its cut into vector instructions.
//
//     |<------ cols ------>|<- gap ->|   One vector instruction takes up to 64 floats ("mask")
//     |<---------- stride ---------->|   and repeats up to 255 times at a fixed step: down the
//                                        rows, or along one row, whichever needs fewer.
#pragma once
#include "kernel_operator.h"

#define ASCEND_KV_ON_DEVICE  // tilings keep their host functions to themselves
#include "limits.h"

namespace ascend_kv {
using namespace AscendC;

constexpr uint32_t MAX_REPEATS = 255;
constexpr uint32_t FLOATS_PER_BLOCK = BLOCK_BYTES / sizeof(float);
constexpr uint32_t REPEAT_LANES = LANES;

struct View {
    uint32_t rows;
    uint32_t cols;
    uint32_t stride;  // elements from one row to the next, a multiple of ROW_ALIGNMENT

    __aicore__ inline bool Dense() const { return cols == stride || rows == 1; }
    __aicore__ inline uint32_t Elements() const { return rows * cols; }
};

// Walks a View in pieces of one vector instruction each:
//     for (RowChunks c(view); c.Valid(); c.Next()) { Add(dst[c.offset], ..., c.mask, c.repeats, ...); }
class RowChunks {
public:
    uint32_t offset;   // of the first element, from the start of the tile
    uint32_t row;      // of the first element
    uint32_t col;      // of the first element
    uint32_t mask;     // elements of each repeat
    uint32_t repeats;
    uint32_t step;     // elements from one repeat to the next
    bool down;         // repeats go down the rows; else along one row

    __aicore__ inline explicit RowChunks(const View &view) : view_(view)
    {
        uint32_t column_pieces = DivUp(view.cols, REPEAT_LANES);
        uint32_t by_column = column_pieces * DivUp(view.rows, MAX_REPEATS);
        uint32_t by_row = view.rows * (DivUp(view.cols / REPEAT_LANES, MAX_REPEATS) +
                                       (view.cols % REPEAT_LANES == 0 ? 0 : 1));
        // Repeat strides are 8 bits, counted in blocks.
        bool reachable = view.stride <= MAX_REPEATS * FLOATS_PER_BLOCK;
        down = reachable && by_column <= by_row;
        step = down ? view.stride : REPEAT_LANES;
        row = 0;
        col = 0;
        Fill();
    }

    __aicore__ inline bool Valid() const { return row < view_.rows && view_.cols > 0; }

    __aicore__ inline void Next()
    {
        if (down) {
            row += repeats;
            if (row >= view_.rows && col + REPEAT_LANES < view_.cols) {
                row = 0;
                col += REPEAT_LANES;
            }
        } else {
            col += repeats * mask;
            if (col >= view_.cols) {
                col = 0;
                row += 1;
            }
        }
        Fill();
    }

    // Blocks from one repeat to the next for elements of `bytes` each.
    __aicore__ inline uint8_t Step(uint32_t bytes) const
    {
        return static_cast<uint8_t>(step * bytes / BLOCK_BYTES);
    }

    // Repeat stride of an operand that holds one block for each row.
    __aicore__ inline uint8_t RowStep() const { return down ? 1 : 0; }

    // Repeat stride of a float operand that holds one value for each column.
    __aicore__ inline uint8_t ColStep() const { return down ? 0 : 8; }

private:
    __aicore__ inline void Fill()
    {
        uint32_t left = view_.cols - col;
        offset = row * view_.stride + col;
        mask = Smaller(REPEAT_LANES, left);
        repeats = down ? Smaller(MAX_REPEATS, view_.rows - row)
                       : Smaller(MAX_REPEATS, Larger(left / REPEAT_LANES, 1u));
    }

    View view_;
};

// `count` consecutive elements.
__aicore__ inline View Line(uint32_t count)
{
    return {1, count, count};
}

// The same elements as one long row, where nothing lies between the rows.
__aicore__ inline View Flat(const View &view)
{
    return view.Dense() ? Line(view.Elements()) : view;
}

}  // namespace ascend_kv
