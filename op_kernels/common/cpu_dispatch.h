// How a CPU operator is registered: it serves what it can, and hands the rest to the Python
// reference, which stands under the same name in the library ascend_kv_reference. That the reference
// served is told and counted there (ascend_kv/ops/registration.py).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "cpu_operators.h"

namespace ascend_kv::cpu {

// A string as a template argument.
template <size_t N>
struct Name {
  char text[N];
  constexpr Name(const char (&given)[N]) { std::copy(given, given + N, text); }
};

inline void tell_handed_over(const std::string& name, const char* reason) {
  const std::string told = reason ? reason : "arguments that it does not serve";
  torch::jit::Stack stack;
  torch::jit::push(stack, name.substr(name.rfind(':') + 1), std::string("cpu"), told);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("ascend_kv_reference::handed_over", "")
      .callBoxed(stack);
}

// An error of the reference, which then says what is wrong, is not told as a call that it served.
template <Name NAME, class Result, class... Arguments>
Result call_reference(Arguments... arguments) {
  static const auto reference = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow(NAME.text, "")
                                    .template typed<Result(Arguments...)>();
  const char* reason = not_served;  // the reference may call operators itself
  if constexpr (std::is_void_v<Result>) {
    reference.call(std::forward<Arguments>(arguments)...);
    tell_handed_over(NAME.text, reason);
  } else {
    Result result = reference.call(std::forward<Arguments>(arguments)...);
    tell_handed_over(NAME.text, reason);
    return result;
  }
}

template <Name NAME, auto FUNCTION, class Type = decltype(FUNCTION)>
struct Served;

template <Name NAME, auto FUNCTION, class Result, class... Arguments>
struct Served<NAME, FUNCTION, std::optional<Result> (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    not_served = nullptr;
    if (auto result = FUNCTION(arguments...)) return *std::move(result);
    return call_reference<NAME, Result, Arguments...>(arguments...);
  }
};

template <Name NAME, auto FUNCTION, class... Arguments>
struct Served<NAME, FUNCTION, bool (*)(Arguments...)> {
  static void call(Arguments... arguments) {
    not_served = nullptr;
    if (!FUNCTION(arguments...)) call_reference<NAME, void, Arguments...>(arguments...);
  }
};

}  // namespace ascend_kv::cpu
