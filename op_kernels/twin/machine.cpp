// Instructions of one core: clocks of the pipes, and the shadow of the unified buffer that knows
// for every byte who wrote and read it last. An access is in order when its pipe is known to run
// after those instructions.
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace twin {

Launch* g_launch = nullptr;
Core* g_core = nullptr;
const char* const kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3"};

std::string SiteText(uint32_t site) {
    const Site& s = g_launch->sites[site];
    return std::string(s.op) + " at " + s.at.file + ":" + std::to_string(s.at.line);
}

static uint32_t SiteNumber(const char* op, At at) {
    uint64_t key = reinterpret_cast<uint64_t>(at.file) * 31 +
                   reinterpret_cast<uint64_t>(op) * 1000003 +
                   static_cast<uint64_t>(at.line) * 0x9E3779B97F4A7C15ull;
    auto found = g_launch->site_of.emplace(key, static_cast<uint32_t>(g_launch->sites.size()));
    if (found.second) g_launch->sites.push_back({at, op});
    return found.first->second;
}

void Violate(const char* rule, At at, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    g_launch->violation = "{\"rule\": " + Quote(rule) + ", \"message\": " + Quote(text) +
                          ", \"file\": " + Quote(at.file) +
                          ", \"line\": " + std::to_string(at.line) +
                          ", \"core\": " + std::to_string(g_core->index) + "}";
    AbandonCore();
}

uint8_t* Ub(uint32_t address) { return g_core->ub.data() + address; }
int BlockIndex() { return g_core->index; }
int BlockNumber() { return g_launch->blocks; }
void*& PipePointer() { return g_core->tpipe; }
Registers& CoreRegisters() { return g_core->registers; }
const Unspecified& Choice() { return g_launch->choice; }

Instruction::Instruction(Pipe p, const char* name, At where) : at(where), op(name), pipe(p) {
    Core& core = *g_core;
    clock = ++core.clock[p];
    site = SiteNumber(name, where);
    core.sites[p].push_back(site);
    core.counters.instructions[p]++;
    if (p == kS) {
        core.pipe[kS].known[kS] = clock;  // the scalar unit works in order
        return;
    }
    // Issued by the scalar unit, so after everything that it waited for; its own stores may still
    // be under way.
    uint32_t scalar = core.pipe[p].known[kS];
    core.pipe[p].Merge(core.pipe[kS]);
    core.pipe[p].known[kS] = scalar;
    if (p == kV && g_launch->auto_sync) core.pipe[kV].known[kV] = clock - 1;
}

[[noreturn]] static void Hazard(const Instruction& now, const char* does, uint32_t address,
                                int other, uint32_t other_clock, const char* did) {
    std::string site = SiteText(g_core->sites[other][other_clock - 1]);
    if (other == now.pipe) {
        Violate("pipe-barrier", now.at,
                "%s (%s) %s UB byte %u that %s %s, with no PipeBarrier<PIPE_%s> between", now.op,
                kPipeNames[now.pipe], does, address, site.c_str(), did, kPipeNames[other]);
    }
    Violate("pipe-hazard", now.at,
            "%s (%s) %s UB byte %u that %s (%s) %s, with no %s_%s event or queue between", now.op,
            kPipeNames[now.pipe], does, address, site.c_str(), kPipeNames[other], did,
            kPipeNames[other], kPipeNames[now.pipe]);
}

static void ReadCell(const Instruction& now, UbCell& cell, uint32_t address) {
    if (cell.state != UbCell::kWritten) {
        Violate("ub-poison", now.at, "%s reads UB byte %u, which %s", now.op, address,
                cell.state == UbCell::kNever ? "nothing has written" : "holds an undefined value");
    }
    if (cell.write_pipe == now.pipe && cell.write_clock == now.clock) {
        if (!now.accumulating) {
            Violate("operand-overlap", now.at,
                    "%s reads UB byte %u that an earlier repeat of it wrote", now.op, address);
        }
    } else if (cell.write_clock > g_core->pipe[now.pipe].known[cell.write_pipe]) {
        Hazard(now, "reads", address, cell.write_pipe, cell.write_clock, "writes");
    }
    cell.read_clock[now.pipe] = now.clock;
}

static void WriteCell(const Instruction& now, UbCell& cell, uint32_t address, bool undefined) {
    const Clock& mine = g_core->pipe[now.pipe];
    for (int q = 0; q < kPipes; ++q) {
        if (q != now.pipe && cell.read_clock[q] > mine.known[q])
            Hazard(now, "writes", address, q, cell.read_clock[q], "reads");
    }
    bool own = cell.write_pipe == now.pipe && cell.write_clock == now.clock;
    if (!own && cell.write_clock > mine.known[cell.write_pipe]) {
        Hazard(now, "writes", address, cell.write_pipe, cell.write_clock, "writes");
    }
    uint32_t read = cell.read_clock[now.pipe];
    if (read != now.clock && read > mine.known[now.pipe])
        Hazard(now, "writes", address, now.pipe, read, "reads");
    cell = UbCell();
    cell.write_clock = now.clock;
    cell.write_pipe = now.pipe;
    cell.state = undefined ? UbCell::kUndefined : UbCell::kWritten;
}

enum Kind { kRead, kWrite, kUndefinedWrite };
static void Touch(const Instruction& now, const View& view, uint32_t offset, uint32_t bytes,
                  Kind kind) {
    CheckUse(view, offset, bytes, now.at, now.op);
    uint32_t address = view.address + offset, end = address + bytes;
    while (address < end) {
        UbBlock& block = g_core->shadow[address / kBlock];
        uint32_t stop = (address / kBlock + 1) * kBlock;
        if (stop > end) stop = end;
        bool whole = stop - address == kBlock;
        if (whole && !block.bytes) {
            kind == kRead ? ReadCell(now, block.all, address)
                          : WriteCell(now, block.all, address, kind != kWrite);
        } else {
            if (!block.bytes) {
                block.bytes.reset(new UbCell[kBlock]);
                for (uint32_t i = 0; i < kBlock; ++i) block.bytes[i] = block.all;
            }
            for (uint32_t a = address; a < stop; ++a) {
                UbCell& cell = block.bytes[a % kBlock];
                kind == kRead ? ReadCell(now, cell, a) : WriteCell(now, cell, a, kind != kWrite);
            }
            if (whole && kind != kRead) {
                block.all = block.bytes[0];
                block.bytes.reset();
            }
        }
        address = stop;
    }
}

void Instruction::Read(const View& view, uint32_t offset, uint32_t bytes) {
    Touch(*this, view, offset, bytes, kRead);
}
void Instruction::Write(const View& view, uint32_t offset, uint32_t bytes) {
    Touch(*this, view, offset, bytes, kWrite);
}
void Instruction::Poison(const View& view, uint32_t offset, uint32_t bytes) {
    Touch(*this, view, offset, bytes, kUndefinedWrite);
}

void CheckUse(const View& view, uint32_t offset, uint32_t bytes, At at, const char* op) {
    if (view.buffer < 0)
        Violate("uninitialised", at, "%s uses a LocalTensor that belongs to no buffer", op);
    const Buffer& buffer = g_core->buffers[view.buffer];
    if (buffer.generation != view.generation) {
        Violate("use-after-free", at, "%s uses a tensor after FreeTensor (%s:%d)", op,
                buffer.last.file, buffer.last.line);
    }
    int64_t low = int64_t{view.address} + offset - view.low;
    if (low < 0 || low + bytes > view.high - view.low) {
        Violate("ub-bounds", at, "%s touches bytes %lld to %lld of a buffer of %u bytes", op,
                static_cast<long long>(low), static_cast<long long>(low + bytes),
                view.high - view.low);
    }
}

}  // namespace twin
