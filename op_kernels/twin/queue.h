// TPipe, TQue and TBuf: who owns which part of the unified buffer, and the events that hand it on.
#pragma once
#include "tensor.h"

namespace AscendC {

// The event that EnQue sets (forward) and the one that FreeTensor sets, for a queue from src to
// dst.
constexpr int TwinQueueEvent(TPosition src, TPosition dst, bool forward) {
    if (src == TPosition::GM) {
        return static_cast<int>(forward ? HardEvent::MTE2_V : HardEvent::V_MTE2);
    }
    if (dst == TPosition::GM) {
        return static_cast<int>(forward ? HardEvent::V_MTE3 : HardEvent::MTE3_V);
    }
    return static_cast<int>(forward ? HardEvent::MTE2_MTE3 : HardEvent::MTE3_MTE2);
}

constexpr twin::Place TwinPlace(TPosition position) {
    return position == TPosition::VECIN    ? twin::Place::kIn
           : position == TPosition::VECOUT ? twin::Place::kOut
                                           : twin::Place::kCalc;
}

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
    static_assert(depth > 0, "the twin offers queues of depth 1 and more");

  public:
    static constexpr bool isTQue = true;
    static constexpr int twinEnque = TwinQueueEvent(src, dst, true);
    static constexpr int twinFree = TwinQueueEvent(src, dst, false);
    static constexpr twin::Place twinPlace = TwinPlace(src == TPosition::GM ? dst : src);

    template <typename T>
    LocalTensor<T> AllocTensor(TWIN_AT) {
        return Tensor<T>(twin::AllocBuffer(twin_, twinFree, at));
    }
    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor, TWIN_AT) {
        twin::FreeBuffer(twin_, tensor.TwinView(), twinFree, at);
    }
    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor, TWIN_AT) {
        twin::EnqueBuffer(twin_, tensor.TwinView(), twinEnque, depth, at);
        return true;
    }
    template <typename T>
    LocalTensor<T> DeQue(TWIN_AT) {
        return Tensor<T>(twin::DequeBuffer(twin_, twinEnque, at));
    }
    bool VacantInQue() { return twin_.used < depth; }
    bool HasTensorInQue() { return twin_.used > 0; }
    int32_t GetTensorCountInQue() { return twin_.used; }

    twin::QueueState twin_;

  private:
    template <typename T>
    LocalTensor<T> Tensor(int index) {
        twin::View view = twin::BufferView(index);
        return LocalTensor<T>(view, (view.high - view.low) / sizeof(T));
    }
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue
    : public TQueBind<pos == TPosition::VECIN ? TPosition::GM : pos,
                      pos == TPosition::VECIN ? TPosition::VECIN : TPosition::GM, depth, mask> {
    static_assert(pos == TPosition::VECIN || pos == TPosition::VECOUT,
                  "a queue is VECIN or VECOUT");
};

template <TPosition pos = TPosition::VECCALC>
class TBuf {
    static_assert(pos == TPosition::VECIN || pos == TPosition::VECOUT || pos == TPosition::VECCALC,
                  "TBuf lies in the unified buffer");

  public:
    static constexpr bool isTQue = false;
    template <typename T>
    LocalTensor<T> Get(TWIN_AT) {
        return Get<T>((Whole(at).high - Whole(at).low) / sizeof(T), at);
    }
    template <typename T>
    LocalTensor<T> Get(uint32_t length, TWIN_AT) {
        return GetWithOffset<T>(length, 0, at);
    }
    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t length, uint32_t offset_bytes, TWIN_AT) {
        twin::View view = Whole(at);
        view.address += offset_bytes;
        if (view.address + uint64_t{length} * sizeof(T) > view.high) {
            twin::Violate("ub-bounds", at,
                          "TBuf of %u bytes gives no %u elements of %zu bytes at offset %u",
                          view.high - view.low, length, sizeof(T), offset_bytes);
        }
        if (length * sizeof(T) % 32) {
            twin::Violate("ub-alignment", at,
                          "TBuf::Get of %u elements of %zu bytes: must be whole blocks of 32 bytes",
                          length, sizeof(T));
        }
        return LocalTensor<T>(view, length);
    }
    int twinIndex = -1;

  private:
    twin::View Whole(twin::At at) {
        if (twinIndex < 0) {
            twin::Violate("uninitialised", at, "TBuf::Get before TPipe::InitBuffer");
        }
        return twin::BufferView(twinIndex);
    }
};

class TPipe {
  public:
    TPipe(TWIN_AT) {
        twin::ResetPipe(at);
        twin::PipePointer() = this;
    }
    ~TPipe() { Destroy(); }
    TPipe(const TPipe&) = delete;
    template <class Q>
    bool InitBuffer(Q& queue, uint8_t number, uint32_t bytes, TWIN_AT) {
        static_assert(Q::isTQue, "InitBuffer(queue, number, bytes) is for queues");
        queue.twin_ = twin::QueueState();
        queue.twin_.first = twin::NewBuffers(at, number, bytes, Q::twinPlace, Q::twinFree);
        queue.twin_.number = number;
        return true;
    }
    template <TPosition pos>
    bool InitBuffer(TBuf<pos>& buffer, uint32_t bytes, TWIN_AT) {
        buffer.twinIndex = twin::NewBuffers(at, 1, bytes, TwinPlace(pos), -1);
        return true;
    }
    template <HardEvent event>
    TEventID AllocEventID(TWIN_AT) {
        return static_cast<TEventID>(twin::AllocEvent(static_cast<int>(event), at));
    }
    template <HardEvent event>
    void ReleaseEventID(TEventID id, TWIN_AT) {
        twin::ReleaseEvent(static_cast<int>(event), id, at);
    }
    template <HardEvent event>
    TEventID FetchEventID(TWIN_AT) {
        return FetchEventID(event, at);
    }
    TEventID FetchEventID(HardEvent event, TWIN_AT) {
        return static_cast<TEventID>(twin::FetchEvent(static_cast<int>(event), at));
    }
    void Reset(TWIN_AT) { twin::ResetPipe(at); }
    void Destroy(TWIN_AT) {
        if (open_) {
            open_ = false;
            twin::ClosePipe(at);
        }
    }

  private:
    bool open_ = true;
};

}  // namespace AscendC

inline AscendC::TPipe* GetTPipePtr() { return static_cast<AscendC::TPipe*>(twin::PipePointer()); }
