// Put after a kernel's source (-include, or as the last lines of a file of its own): makes its
// kernels callable by name. TWIN_KERNELS lists them: -DTWIN_KERNELS="TWIN_KERNEL(kv_cache_store)
// TWIN_KERNEL(kv_cache_load)".
#include <cstring>
#include <tuple>
#include <utility>

#include "launch.h"

namespace twin {

template <typename A>
constexpr char Kind() {
    if (std::is_pointer_v<A>) return 'p';
    if (std::is_floating_point_v<A>) return 'f';
    return std::is_class_v<A> ? 's' : 'i';
}
template <typename A>
A Argument(uint64_t word) {
    if constexpr (std::is_pointer_v<A>) {
        return reinterpret_cast<A>(word);
    } else if constexpr (std::is_integral_v<A>) {
        return static_cast<A>(word);
    } else if constexpr (std::is_floating_point_v<A>) {
        static_assert(sizeof(A) == 4, "float arguments only");
        A value;
        std::memcpy(&value, &word, 4);
        return value;
    } else {
        return *reinterpret_cast<const A*>(word);
    }
}
template <auto function, typename... A, size_t... I>
void Call(void (*)(A...), const uint64_t* words, std::index_sequence<I...>) {
    function(Argument<A>(words[I])...);
}
template <typename... A>
const char* Kinds(void (*)(A...)) {
    static const char kinds[] = {Kind<A>()..., 0};
    return kinds;
}
template <typename... A>
constexpr size_t Number(void (*)(A...)) {
    return sizeof...(A);
}
template <auto function>
void CallWords(const uint64_t* words) {
    Call<function>(function, words, std::make_index_sequence<Number(function)>());
}
struct Entry {
    explicit Entry(const Kernel& kernel) { Register(kernel); }
};

}  // namespace twin

#define TWIN_KERNEL(name) \
    static twin::Entry twin_entry_##name({#name, twin::Kinds(name), twin::CallWords<name>});
#ifdef TWIN_SOURCE
#include TWIN_SOURCE
TWIN_KERNELS
#endif
