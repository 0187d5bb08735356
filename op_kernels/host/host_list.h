// Numbers that the host knows on their way to the device, in a struct that the launch carries.
#pragma once
#include "../common/limits.h"

namespace ascend_kv {

struct HostList {
    int32_t count;
    int32_t values[127];
};

}  // namespace ascend_kv

using ascend_kv::HostList;  // see common/limits.h
