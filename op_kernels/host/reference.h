// The way to the reference, for the cases that no kernel serves.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace ascend_kv {

// Runs the operator's reference (ascend_kv/ops/registration.py), which tells the user `reason` once
// and the report how often; returns its results.
template <typename... Arguments>
torch::jit::Stack CallReference(const std::string &name, const char *reason,
                                const Arguments &...arguments)
{
    std::string full_name = "ascend_kv_reference::" + name;
    auto reference = c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "");
    torch::jit::Stack stack;
    torch::jit::push(stack, std::string(reason), arguments...);
    reference.callBoxed(stack);
    return stack;
}

}  // namespace ascend_kv
