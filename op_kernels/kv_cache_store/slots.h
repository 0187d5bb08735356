// Where the tokens of a tile go: their slots, runs of slots that follow each other, and writes of
// rows and of single values to them.
#pragma once
#include "../common/indices.h"
#include "../common/scales.h"
#include "../common/values.h"
#include "kv_cache_store_tiling.h"

namespace ascend_kv {

// The slots of a tile.
class SlotTile : public IndexTile {
public:
    __aicore__ inline void Init(TPipe &pipe, GM_ADDR slots, const KvCacheStoreTiling &tiling)
    {
        block_size_ = tiling.block_size;
        IndexTile::Init(pipe, slots, tiling.tile_tokens, tiling.wide_slots != 0);
    }

    __aicore__ inline int64_t Block(int64_t slot) const { return slot / block_size_; }
    __aicore__ inline int64_t Offset(int64_t slot) const { return slot % block_size_; }

private:
    int64_t block_size_;
};

// Walks the tokens of a tile in runs: slots that follow each other in one block. Skipped tokens
// (-1) are in no run.
class SlotRuns {
public:
    uint32_t first;
    uint32_t count;
    int64_t slot;  // of the first token

    __aicore__ inline explicit SlotRuns(SlotTile &slots) : first(0), count(0), slots_(slots)
    {
        Next();
    }

    __aicore__ inline bool Valid() const { return first < slots_.Count(); }

    __aicore__ inline void Next()
    {
        first += count;
        count = 0;
        while (Valid() && (slot = slots_.Value(first)) < 0) {
            ++first;
        }
        if (!Valid()) {
            return;
        }
        int64_t block = slots_.Block(slot);
        do {
            ++count;
        } while (first + count < slots_.Count() && slots_.Value(first + count) == slot + count &&
                 slots_.Block(slot + count) == block);
    }

private:
    SlotTile &slots_;
};

// Rows of a tile -> the cache. Token t of the tile has its `heads` rows at t * heads * stride.
template <typename C>
class RowWriter {
public:
    __aicore__ inline void Init(GM_ADDR cache, const KvCacheStoreTiling &tiling)
    {
        t_ = &tiling;
        cache_.SetGlobalBuffer(reinterpret_cast<__gm__ C *>(cache));
    }

    __aicore__ inline void Write(SlotTile &slots, const LocalTensor<C> &tile, int64_t first_head,
                                 uint32_t heads)
    {
        for (SlotRuns run(slots); run.Valid(); run.Next()) {
            int64_t block = slots.Block(run.slot);
            int64_t offset = slots.Offset(run.slot);
            for (uint32_t i = 0; i < run.count; ++i) {
                LocalTensor<C> rows = tile[(run.first + i) * heads * t_->stride];
                if (t_->nz != 0) {
                    WriteNz(rows, block * t_->heads + first_head, offset + i, heads);
                } else {
                    WriteNd(rows, block * t_->heads + first_head, offset + i, heads);
                }
            }
        }
    }

private:
    __aicore__ inline void WriteNd(const LocalTensor<C> &rows, int64_t row, int64_t offset,
                                   uint32_t heads)
    {
        View view{heads, static_cast<uint32_t>(t_->dim), static_cast<uint32_t>(t_->stride)};
        uint32_t gap_bytes = (t_->block_size - 1) * t_->dim * sizeof(C);
        StoreRows(cache_[(row * t_->block_size + offset) * t_->dim], rows, view, gap_bytes);
    }

    // Each row lies in pieces of one block (32 bytes), block_size of them apart.
    __aicore__ inline void WriteNz(const LocalTensor<C> &rows, int64_t row, int64_t offset,
                                   uint32_t heads)
    {
        constexpr uint32_t piece = BLOCK_BYTES / sizeof(C);
        uint32_t pieces = t_->dim / piece;
        uint32_t gap_bytes = (t_->block_size - 1) * BLOCK_BYTES;
        StoreRows(cache_[(row * pieces * t_->block_size + offset) * piece], rows,
                  {heads * pieces, piece, piece}, gap_bytes);
    }

