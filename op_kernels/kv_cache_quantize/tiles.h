// What all modes of kv_cache_quantize share: where the tensors are, the buffers, scales in and out.
#pragma once
#include "../common/int8.h"
#include "../common/values.h"
#include "kv_cache_quantize_tiling.h"

namespace ascend_kv {

struct QuantizeTensors {
    GM_ADDR x;
    GM_ADDR codes;
    GM_ADDR scale;
    GM_ADDR zero_point;
};

template <typename T>
class QuantizeTiles {
public:
    __aicore__ inline QuantizeTiles(const KvCacheQuantizeTiling &tiling) : t_(tiling) {}

    // Buffers for tiles of `values` elements with `groups` scales.
    __aicore__ inline void Init(TPipe &pipe, const QuantizeTensors &tensors, uint32_t values,
                                uint32_t groups)
    {
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(tensors.x));
        codes_.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t *>(tensors.codes));
        scale_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.scale));
        zero_point_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(tensors.zero_point));
        tiles_.Init(pipe, values);
        vectors_in_.Init(pipe, groups);
        vectors_out_.Init(pipe, groups);
        pipe.InitBuffer(out_, BUFFERS, values);
        pipe.InitBuffer(scratch_, values * sizeof(float));
        scales_.Init(pipe, groups, t_.symmetric != 0, t_.mode != QUANTIZE_CHANNELS, false);
    }

protected:
    __aicore__ inline View Rows(uint32_t rows) const
    {
        return {rows, static_cast<uint32_t>(t_.cols), static_cast<uint32_t>(t_.stride)};
    }

    __aicore__ inline LocalTensor<float> Scratch() { return scratch_.Get<float>(); }

    // `view` of x at `at` -> float values, until StoreCodes, RoundSteps or tiles_.Release.
    __aicore__ inline LocalTensor<float> LoadValues(int64_t at, const View &view)
    {
        LocalTensor<T> tile = tiles_.Alloc();
        LoadRows(tile, x_[at], view);
        tiles_.Loaded(tile);
        return tiles_.Values(view);
    }

    // The steps in scratch -> codes, to be copied out and freed.
    __aicore__ inline LocalTensor<int8_t> RoundSteps(const View &view)
    {
        LocalTensor<int8_t> codes = out_.AllocTensor<int8_t>();
        RoundToCodes(codes, Scratch(), tiles_.Halves(), t_.symmetric != 0, view);
        tiles_.Release();
        out_.EnQue(codes);
        return out_.DeQue<int8_t>();
    }

    __aicore__ inline void StoreCodes(int64_t at, const View &view)
    {
        LocalTensor<int8_t> codes = RoundSteps(view);
        StoreRows(codes_[at], codes, view);
        out_.FreeTensor(codes);
    }

    // Scales of groups `at` and on.
    __aicore__ inline void ReadScales(int64_t at, uint32_t count)
    {
        vectors_in_.Read(scales_.scale, scale_[at], count);
        if (t_.symmetric == 0) {
            vectors_in_.Read(scales_.zero_point, zero_point_[at], count);
        }
    }

    __aicore__ inline void WriteScales(int64_t at, uint32_t count)
    {
        vectors_out_.Write(scale_[at], scales_.scale, count);
        if (t_.symmetric == 0) {
            vectors_out_.Write(zero_point_[at], scales_.zero_point, count);
        }
    }

    const KvCacheQuantizeTiling &t_;
    GlobalTensor<T> x_;
    GlobalTensor<int8_t> codes_;
    GlobalTensor<float> scale_;
    GlobalTensor<float> zero_point_;
    ValueTiles<T> tiles_;
    VectorsIn vectors_in_;
    VectorsOut vectors_out_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> scratch_;
    Scales scales_;
};

}  // namespace ascend_kv
