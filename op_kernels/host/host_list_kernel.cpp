// host_list: numbers that the host knows (lengths, places of sequences) -> global memory.
//
// A copy from the host's memory would have to wait until it is done, or keep that memory for as
// long as a captured graph may repeat the copy. The launch carries the numbers instead.
#include "kernel_operator.h"

#include "../common/copies.h"
#include "host_list.h"

namespace ascend_kv {

__aicore__ inline void WriteList(TPipe &pipe, GM_ADDR target, const HostList &list)
{
    TBuf<TPosition::VECOUT> buffer;
    GlobalTensor<int32_t> numbers;
    pipe.InitBuffer(buffer, sizeof(list));
    numbers.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(target));
    LocalTensor<int32_t> tile = buffer.Get<int32_t>();
    for (int32_t i = 0; i < list.count; ++i) {
        tile.SetValue(i, list.values[i]);
    }
    TEventID written = pipe.FetchEventID(HardEvent::S_MTE3);
    SetFlag<HardEvent::S_MTE3>(written);
    WaitFlag<HardEvent::S_MTE3>(written);
    StoreRows(numbers, tile, Line(list.count));
}

}  // namespace ascend_kv

extern "C" __global__ __aicore__ void host_list(GM_ADDR target, HostList list)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    ascend_kv::WriteList(pipe, target, list);
}
