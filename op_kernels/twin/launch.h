// The C interface of a kernel library: what launch.py, the self-test and plain C++ programs call.
#pragma once
#include <cstdint>

extern "C" {
struct TwinBuffer {  // one region of global memory that the kernel may touch
    void* base;
    uint64_t bytes;
    uint32_t writable;
};
// Runs `kernel` on `blocks` cores. Every argument is one 64-bit word: an address, an integer, the
// bits of a float (its low 32), or for a struct the address of one. Returns JSON, valid until the
// next call.
const char* twin_launch(const char* kernel, int blocks, const TwinBuffer* buffers,
                        int buffer_number, const uint64_t* words, int word_number, uint64_t seed,
                        int auto_sync);
const char* twin_kernels();  // JSON: names and the kinds of their arguments
}

namespace twin {
struct Kernel {
    const char* name;
    const char* kinds;  // one letter an argument: p address, i integer, f float, s struct
    void (*call)(const uint64_t* words);
};
void Register(const Kernel& kernel);
}  // namespace twin
