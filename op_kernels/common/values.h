// Tiles of half, bfloat16 or float that arrive from global memory, two in flight, as float values.
#pragma once
#include <type_traits>

#include "copies.h"
#include "elementwise.h"

namespace ascend_kv {

// One tile moves while the other is computed on. Each buffer of a queue holds one of the 8 events
// between two pipes; what moves little has one buffer, so that a kernel stays well below.
constexpr uint8_t BUFFERS = 2;
constexpr uint8_t ONE_BUFFER = 1;

// Use: Alloc, LoadRows, Loaded; Values; Release when they are needed no more.
template <typename T>
class ValueTiles {
public:
    __aicore__ inline void Init(TPipe &pipe, uint32_t values)
    {
        pipe.InitBuffer(queue_, BUFFERS, values * sizeof(T));
        if constexpr (!IS_FLOAT) {
            pipe.InitBuffer(buffer_, values * sizeof(float));
        }
    }

    __aicore__ inline LocalTensor<T> Alloc() { return queue_.template AllocTensor<T>(); }

    __aicore__ inline void Loaded(const LocalTensor<T> &tile) { queue_.EnQue(tile); }

    // The oldest loaded tile as float; only elements of `view` are defined.
    __aicore__ inline LocalTensor<float> Values(const View &view)
    {
        tile_ = queue_.template DeQue<T>();
        if constexpr (IS_FLOAT) {
            values_ = tile_;
        } else {
            values_ = buffer_.template Get<float>();
            ToFloat32(values_, tile_, view);
            VectorDone();
            queue_.FreeTensor(tile_);
        }
        return values_;
    }

    // The memory of the values, to be written over.
    __aicore__ inline LocalTensor<half> Halves() const
    {
        return values_.template ReinterpretCast<half>();
    }

    __aicore__ inline void Release()
    {
        if constexpr (IS_FLOAT) {
            queue_.FreeTensor(tile_);
        }
    }

private:
    static constexpr bool IS_FLOAT = std::is_same_v<T, float>;
    TQue<TPosition::VECIN, 1> queue_;
    TBuf<TPosition::VECCALC> buffer_;
    LocalTensor<T> tile_;
    LocalTensor<float> values_;
};

// Short vectors of floats from global memory: scales and zero points.
class VectorsIn {
public:
    __aicore__ inline void Init(TPipe &pipe, uint32_t capacity, uint8_t buffers = BUFFERS)
    {
        pipe.InitBuffer(queue_, buffers, RoundUp(capacity, FLOATS_PER_BLOCK) * sizeof(float));
    }

    __aicore__ inline void Read(const LocalTensor<float> &dst, const GlobalTensor<float> &src,
                                uint32_t count)
    {
        Read(dst, src, Line(count), 0);
    }

    // Rows that lie `gap_bytes` apart.
    __aicore__ inline void Read(const LocalTensor<float> &dst, const GlobalTensor<float> &src,
                                const View &view, uint32_t gap_bytes)
    {
        LocalTensor<float> moving = queue_.AllocTensor<float>();
        LoadRows(moving, src, view, gap_bytes);
        queue_.EnQue(moving);
        moving = queue_.DeQue<float>();
        CopyTile(dst, moving, view);
        VectorDone();
        queue_.FreeTensor(moving);
    }

private:
    TQue<TPosition::VECIN, 1> queue_;
};

// The same, to global memory.
class VectorsOut {
public:
    __aicore__ inline void Init(TPipe &pipe, uint32_t capacity)
    {
        pipe.InitBuffer(queue_, BUFFERS, RoundUp(capacity, FLOATS_PER_BLOCK) * sizeof(float));
    }

    __aicore__ inline void Write(const GlobalTensor<float> &dst, const LocalTensor<float> &src,
                                 uint32_t count)
    {
        LocalTensor<float> moving = queue_.AllocTensor<float>();
        CopyTile(moving, src, Line(count));
        queue_.EnQue(moving);
        moving = queue_.DeQue<float>();
        StoreRows(dst, moving, Line(count));
        queue_.FreeTensor(moving);
    }

private:
    TQue<TPosition::VECOUT, 1> queue_;
};

}  // namespace ascend_kv
