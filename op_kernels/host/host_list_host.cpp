// See host_list.h.
#include "host_list.h"

#include "device.h"
#include "hosts.h"
#include "aclrtlaunch_host_list.h"

namespace ascend_kv {

at::Tensor ToDevice(at::IntArrayRef numbers, const at::Tensor &as)
{
    constexpr size_t capacity = sizeof(HostList::values) / sizeof(int32_t);
    at::Tensor result = at::empty({static_cast<int64_t>(numbers.size())}, as.options().dtype(at::kInt));
    int32_t *target = result.data_ptr<int32_t>();
    for (size_t first = 0; first < numbers.size(); first += capacity) {
        HostList list{};
        list.count = static_cast<int32_t>(Smaller(capacity, numbers.size() - first));
        for (int32_t i = 0; i < list.count; ++i) {
            list.values[i] = static_cast<int32_t>(numbers[first + i]);
        }
        Launch("host_list", aclrtlaunch_host_list, 1, static_cast<void *>(target + first), list);
    }
    return result;
}

}  // namespace ascend_kv
