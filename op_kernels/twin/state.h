// What the runtime keeps of a launch: cores, their unified buffer with its shadow, events, queues,
// global memory. Included by the runtime's own files only; kernels see machine.h.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace twin {

constexpr int kEvents = 13;                         // AscendC::HardEvent::MAX
constexpr int kStoV = 7, kVtoS = 8, kStoMte3 = 11;  // some of them
struct EventPipes {
    Pipe source, target;
};
extern const EventPipes kEventPipes[kEvents];
extern const char* const kEventNames[kEvents];
extern const char* const kPipeNames[kPipes];

// known[q]: instructions of pipe q up to this one are complete.
struct Clock {
    uint32_t known[kPipes] = {0, 0, 0, 0};
    void Merge(const Clock& other) {
        for (int q = 0; q < kPipes; ++q) {
            if (other.known[q] > known[q]) known[q] = other.known[q];
        }
    }
};

struct Site {
    At at;
    const char* op;
};

struct UbCell {  // shadow of a byte, or of 32 bytes that share it
    uint32_t write_clock = 0;
    uint32_t read_clock[kPipes] = {0, 0, 0, 0};
    uint8_t write_pipe = 0;
    enum : uint8_t { kNever, kWritten, kUndefined } state = kNever;
};
struct UbBlock {
    UbCell all;
    std::unique_ptr<UbCell[]> bytes;  // set when the 32 bytes differ
};

struct Counters {
    uint64_t read_bytes = 0, read_sectors = 0, read_bursts = 0;
    uint64_t write_bytes = 0, write_sectors = 0, write_bursts = 0;
    uint64_t scalar_read_bytes = 0, scalar_write_bytes = 0, cache_lines = 0;
    uint64_t instructions[kPipes] = {0, 0, 0, 0};
    uint64_t vector_repeats = 0, barriers = 0, events = 0;
    uint32_t ub_high_water = 0;
};

struct Buffer {  // of a queue, or a whole TBuf
    uint32_t address, bytes;
    enum State : uint8_t { kFree, kOccupied, kEnqued, kDequed } state = kFree;
    Place place;
    bool queue;
    int free_event = -1;
    int free_id = -1, enque_id = -1;  // event ids held
    uint32_t generation = 0;
    At last;
};

struct CacheLine {                  // 64 bytes of global memory in a core's data cache
    uint64_t valid = 0, dirty = 0;  // a bit each byte
    uint32_t loaded = 0;            // launch tick
    uint32_t site = 0;              // of the last store
};

struct Core {
    int index = 0;
    std::vector<uint8_t> ub = std::vector<uint8_t>(kUbBytes, 0xA5);
    std::vector<UbBlock> shadow = std::vector<UbBlock>(kUbBytes / kBlock);
    uint32_t clock[kPipes] = {0, 0, 0, 0};
    Clock pipe[kPipes];
    std::vector<uint32_t> sites[kPipes];  // of each instruction
    bool flag[kEvents][kEventIds] = {};
    Clock flag_clock[kEvents][kEventIds];
    At flag_at[kEvents][kEventIds];
    uint8_t event_taken[kEvents] = {};
    std::vector<Buffer> buffers;
    int first_buffer = 0;  // of the TPipe now in use
    uint32_t ub_used = 0, ub_reserved = 0;
    void* tpipe = nullptr;
    int kernel_type = 0;
    Registers registers;
    Counters counters;
    std::unordered_map<uint64_t, CacheLine> cache;  // by address / 64
};

struct GlobalBuffer {
    uint8_t* base;
    uint64_t bytes;
    bool writable;
};

struct GmCell {  // shadow of a byte of global memory, or of 32 that share it
    uint32_t write_epoch = 0, write_clock = 0, write_tick = 0, write_site = 0;
    uint32_t read_epoch = 0, read_clock = 0, read_site = 0;
    uint16_t writer = 0, reader = 0;  // core + 1; reader 0xffff: several
    uint8_t write_pipe = 0, atomic = 0;
};
struct GmBlock {
    GmCell all;
    std::unique_ptr<GmCell[]> bytes;
};

struct Launch {
    std::vector<GlobalBuffer> buffers;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<int> order;
    std::vector<Site> sites;
    std::unordered_map<uint64_t, uint32_t> site_of;
    int blocks = 0;
    bool auto_sync = false;  // the compiler inserts barriers within the vector pipe
    Unspecified choice{};
    uint32_t epoch = 1;  // grows with every SyncAll
    uint32_t tick = 1;   // grows with every instruction that touches global memory
    std::unordered_map<uint64_t, std::unique_ptr<GmBlock[]>> pages;  // by address / 4096
    std::unordered_map<uint64_t, uint16_t>
        dirty;              // core + 1 that holds unsaved bytes, by address / 64
    std::string violation;  // JSON object, empty when none
};
extern Launch* g_launch;
extern Core* g_core;

std::string Quote(const std::string& text);
std::string SiteText(uint32_t site);
GmCell* FindCell(uint64_t address);  // null when never touched
void CacheRead(const Instruction& now, uint64_t address, uint64_t bytes);
void CacheWrite(const Instruction& now, uint64_t address, uint64_t bytes);
void CheckAgainstCaches(const Instruction& now, uint64_t address, uint64_t bytes, bool write);
void CheckCacheEnd();
void CheckCoreEnd(At at);
// Leaves the running core for good (after a violation) or until all cores came to the same point.
[[noreturn]] void AbandonCore();
void YieldAtSync(At at);

}  // namespace twin
