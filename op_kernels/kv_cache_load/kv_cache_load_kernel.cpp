// kv_cache_load: blocks of the paged caches, by block table -> dense [B, N, P, D], dequantized,
// keys with R(n) * offset added, zeros past a sequence's length.
#include "kernel_operator.h"

#include "offset.h"
#include "place.h"

namespace ascend_kv {

// Stored as C, read as T.
template <typename C, typename T>
class KvCacheLoad {
public:
    __aicore__ inline KvCacheLoad(TPipe &pipe, const LoadTensors &tensors,
                                  const KvCacheLoadTiling &tiling)
        : t_(tiling), tensors_(tensors)
    {
        uint32_t tokens = RoundUp<uint32_t>(t_.tile_tokens, FLOATS_PER_BLOCK);
        tiles_.Init(pipe, t_.tile_tokens * t_.tile_heads * t_.stride);
        writer_.Init(pipe, t_);
        if (t_.mode == LOAD_STATIC) {
            scales_.Init(pipe, t_.tile_heads * t_.stride, t_.symmetric != 0, false, true);
            vectors_.Init(pipe, t_.dim, ONE_BUFFER);
        } else if (t_.mode != LOAD_CONVERT) {
            uint32_t groups = tokens * (t_.mode == LOAD_TOKEN ? 1 : t_.tile_heads);
            scales_.Init(pipe, groups, t_.symmetric != 0, true, true);
            vectors_.Init(pipe, groups);
        }
        if (t_.offset != OFFSET_NONE) {
            offset_.Init(pipe, tensors, t_);
        }
    }

    __aicore__ inline void Process()
    {
        for (LoadPlaces places(t_, tensors_); places.Valid();) {
            LoadPlace p = places.Take();
            const LoadSide &side = tensors_.sides[p.side];
            writer_.SetResult(side.result);
            if (p.valid > 0) {
                ReadTile(side, p);
            }
            writer_.WriteZeros(p);
        }
    }

private:
    __aicore__ inline void ReadTile(const LoadSide &side, const LoadPlace &p)
    {
        View all{p.heads * p.valid, static_cast<uint32_t>(t_.dim),
                 static_cast<uint32_t>(t_.stride)};
        GlobalTensor<C> cache;
        cache.SetGlobalBuffer(reinterpret_cast<__gm__ C *>(side.cache));
        LoadPlaceRows(tiles_.Alloc(), cache, t_, p);
        if (t_.mode == LOAD_STATIC) {
            ReadGivenScales(side, p);
        } else if (t_.mode != LOAD_CONVERT) {
            ReadScales(side, p);
        }
        LocalTensor<float> values = tiles_.Values(all);
        if (t_.mode != LOAD_CONVERT) {
            ApplyScales(values, p);
        }
        if (p.side == 0 && t_.offset != OFFSET_NONE) {
            offset_.Add(values, p);
        }
        writer_.WriteRows(tiles_.Result(all), p);
        tiles_.Free();
    }

    // One scale for each token (and head); those of each head start at a block.
    __aicore__ inline void ReadScales(const LoadSide &side, const LoadPlace &p)
    {
        bool shared = t_.mode == LOAD_TOKEN;
        uint32_t rows = shared ? 1 : p.heads;
        int64_t row = shared ? p.block : p.block * t_.heads + p.first_head;
        int64_t at = row * t_.block_size + p.in_block;
        View view{rows, p.valid, RoundUp(p.valid, FLOATS_PER_BLOCK)};
        uint32_t gap_bytes = (t_.block_size - p.valid) * sizeof(float);
        Read(scales_.scale, side.scale, at, view, gap_bytes);
        if (t_.symmetric == 0) {
            Read(scales_.zero_point, side.zero_point, at, view, gap_bytes);
        }
        scales_.FillRows(scales_.scale, rows * view.stride);
    }

    __aicore__ inline void Read(const LocalTensor<float> &dst, GM_ADDR source, int64_t at,
                                const View &view, uint32_t gap_bytes)
    {
        GlobalTensor<float> values;
        values.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(source));
        vectors_.Read(dst, values[at], view, gap_bytes);
    }

    // [N, D], of the heads of the tile, read again only when those change.
    __aicore__ inline void ReadGivenScales(const LoadSide &side, const LoadPlace &p)
    {
        int64_t wanted = p.side * t_.heads + p.first_head;
        if (wanted == given_) {
            return;
        }
        given_ = wanted;
        for (uint32_t head = 0; head < p.heads; ++head) {
            int64_t at = (p.first_head + head) * t_.dim;
            View line = Line(t_.dim);
            Read(scales_.scale[head * t_.stride], side.scale, at, line, 0);
            if (t_.symmetric == 0) {
                Read(scales_.zero_point[head * t_.stride], side.zero_point, at, line, 0);
            }
        }
    }

