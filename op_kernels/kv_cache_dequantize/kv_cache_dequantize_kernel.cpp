// kv_cache_dequantize: INT8 codes [B, N, T, D] and float32 scales -> half, bfloat16 or float:
// code * scale + zero point in float32, then one rounding.
#include "kernel_operator.h"

#include "../common/codes.h"
#include "../kv_cache_quantize/items.h"
#include "kv_cache_dequantize_tiling.h"

namespace ascend_kv {

template <typename T>
class KvCacheDequantize {
public:
    __aicore__ inline KvCacheDequantize(TPipe &pipe, const KvCacheDequantizeTiling &tiling,
                                        GM_ADDR codes, GM_ADDR scale, GM_ADDR zero_point,
                                        GM_ADDR values)
        : t_(tiling)
    {
        codes_.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t *>(codes));
        scale_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(scale));
        zero_point_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(zero_point));
        values_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(values));
        uint32_t groups = t_.mode == QUANTIZE_SPANS      ? 1
                          : t_.mode == QUANTIZE_CHANNELS ? t_.cols
                                                         : t_.tile_rows;
        uint32_t tile = t_.mode == QUANTIZE_SPANS    ? t_.tile_cols
                        : t_.mode == QUANTIZE_TOKENS ? t_.tile_rows * t_.tile_heads * t_.stride
                                                     : t_.tile_rows * t_.stride;
        tiles_.Init(pipe, tile);
        vectors_.Init(pipe, groups);
        scales_.Init(pipe, groups, t_.symmetric != 0, t_.mode != QUANTIZE_CHANNELS, true);
    }

    __aicore__ inline void Process()
    {
        if (t_.mode == QUANTIZE_ROWS) {
            Rows();
        } else if (t_.mode == QUANTIZE_SPANS) {
            Items<SpanItem>();
        } else if (t_.mode == QUANTIZE_TOKENS) {
            Tokens();
        } else {
            Items<ChannelItem>();
        }
    }

private:
    __aicore__ inline void Rows()
    {
        Range range = CoreRange(t_.groups, t_.cores, GetBlockIdx(), t_.granule);
        for (int64_t row = range.begin; row < range.end; row += t_.tile_rows) {
            View view = TileView(Smaller<int64_t>(t_.tile_rows, range.end - row));
            ReadScales(row, view.rows);
            scales_.FillRows(scales_.scale, view.rows);
            LoadRows(tiles_.Alloc(), codes_[row * t_.cols], view);
            ApplyRows(tiles_.Values(view), view);
            StoreRows(values_[row * t_.cols], tiles_.Result(view), view);
            tiles_.Free();
        }
    }

    // Spans and channels: the scales change with the group only.
    template <typename Item>
    __aicore__ inline void Items()
    {
        int64_t group = -1;
        Range range = ItemsOfCore<Item>(t_);
        for (int64_t number = range.begin; number < range.end; ++number) {
            Item item = Item::Of(t_, number);
            if (item.group != group) {
                group = item.group;
                ReadScales(group * Item::Scales(t_), Item::Scales(t_));
            }
            LoadRows(tiles_.Alloc(), codes_[item.at], item.view);
            LocalTensor<float> values = tiles_.Values(item.view);
            if constexpr (std::is_same_v<Item, SpanItem>) {
                scales_.FillRows(scales_.scale, 1);
                ApplyRows(values, item.view);
            } else {
                ValuesByCol(values, scales_.scale, scales_.zero_point, t_.symmetric != 0,
                            item.view);
            }
            StoreRows(values_[item.at], tiles_.Result(item.view), item.view);
            tiles_.Free();
        }
    }

    __aicore__ inline void Tokens()
    {
        Range range = CoreRange(t_.groups * t_.tokens, t_.cores, GetBlockIdx(), t_.granule);
        for (int64_t token = range.begin; token < range.end;) {
            int64_t of_batch = (token / t_.tokens + 1) * t_.tokens;
            int64_t end = Smaller(Smaller(range.end, of_batch), token + t_.tile_rows);
            View view = TileView(end - token);
            ReadScales(token, view.rows);
            scales_.FillRows(scales_.scale, view.rows);
            for (int64_t head = 0; head < t_.heads; head += t_.tile_heads) {
                Heads(token, head, view);
            }
            token = end;
        }
    }

    // `tile_heads` heads from `first` on of tokens `token` and on, numbered through all batches.
    __aicore__ inline void Heads(int64_t token, int64_t first, const View &view)
    {
        int64_t batch = token / t_.tokens;
        int64_t at = ((batch * t_.heads + first) * t_.tokens + token % t_.tokens) * t_.cols;
        int64_t distance = t_.tokens * t_.cols;
        uint32_t heads = Smaller<int64_t>(t_.tile_heads, t_.heads - first);
        uint32_t size = view.rows * view.stride;
        View all{heads * view.rows, view.cols, view.stride};
        LocalTensor<int8_t> codes = tiles_.Alloc();
        for (uint32_t head = 0; head < heads; ++head) {
            LoadRows(codes[head * size], codes_[at + head * distance], view);
        }
        LocalTensor<float> floats = tiles_.Values(all);
        for (uint32_t head = 0; head < heads; ++head) {
            ApplyRows(floats[head * size], view);
        }
        LocalTensor<T> result = tiles_.Result(all);
        for (uint32_t head = 0; head < heads; ++head) {
            StoreRows(values_[at + head * distance], result[head * size], view);
        }
        tiles_.Free();
    }

    __aicore__ inline void ApplyRows(const LocalTensor<float> &values, const View &view)
    {
        ValuesByRow(values, scales_.factor_by_row, scales_.zero_point_by_row, t_.symmetric != 0,
                    view);
    }

    __aicore__ inline View TileView(uint32_t rows) const
    {
        return {rows, static_cast<uint32_t>(t_.cols), static_cast<uint32_t>(t_.stride)};
    }

    __aicore__ inline void ReadScales(int64_t at, uint32_t count)
    {
        vectors_.Read(scales_.scale, scale_[at], count);
        if (t_.symmetric == 0) {
            vectors_.Read(scales_.zero_point, zero_point_[at], count);
        }
    }

    const KvCacheDequantizeTiling &t_;
    GlobalTensor<int8_t> codes_;
    GlobalTensor<float> scale_;
    GlobalTensor<float> zero_point_;
    GlobalTensor<T> values_;
    FloatTiles<int8_t, T> tiles_;
    VectorsIn vectors_;
    Scales scales_;
};

template <typename T>
__aicore__ inline void RunDequantize(GM_ADDR codes, GM_ADDR scale, GM_ADDR zero_point,
                                     GM_ADDR values, const KvCacheDequantizeTiling &tiling)
{
    TPipe pipe;
    KvCacheDequantize<T>(pipe, tiling, codes, scale, zero_point, values).Process();
}

}  // namespace ascend_kv

extern "C" __global__ __aicore__ void kv_cache_dequantize(
    GM_ADDR codes, GM_ADDR scale, GM_ADDR zero_point, GM_ADDR values,
    KvCacheQuantizeTiling tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    ascend_kv::KeepInfinityAndNan();
    if (tiling.element == ascend_kv::HALF) {
        ascend_kv::RunDequantize<half>(codes, scale, zero_point, values, tiling);
    } else if (tiling.element == ascend_kv::BFLOAT16) {
        ascend_kv::RunDequantize<bfloat16_t>(codes, scale, zero_point, values, tiling);
    } else {
        ascend_kv::RunDequantize<float>(codes, scale, zero_point, values, tiling);
    }
}
