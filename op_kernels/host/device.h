// The NPU as host functions see it: its limits, addresses, and launches on the current stream.
//
// Nothing here waits for the device, and a launch carries what it needs by value, so that host
// functions work while a graph is captured.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <type_traits>

#include "../common/limits.h"
#include "tiling/platform/platform_ascendc.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace ascend_kv {

inline const DeviceLimits &Limits()
{
    static const DeviceLimits limits = [] {
        auto *platform = platform_ascendc::PlatformAscendCManager::GetInstance();
        TORCH_CHECK(platform != nullptr, "CANN does not tell this NPU's cores and buffer sizes");
        uint64_t ub_bytes = 0;
        platform->GetCoreMemSize(platform_ascendc::CoreMemType::UB, ub_bytes);
        return DeviceLimits{static_cast<int64_t>(platform->GetCoreNumAiv()),
                            static_cast<int64_t>(ub_bytes)};
    }();
    return limits;
}

// Null for a tensor that is not there.
inline void *Address(const at::Tensor &tensor)
{
    return tensor.defined() ? tensor.data_ptr() : nullptr;
}

inline void *Address(const std::optional<at::Tensor> &tensor)
{
    return tensor.has_value() ? Address(*tensor) : nullptr;
}

// As the generated functions take it: a struct by its address.
template <typename Parameter, typename Argument>
Parameter AsParameter(Argument &argument)
{
    if constexpr (std::is_same_v<Parameter, Argument>) {
        return argument;
    } else {
        static_assert(std::is_same_v<Parameter, Argument *>, "not the kernel's argument");
        return &argument;
    }
}

// Launches a kernel by its generated function on the current stream. `arguments`: addresses, and a
// struct by value at the end. torch_npu may launch later, from a thread of its own: in the order of
// the calls, and memory freed meanwhile goes to later calls only.
template <typename... Parameters, typename... Arguments>
void Launch(const char *name, uint32_t (*kernel)(uint32_t, aclrtStream, Parameters...),
            int64_t cores, Arguments... arguments)
{
    static_assert(sizeof...(Parameters) == sizeof...(Arguments), "not the kernel's arguments");
    TORCH_INTERNAL_ASSERT(cores > 0, name, ": no cores");
    aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
    auto launch = [=]() mutable -> int {
        return static_cast<int>(kernel(static_cast<uint32_t>(cores), stream,
                                       AsParameter<Parameters, Arguments>(arguments)...));
    };
    at_npu::native::OpCommand::RunOpApi(name, launch);
}

// Float32 scratch on the device of `as`.
inline at::Tensor Workspace(int64_t bytes, const at::Tensor &as)
{
    return at::empty({bytes / 4}, as.options().dtype(at::kFloat));
}

}  // namespace ascend_kv
