// How a CPU operator is registered: it serves what it can, and hands the rest to the Python
// reference, which stands under the same name in the library ascend_kv_reference.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace ascend_kv::cpu {

// A string as a template argument.
template <size_t N>
struct Name {
  char text[N];
  constexpr Name(const char (&given)[N]) { std::copy(given, given + N, text); }
};

template <Name NAME, class Result, class... Arguments>
Result call_reference(Arguments... arguments) {
  static const auto reference = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow(NAME.text, "")
                                    .template typed<Result(Arguments...)>();
  return reference.call(std::forward<Arguments>(arguments)...);
}

template <Name NAME, auto FUNCTION, class Type = decltype(FUNCTION)>
struct Served;

template <Name NAME, auto FUNCTION, class Result, class... Arguments>
struct Served<NAME, FUNCTION, std::optional<Result> (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    if (auto result = FUNCTION(arguments...)) return *std::move(result);
    return call_reference<NAME, Result, Arguments...>(arguments...);
  }
};

template <Name NAME, auto FUNCTION, class... Arguments>
struct Served<NAME, FUNCTION, bool (*)(Arguments...)> {
  static void call(Arguments... arguments) {
    if (!FUNCTION(arguments...)) call_reference<NAME, void, Arguments...>(arguments...);
  }
};

}  // namespace ascend_kv::cpu
