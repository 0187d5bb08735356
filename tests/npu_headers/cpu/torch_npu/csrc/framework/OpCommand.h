// Stands in for torch_npu's header of this name where kernels run on the twin.
#pragma once
#include <functional>
#include <string>

namespace at_npu::native {

struct OpCommand {
    static void RunOpApi(const std::string &name, std::function<int()> launch)
    {
        TORCH_CHECK(launch() == 0, name, " failed");
    }
};

}  // namespace at_npu::native