    __aicore__ inline void ApplyScales(const LocalTensor<float> &values, const LoadPlace &p)
    {
        View view{p.valid, static_cast<uint32_t>(t_.dim), static_cast<uint32_t>(t_.stride)};
        uint32_t padded = RoundUp(p.valid, FLOATS_PER_BLOCK) * FLOATS_PER_BLOCK;
        for (uint32_t head = 0; head < p.heads; ++head) {
            LocalTensor<float> rows = values[head * p.valid * t_.stride];
            if (t_.mode == LOAD_STATIC) {
                uint32_t at = head * t_.stride;
                ValuesByCol(rows, scales_.scale[at], scales_.zero_point[at], t_.symmetric != 0,
                            view);
            } else {
                uint32_t at = t_.mode == LOAD_TOKEN ? 0 : head * padded;
                ValuesByRow(rows, scales_.factor_by_row[at], scales_.zero_point_by_row[at],
                            t_.symmetric != 0, view);
            }
        }
    }

    const KvCacheLoadTiling &t_;
    const LoadTensors &tensors_;
    int64_t given_ = -1;
    FloatTiles<C, T> tiles_;
    ResultWriter<T> writer_;
    Scales scales_;
    VectorsIn vectors_;
    RotatedOffset offset_;
};

// Stored values of the result's type pass through UB untouched.
template <typename T>
class KvCacheLoadCopy {
public:
    __aicore__ inline KvCacheLoadCopy(TPipe &pipe, const LoadTensors &tensors,
                                      const KvCacheLoadTiling &tiling)
        : t_(tiling), tensors_(tensors)
    {
        uint32_t values = t_.tile_tokens * t_.tile_heads * t_.stride;
        pipe.InitBuffer(through_, BUFFERS, values * sizeof(T));
        writer_.Init(pipe, t_);
    }

    __aicore__ inline void Process()
    {
        for (LoadPlaces places(t_, tensors_); places.Valid();) {
            LoadPlace p = places.Take();
            writer_.SetResult(tensors_.sides[p.side].result);
            if (p.valid > 0) {
                GlobalTensor<T> cache;
                cache.SetGlobalBuffer(
                    reinterpret_cast<__gm__ T *>(tensors_.sides[p.side].cache));
                LocalTensor<T> tile = through_.template AllocTensor<T>();
                LoadPlaceRows(tile, cache, t_, p);
                through_.EnQue(tile);
                tile = through_.template DeQue<T>();
                writer_.WriteRows(tile, p);
                through_.FreeTensor(tile);
            }
            writer_.WriteZeros(p);
        }
    }

private:
    const KvCacheLoadTiling &t_;
    const LoadTensors &tensors_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through_;
    ResultWriter<T> writer_;
};

template <typename T>
__aicore__ inline void RunLoad(const LoadTensors &tensors, const KvCacheLoadTiling &tiling)
{
    TPipe pipe;
    if (tiling.mode == LOAD_COPY) {
        KvCacheLoadCopy<T>(pipe, tensors, tiling).Process();
    } else if (tiling.cache_element == INT8) {
        KvCacheLoad<int8_t, T>(pipe, tensors, tiling).Process();
    } else if (tiling.cache_element == HALF) {
        KvCacheLoad<half, T>(pipe, tensors, tiling).Process();
    } else if (tiling.cache_element == BFLOAT16) {
        KvCacheLoad<bfloat16_t, T>(pipe, tensors, tiling).Process();
    } else {
        KvCacheLoad<float, T>(pipe, tensors, tiling).Process();
    }
}

}  // namespace ascend_kv

// lengths: [B] int32. offset: [N, D] and rotary_table [P, D / 2, 2], float32. With given scales,
// scale and zero_point are [N, D]. What the tiling does not call for may be null.
extern "C" __global__ __aicore__ void kv_cache_load(
    GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables, GM_ADDR lengths,
    GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR key_zero_point, GM_ADDR value_zero_point,
    GM_ADDR key_offset, GM_ADDR rotary_table, GM_ADDR key_positions, GM_ADDR key, GM_ADDR value,
    KvCacheLoadTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    ascend_kv::LoadTensors tensors{{{key_cache, key_scale, key_zero_point, key},
                                    {value_cache, value_scale, value_zero_point, value}},
                                   block_tables,
                                   lengths,
                                   key_offset,
                                   rotary_table,
                                   key_positions};
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunLoad<half>(tensors, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunLoad<bfloat16_t>(tensors, tiling);
    } else {
        ascend_kv::RunLoad<float>(tensors, tiling);
    }
}
