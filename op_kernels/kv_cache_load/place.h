// The work of one tile of kv_cache_load: which tokens of which sequence, and where they lie.
#pragma once
#include "../common/codes.h"
#include "../common/indices.h"
#include "kv_cache_load_tiling.h"

namespace ascend_kv {

struct LoadSide {
    GM_ADDR cache;
    GM_ADDR scale;
    GM_ADDR zero_point;
    GM_ADDR result;  // [B, N, P, D]
};

struct LoadTensors {
    LoadSide sides[2];  // key, value
    GM_ADDR block_tables;
    GM_ADDR lengths;  // [B] int32
    GM_ADDR offset;
    GM_ADDR rotary_table;
    GM_ADDR key_positions;
};

struct LoadPlace {
    int32_t side;
    int64_t first_head;
    uint32_t heads;
    int64_t sequence;
    int64_t token;      // the first, counted from the sequence's start
    uint32_t valid;     // tokens to read
    uint32_t empty;     // tokens past the sequence's length, after those
    int64_t block;      // of the cache, where there are tokens to read
    int64_t in_block;   // place of the first token there
};

class LoadPlaces {
public:
    __aicore__ inline LoadPlaces(const KvCacheLoadTiling &tiling, const LoadTensors &tensors)
        : t_(tiling), number_(GetBlockIdx())
    {
        total_ = t_.sides * Parts(t_) * t_.batch * Blocks(t_) * t_.tiles_a_block;
        lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(tensors.lengths));
        tables32_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(tensors.block_tables));
        tables64_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t *>(tensors.block_tables));
    }

    __aicore__ inline bool Valid() const { return number_ < total_; }

    __aicore__ inline LoadPlace Take()
    {
        LoadPlace p{};
        int64_t rest = number_;
        number_ += t_.cores;
        int64_t tile = rest % t_.tiles_a_block;
        rest /= t_.tiles_a_block;
        int64_t index = rest % Blocks(t_);
        rest /= Blocks(t_);
        p.sequence = rest % t_.batch;
        rest /= t_.batch;
        p.first_head = rest % Parts(t_) * t_.tile_heads;
        p.heads = Smaller<int64_t>(t_.tile_heads, t_.heads - p.first_head);
        p.side = static_cast<int32_t>(rest / Parts(t_));
        p.in_block = TileStart(t_, tile);
        p.token = index * t_.block_size + p.in_block;
        int64_t tokens = TileStart(t_, tile + 1) - p.in_block;
        tokens = Larger<int64_t>(Smaller(tokens, t_.length - p.token), 0);
        int64_t length = lengths_.GetValue(p.sequence);
        p.valid = Larger<int64_t>(Smaller(tokens, length - p.token), 0);
        p.empty = tokens - p.valid;
        if (p.valid > 0) {
            int64_t entry = p.sequence * t_.table_width + index;
            p.block = t_.wide_tables != 0 ? tables64_.GetValue(entry) : tables32_.GetValue(entry);
        }
        return p;
    }

private:
    const KvCacheLoadTiling &t_;
    int64_t number_;
    int64_t total_;
    GlobalTensor<int32_t> lengths_;
    GlobalTensor<int32_t> tables32_;
    GlobalTensor<int64_t> tables64_;
};

// The tile's tokens of each head -> rows in UB, the heads one after another.
template <typename C>
__aicore__ inline void LoadPlaceRows(const LocalTensor<C> &tile, const GlobalTensor<C> &cache,
                                     const KvCacheLoadTiling &t, const LoadPlace &p)
{
    View view{p.valid, static_cast<uint32_t>(t.dim), static_cast<uint32_t>(t.stride)};
    for (uint32_t head = 0; head < p.heads; ++head) {
        int64_t row = p.block * t.heads + p.first_head + head;
        LocalTensor<C> rows = tile[head * p.valid * t.stride];
        if (t.nz == 0) {
            LoadRows(rows, cache[(row * t.block_size + p.in_block) * t.dim], view);
            continue;
        }
        // NZ: the k-th 32 bytes of all tokens of a block lie together.
        constexpr uint32_t piece = BLOCK_BYTES / sizeof(C);
        uint32_t pieces = t.dim / piece;
        for (uint32_t k = 0; k < pieces; ++k) {
            int64_t at = ((row * pieces + k) * t.block_size + p.in_block) * piece;
            LoadRows(rows[k * piece], cache[at], View{p.valid, piece, view.stride});
        }
    }
}

// The result of one place, zeros past the sequence's length included.
template <typename T>
class ResultWriter {
public:
    __aicore__ inline void Init(TPipe &pipe, const KvCacheLoadTiling &tiling)
    {
        t_ = &tiling;
        pipe.InitBuffer(zeros_, t_->zeros * sizeof(T));
        Duplicate(zeros_.Get<int32_t>(), 0, t_->zeros * sizeof(T) / sizeof(int32_t));
        TEventID ready = pipe.FetchEventID(HardEvent::V_MTE3);
        SetFlag<HardEvent::V_MTE3>(ready);
        WaitFlag<HardEvent::V_MTE3>(ready);
    }

    __aicore__ inline void SetResult(GM_ADDR result)
    {
        result_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(result));
    }

    __aicore__ inline void WriteRows(const LocalTensor<T> &tile, const LoadPlace &p)
    {
        View view{p.valid, static_cast<uint32_t>(t_->dim), static_cast<uint32_t>(t_->stride)};
        for (uint32_t head = 0; head < p.heads; ++head) {
            StoreRows(result_[At(p, head)], tile[head * p.valid * t_->stride], view);
        }
    }

    __aicore__ inline void WriteZeros(const LoadPlace &p)
    {
        int64_t count = p.empty * t_->dim;
        for (uint32_t head = 0; head < p.heads; ++head) {
            int64_t at = At(p, head) + p.valid * t_->dim;
            for (int64_t done = 0; done < count; done += t_->zeros) {
                StoreRows(result_[at + done], zeros_.Get<T>(),
                          Line(Smaller(t_->zeros, count - done)));
            }
        }
    }

private:
    __aicore__ inline int64_t At(const LoadPlace &p, uint32_t head) const
    {
        int64_t row = p.sequence * t_->heads + p.first_head + head;
        return (row * t_->length + p.token) * t_->dim;
    }

    const KvCacheLoadTiling *t_;
    GlobalTensor<T> result_;
    TBuf<TPosition::VECOUT> zeros_;
};

}  // namespace ascend_kv
