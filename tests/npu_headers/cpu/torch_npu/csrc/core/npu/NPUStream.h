// Stands in for torch_npu's header of this name where kernels run on the twin.
#pragma once
#include <acl/acl_base.h>

namespace c10_npu {

struct NPUStream {
    // torch_npu waits for its queue where this is true, and the host functions must not.
    aclrtStream stream(bool need_empty) const
    {
        TORCH_CHECK(!need_empty, "a host function waits for the queue");
        return nullptr;
    }
};

inline NPUStream getCurrentNPUStream() { return {}; }

}  // namespace c10_npu