    const KvCacheStoreTiling *t_;
    GlobalTensor<C> cache_;
};

// 0, 1, 2, ... times a number of bytes: what Gather steps by.
class Steps {
public:
    __aicore__ inline void Init(TPipe &pipe, uint32_t count)
    {
        count_ = count;
        pipe.InitBuffer(buffer_, RoundUp(count, FLOATS_PER_BLOCK) * sizeof(int32_t));
    }

    __aicore__ inline LocalTensor<uint32_t> Of(uint32_t bytes)
    {
        LocalTensor<int32_t> steps = buffer_.Get<int32_t>();
        if (bytes != bytes_) {
            bytes_ = bytes;
            CreateVecIndex(steps, static_cast<int32_t>(0), count_);
            VectorDone();
            Muls(steps, steps, static_cast<int32_t>(bytes), count_);
            VectorDone();
        }
        return steps.ReinterpretCast<uint32_t>();
    }

private:
    uint32_t count_;
    uint32_t bytes_ = 0;
    TBuf<TPosition::VECCALC> buffer_;
};

// Single values (scales, zero points, positions) of the tokens of a tile -> [K, rows, S]. A tile
// holds `width` values of each token, side by side. A lone token's values leave from a block each;
// those of a run are gathered row by row first, so that they fill whole sectors.
template <typename E>
class ValueWriter {
public:
    __aicore__ inline void Init(TPipe &pipe, const KvCacheStoreTiling &tiling, uint32_t width)
    {
        block_size_ = tiling.block_size;
        uint32_t blocks = RoundUp<uint32_t>(tiling.tile_tokens * width, 8);
        pipe.InitBuffer(queue_, ONE_BUFFER, blocks * BLOCK_BYTES);
    }

    // `values` is readable up to a whole block.
    __aicore__ inline void Stage(SlotTile &slots, const LocalTensor<E> &values, Steps &steps,
                                 uint32_t width)
    {
        width_ = width;
        staged_ = queue_.template AllocTensor<E>();
        LocalTensor<uint32_t> token_steps = steps.Of(width * sizeof(E));
        Scales::FillBlocks(staged_, values, slots.Count() * width);
        VectorDone();
        for (SlotRuns run(slots); run.Valid(); run.Next()) {
            for (uint32_t i = 0; i < width && run.count > 1; ++i) {
                uint32_t first_byte = (run.first * width + i) * sizeof(E);
                Gather(staged_[RunAt(run, i)], values, token_steps, first_byte, run.count);
            }
        }
        queue_.EnQue(staged_);
        staged_ = queue_.template DeQue<E>();
    }

    // Value i of each token -> row first_row + i of its block's `rows`, and `copies` times on.
    __aicore__ inline void Write(SlotTile &slots, GM_ADDR cache, int64_t rows, int64_t first_row,
                                 uint32_t copies)
    {
        cache_.SetGlobalBuffer(reinterpret_cast<__gm__ E *>(cache));
        for (SlotRuns run(slots); run.Valid(); run.Next()) {
            int64_t row = slots.Block(run.slot) * rows + first_row;
            int64_t at = row * block_size_ + slots.Offset(run.slot);
            if (run.count == 1 && copies == 1) {
                LocalTensor<E> blocks = staged_[run.first * width_ * FLOATS_PER_BLOCK];
                uint32_t gap_bytes = (block_size_ - 1) * sizeof(E);
                StoreRows(cache_[at], blocks, {width_, 1, FLOATS_PER_BLOCK}, gap_bytes);
                continue;
            }
            for (uint32_t i = 0; i < width_ * copies; ++i) {
                StoreRows(cache_[at + i * block_size_], staged_[RunAt(run, i / copies)],
                          Line(run.count));
            }
        }
        queue_.FreeTensor(staged_);
    }

private:
    __aicore__ inline uint32_t RunAt(const SlotRuns &run, uint32_t i) const
    {
        return run.first * width_ * FLOATS_PER_BLOCK + i * RoundUp(run.count, FLOATS_PER_BLOCK);
    }

    uint32_t width_;
    int64_t block_size_;
    GlobalTensor<E> cache_;
    TQue<TPosition::VECOUT, 1> queue_;
    LocalTensor<E> staged_;
};

}  // namespace ascend_kv
