// The way to the reference, for the cases that no kernel serves.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace ascend_kv {

template <typename... Arguments>
torch::jit::Stack CallByName(const std::string &name, const Arguments &...arguments)
{
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(stack);
    return stack;
}

// The results of the operator's reference (ascend_kv/ops/registration.py). The user is told `reason`
// once, the report how often.
template <typename... Arguments>
torch::jit::Stack CallReference(const std::string &name, const char *reason,
                                const Arguments &...arguments)
{
    CallByName("ascend_kv_reference::handed_over", name, std::string("npu"), std::string(reason));
    return CallByName("ascend_kv_reference::" + name, arguments...);
}

}  // namespace ascend_kv
