// Tiles of a stored type C (INT8 codes, half, bfloat16, float) that arrive from global memory, are
// computed on as float and leave as half, bfloat16 or float; two in flight each way.
#pragma once
#include "int8.h"
#include "values.h"

namespace ascend_kv {

// Use: load into Alloc; compute on Values; copy Result out; Free.
template <typename C, typename T>
class FloatTiles {
public:
    __aicore__ inline void Init(TPipe &pipe, uint32_t values)
    {
        pipe.InitBuffer(in_, BUFFERS, values * sizeof(C));
        pipe.InitBuffer(out_, BUFFERS, values * sizeof(T));
        if constexpr (IS_INT8) {
            pipe.InitBuffer(halves_, values * sizeof(half));
        }
        if constexpr (!TO_FLOAT) {
            pipe.InitBuffer(values_, values * sizeof(float));
        }
    }

    __aicore__ inline LocalTensor<C> Alloc()
    {
        stored_ = in_.template AllocTensor<C>();
        return stored_;
    }

    // What was loaded as float; only elements of `view` are defined.
    __aicore__ inline LocalTensor<float> Values(const View &view)
    {
        in_.EnQue(stored_);
        stored_ = in_.template DeQue<C>();
        result_ = out_.template AllocTensor<T>();
        LocalTensor<float> values = Floats();
        if constexpr (IS_INT8) {
            CodesToFloat(values, halves_.Get<half>(), stored_, view);
        } else if constexpr (std::is_same_v<C, float>) {
            CopyTile(values, stored_, view);
        } else {
            ToFloat32(values, stored_, view);
        }
        VectorDone();
        in_.FreeTensor(stored_);
        return values;
    }

    __aicore__ inline LocalTensor<T> Result(const View &view)
    {
        if constexpr (!TO_FLOAT) {
            FromFloat32(result_, Floats(), view);
            VectorDone();  // the next tile writes the floats
        }
        out_.EnQue(result_);
        result_ = out_.template DeQue<T>();
        return result_;
    }

    __aicore__ inline void Free() { out_.FreeTensor(result_); }

private:
    static constexpr bool IS_INT8 = std::is_same_v<C, int8_t>;
    static constexpr bool TO_FLOAT = std::is_same_v<T, float>;

    __aicore__ inline LocalTensor<float> Floats()
    {
        if constexpr (TO_FLOAT) {
            return result_;
        } else {
            return values_.Get<float>();
        }
    }

    TQue<TPosition::VECIN, 1> in_;
    TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> halves_;
    TBuf<TPosition::VECCALC> values_;
    LocalTensor<C> stored_;
    LocalTensor<T> result_;
};

}  // namespace ascend_kv
