// Integers from global memory, for scalar code to read: slots, block tables, positions.
#pragma once
#include "copies.h"

namespace ascend_kv {

class IndexTile {
public:
    // `wide`: int64, else int32.
    __aicore__ inline void Init(TPipe &pipe, GM_ADDR indices, uint32_t capacity, bool wide)
    {
        wide_ = wide;
        indices32_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(indices));
        indices64_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t *>(indices));
        pipe.InitBuffer(buffer_, RoundUp<uint32_t>(capacity, 8) * sizeof(int64_t));
        loaded_ = pipe.FetchEventID(HardEvent::MTE2_S);
        read_ = pipe.FetchEventID(HardEvent::S_MTE2);
    }

    __aicore__ inline void Load(int64_t first, uint32_t count)
    {
        count_ = count;
        SetFlag<HardEvent::S_MTE2>(read_);
        WaitFlag<HardEvent::S_MTE2>(read_);
        if (wide_) {
            LoadRows(buffer_.Get<int64_t>(), indices64_[first], Line(count));
        } else {
            LoadRows(buffer_.Get<int32_t>(), indices32_[first], Line(count));
        }
        SetFlag<HardEvent::MTE2_S>(loaded_);
    }

    // Once after each Load, before the values are looked at.
    __aicore__ inline void Wait() { WaitFlag<HardEvent::MTE2_S>(loaded_); }

    __aicore__ inline uint32_t Count() const { return count_; }

    __aicore__ inline int64_t Value(uint32_t index)
    {
        return wide_ ? buffer_.Get<int64_t>().GetValue(index)
                     : buffer_.Get<int32_t>().GetValue(index);
    }

private:
    bool wide_;
    uint32_t count_;
    GlobalTensor<int32_t> indices32_;
    GlobalTensor<int64_t> indices64_;
    TBuf<TPosition::VECIN> buffer_;
    TEventID loaded_;
    TEventID read_;
};

}  // namespace ascend_kv
