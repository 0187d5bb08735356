// Where the generated launch functions end when there is no NPU: kernels run on the twin, on the
// memory of CPU tensors. Every allocation is known, so that a kernel that leaves it is caught, and
// filled with 0xFF (NaN, -1), so that what nobody wrote is seen.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "launch.h"

namespace on_twin {

struct Allocations {
    std::mutex mutex;
    std::map<uintptr_t, size_t> bytes;  // by address
};

inline Allocations &Known()
{
    static auto *known = new Allocations;
    return *known;
}

class KnownMemory : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t bytes) override
    {
        auto *inner = new c10::DataPtr(c10::GetDefaultCPUAllocator()->allocate(bytes));
        void *memory = inner->get();
        if (bytes > 0) {
            std::memset(memory, 0xFF, bytes);
            std::lock_guard<std::mutex> lock(Known().mutex);
            Known().bytes[reinterpret_cast<uintptr_t>(memory)] = bytes;
        }
        return {memory, inner, &Free, c10::Device(c10::kCPU)};
    }
    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        std::memcpy(to, from, bytes);
    }

private:
    static void Free(void *context)
    {
        if (TheGraph().capturing) {
            return;  // a graph keeps its memory for its replays
        }
        auto *inner = static_cast<c10::DataPtr *>(context);
        {
            std::lock_guard<std::mutex> lock(Known().mutex);
            Known().bytes.erase(reinterpret_cast<uintptr_t>(inner->get()));
        }
        delete inner;
    }
};

// `words`: the arguments, the first `addresses` of them addresses.
inline uint32_t Run(const char *library, const char *kernel, uint32_t blocks,
                    std::vector<uint64_t> words, size_t addresses)
{
    std::map<uintptr_t, size_t> touched;
    for (size_t i = 0; i < addresses; ++i) {
        if (words[i] != 0) {
            std::lock_guard<std::mutex> lock(Known().mutex);
            auto found = Known().bytes.upper_bound(words[i]);
            TORCH_CHECK(found != Known().bytes.begin(), kernel, ": argument ", i, " is no memory");
            --found;
            TORCH_CHECK(words[i] < found->first + found->second, kernel, ": argument ", i,
                        " is no memory");
            touched.insert(*found);
        }
    }
    std::vector<TwinBuffer> buffers;
    for (auto [base, bytes] : touched) {
        buffers.push_back({reinterpret_cast<void *>(base), bytes, 1});
    }
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(handle != nullptr, dlerror());
    auto launch = reinterpret_cast<decltype(&twin_launch)>(dlsym(handle, "twin_launch"));
    std::string result = launch(kernel, blocks, buffers.data(), buffers.size(), words.data(),
                                words.size(), 7, 0);
    TORCH_CHECK(result.find("\"violation\":null") != std::string::npos ||
                    result.find("\"violation\": null") != std::string::npos,
                kernel, ": ", result.substr(0, 2000));
    return 0;
}

struct UseKnownMemory {
    UseKnownMemory()
    {
        static KnownMemory memory;
        c10::SetCPUAllocator(&memory, 1);
    }
};
inline UseKnownMemory use_known_memory;

}  // namespace on_twin

extern "C" inline __attribute__((used)) void twin_graph_begin()
{
    on_twin::TheGraph() = {true, {}};
}

extern "C" inline __attribute__((used)) void twin_graph_end()
{
    on_twin::TheGraph().capturing = false;
}

// How many launches there were.
extern "C" inline __attribute__((used)) int twin_graph_replay()
{
    for (const auto &launch : on_twin::TheGraph().launches) {
        TORCH_CHECK(launch() == 0, "a replayed launch failed");
    }
    return static_cast<int>(on_twin::TheGraph().launches.size());
}
