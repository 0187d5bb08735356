// Runs a kernel: one core after another in an order drawn from a seed, each on its own stack, so
// that SyncAll can wait for the others; then writes counters or the violation as JSON.
#include "launch.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "state.h"

namespace twin {

constexpr size_t kStackBytes = 512 * 1024;
enum Status { kReady, kRunning, kAtSync, kDone };
struct Fiber {
    ucontext_t context;
    void* stack = nullptr;
    Status status = kReady;
    At sync{};
};

static std::vector<Kernel>& Kernels() {
    static std::vector<Kernel> kernels;
    return kernels;
}
void Register(const Kernel& kernel) { Kernels().push_back(kernel); }

static ucontext_t g_scheduler;
static Fiber* g_fiber = nullptr;
static const Kernel* g_kernel = nullptr;
static const uint64_t* g_words = nullptr;

void AbandonCore() {
    if (!g_fiber) std::abort();
    setcontext(&g_scheduler);
    std::abort();
}
void YieldAtSync(At at) {
    g_fiber->status = kAtSync;
    g_fiber->sync = at;
    swapcontext(&g_fiber->context, &g_scheduler);
}

static void Body() {
    g_kernel->call(g_words);
    CheckCoreEnd({g_kernel->name, 0});
    g_fiber->status = kDone;
    setcontext(&g_scheduler);
}

static void Enter(Fiber& fiber, Core& core) {
    g_fiber = &fiber;
    g_core = &core;
    if (fiber.status == kReady) {
        fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, Body, 0);
    }
    fiber.status = kRunning;
    swapcontext(&g_scheduler, &fiber.context);
    g_fiber = nullptr;
    g_core = nullptr;
}

static void RunCores(Launch& launch, uint64_t seed) {
    std::vector<Fiber> fibers(launch.blocks);
    std::vector<std::unique_ptr<Core>> finished;
    std::mt19937_64 random(seed);
    std::vector<int> order(launch.blocks);
    for (int i = 0; i < launch.blocks; ++i) order[i] = i;
    launch.cores.resize(launch.blocks);
    while (launch.violation.empty()) {
        for (int i = launch.blocks - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
        if (launch.order.empty()) launch.order = order;
        int waiting = 0;
        for (int index : order) {
            if (!launch.cores[index]) {
                launch.cores[index].reset(new Core);
                launch.cores[index]->index = index;
            }
            Core& core = *launch.cores[index];
            Enter(fibers[index], core);
            if (!launch.violation.empty()) break;
            if (fibers[index].status == kAtSync) {
                ++waiting;
            } else {  // done: keep the counters, drop the memory
                munmap(fibers[index].stack, kStackBytes);
                fibers[index].stack = nullptr;
                std::vector<uint8_t>().swap(core.ub);
                std::vector<UbBlock>().swap(core.shadow);
                for (auto& sites : core.sites) std::vector<uint32_t>().swap(sites);
            }
        }
        if (!launch.violation.empty() || waiting == 0) break;
        if (waiting < launch.blocks) {
            for (Fiber& fiber : fibers) {
                if (fiber.status != kAtSync) continue;
                launch.violation =
                    "{\"rule\": \"sync-all-missing\", \"message\": \"" +
                    std::to_string(launch.blocks - waiting) +
                    " cores ended without this SyncAll: the others hang\", \"file\": " +
                    Quote(fiber.sync.file) + ", \"line\": " + std::to_string(fiber.sync.line) +
                    ", \"core\": -1}";
                break;
            }
        }
        launch.epoch++;
    }
    for (Fiber& fiber : fibers) {
        if (fiber.stack) munmap(fiber.stack, kStackBytes);
    }
}

std::string Quote(const std::string& text) {
    std::string result = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        result += c == '\n' ? ' ' : c;
    }
    return result + "\"";
}

static std::string CountersJson(const Counters& c) {
    std::string text = "{";
    auto add = [&](const char* name, uint64_t value) {
        text +=
            (text.size() > 1 ? ", \"" : "\"") + std::string(name) + "\": " + std::to_string(value);
    };
    add("read_bytes", c.read_bytes);
    add("read_sectors", c.read_sectors);
    add("read_bursts", c.read_bursts);
    add("write_bytes", c.write_bytes);
    add("write_sectors", c.write_sectors);
    add("write_bursts", c.write_bursts);
    add("scalar_read_bytes", c.scalar_read_bytes);
    add("scalar_write_bytes", c.scalar_write_bytes);
    add("cache_lines", c.cache_lines);
    add("scalar_instructions", c.instructions[kS]);
    add("vector_instructions", c.instructions[kV]);
    add("mte2_instructions", c.instructions[kMte2]);
    add("mte3_instructions", c.instructions[kMte3]);
    add("vector_repeats", c.vector_repeats);
    add("barriers", c.barriers);
    add("events", c.events);
    add("ub_high_water", c.ub_high_water);
    return text + "}";
}

}  // namespace twin

using namespace twin;

extern "C" const char* twin_kernels() {
    static std::string text;
    text = "{";
    for (const Kernel& kernel : Kernels()) {
        text += (text.size() > 1 ? ", " : "") + Quote(kernel.name) + ": " + Quote(kernel.kinds);
    }
    text += "}";
    return text.c_str();
}

extern "C" const char* twin_launch(const char* kernel, int blocks, const TwinBuffer* buffers,
                                   int buffer_number, const uint64_t* words, int word_number,
                                   uint64_t seed, int auto_sync) {
    static std::string text;
    g_kernel = nullptr;
    for (const Kernel& candidate : Kernels()) {
        if (!std::strcmp(candidate.name, kernel)) g_kernel = &candidate;
    }
    if (!g_kernel || static_cast<int>(std::strlen(g_kernel->kinds)) != word_number || blocks < 1) {
        text =
            "{\"error\": " +
            Quote("no kernel " + std::string(kernel) + " with that many arguments, or no block") +
            "}";
        return text.c_str();
    }
    Launch launch;
    for (int i = 0; i < buffer_number; ++i) {
        launch.buffers.push_back(
            {static_cast<uint8_t*>(buffers[i].base), buffers[i].bytes, buffers[i].writable != 0});
    }
    launch.blocks = blocks;
    launch.auto_sync = auto_sync != 0;
    uint64_t bits = (seed + 1) * 0x9E3779B97F4A7C15ull;
    launch.choice = {(bits >> 40 & 1) != 0, (bits >> 41 & 1) != 0};
    g_launch = &launch;
    g_words = words;
    RunCores(launch, seed);
    g_launch = nullptr;

    text = "{\"violation\": " + (launch.violation.empty() ? "null" : launch.violation) +
           ", \"order\": [";
    for (size_t i = 0; i < launch.order.size(); ++i)
        text += (i ? ", " : "") + std::to_string(launch.order[i]);
    text += "], \"cores\": [";
    bool first = true;
    for (auto& core : launch.cores) {
        if (!core) continue;
        text += (first ? "" : ", ") + CountersJson(core->counters);
        first = false;
    }
    text += "]}";
    return text.c_str();
}
