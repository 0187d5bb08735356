// Global memory: which buffer an access lies in, who touched each byte when, and the traffic
// counters.
#include "state.h"

namespace twin {

constexpr uint64_t kPage = 4096;
constexpr uint16_t kSeveral = 0xffff;

static const GlobalBuffer& Check(const Instruction& now, const void* base, const void* address,
                                 uint64_t bytes) {
    const uint8_t* start = static_cast<const uint8_t*>(base);
    for (const GlobalBuffer& buffer : g_launch->buffers) {
        if (start < buffer.base || start >= buffer.base + buffer.bytes) continue;
        int64_t offset = static_cast<const uint8_t*>(address) - buffer.base;
        if (offset < 0 || offset + bytes > buffer.bytes) {
            Violate("gm-bounds", now.at,
                    "%s touches bytes %lld to %lld of argument buffer %d, which has %llu bytes",
                    now.op, static_cast<long long>(offset), static_cast<long long>(offset + bytes),
                    static_cast<int>(&buffer - g_launch->buffers.data()),
                    static_cast<unsigned long long>(buffer.bytes));
        }
        return buffer;
    }
    Violate("gm-bounds", now.at, "%s on a GlobalTensor that starts in no buffer of this launch",
            now.op);
}

static void Race(const Instruction& now, const char* rule, const char* does, uint32_t site,
                 int core, const char* did) {
    std::string who = core == kSeveral ? "several cores" : "core " + std::to_string(core - 1);
    Violate(rule, now.at, "%s on core %d %s global bytes that %s of %s %s, with no SyncAll between",
            now.op, g_core->index, does, SiteText(site).c_str(), who.c_str(), did);
}

static void Hazard(const Instruction& now, const char* does, uint32_t site, int pipe,
                   const char* did) {
    Violate(pipe == now.pipe ? "pipe-barrier" : "pipe-hazard", now.at,
            "%s (%s) %s global bytes that %s (%s) %s, with no event or barrier between", now.op,
            kPipeNames[now.pipe], does, SiteText(site).c_str(), kPipeNames[pipe], did);
}

static void ReadCell(const Instruction& now, GmCell& cell) {
    uint16_t me = static_cast<uint16_t>(g_core->index + 1);
    if (cell.write_epoch == g_launch->epoch && cell.writer != me) {
        Race(now, "gm-unsynchronised", "reads", cell.write_site, cell.writer, "writes");
    }
    if (cell.writer == me && cell.write_clock > g_core->pipe[now.pipe].known[cell.write_pipe]) {
        Hazard(now, "reads", cell.write_site, cell.write_pipe, "writes");
    }
    cell.reader =
        cell.read_epoch == g_launch->epoch && cell.reader != me && cell.reader ? kSeveral : me;
    cell.read_epoch = g_launch->epoch;
    cell.read_clock = now.pipe == kMte2 ? now.clock : 0;
    cell.read_site = now.site;
}

static void WriteCell(const Instruction& now, GmCell& cell) {
    uint16_t me = static_cast<uint16_t>(g_core->index + 1);
    uint8_t atomic = now.pipe == kMte3 ? g_core->registers.atomic : kNoAtomic;
    bool same_atomic = atomic && atomic == cell.atomic;
    if (cell.write_epoch == g_launch->epoch && cell.writer != me && !same_atomic) {
        Race(now, "gm-two-cores", "writes", cell.write_site, cell.writer, "writes");
    }
    if (cell.read_epoch == g_launch->epoch && cell.reader != me) {
        Race(now, "gm-unsynchronised", "writes", cell.read_site, cell.reader, "reads");
    }
    if (cell.writer == me && !same_atomic &&
        cell.write_clock > g_core->pipe[now.pipe].known[cell.write_pipe]) {
        Hazard(now, "writes", cell.write_site, cell.write_pipe, "writes");
    }
    if (cell.reader == me && cell.read_clock > g_core->pipe[now.pipe].known[kMte2]) {
        Hazard(now, "writes", cell.read_site, kMte2, "reads");
    }
    cell = GmCell();
    cell.writer = me;
    cell.write_epoch = g_launch->epoch;
    cell.write_clock = now.clock;
    cell.write_tick = g_launch->tick;
    cell.write_pipe = now.pipe;
    cell.write_site = now.site;
    cell.atomic = atomic;
}

GmCell* FindCell(uint64_t address) {
    auto page = g_launch->pages.find(address / kPage);
    if (page == g_launch->pages.end()) return nullptr;
    GmBlock& block = page->second[address % kPage / kBlock];
    return block.bytes ? &block.bytes[address % kBlock] : &block.all;
}

static void Touch(const Instruction& now, uint64_t address, uint64_t bytes, bool write) {
    uint64_t end = address + bytes;
    while (address < end) {
        auto& page = g_launch->pages[address / kPage];
        if (!page) page.reset(new GmBlock[kPage / kBlock]);
        GmBlock& block = page[address % kPage / kBlock];
        uint64_t stop = (address / kBlock + 1) * kBlock;
        if (stop > end) stop = end;
        bool whole = stop - address == kBlock;
        if (whole && !block.bytes) {
            write ? WriteCell(now, block.all) : ReadCell(now, block.all);
        } else {
            if (!block.bytes) {
                block.bytes.reset(new GmCell[kBlock]);
                for (uint32_t i = 0; i < kBlock; ++i) block.bytes[i] = block.all;
            }
            for (uint64_t a = address; a < stop; ++a) {
                write ? WriteCell(now, block.bytes[a % kBlock])
                      : ReadCell(now, block.bytes[a % kBlock]);
            }
            if (whole && write) {
                block.all = block.bytes[0];
                block.bytes.reset();
            }
        }
        address = stop;
    }
}

static uint64_t Sectors(uint64_t address, uint64_t bytes) {
    return (address + bytes - 1) / kBlock - address / kBlock + 1;
}

void Instruction::ReadGlobal(const void* base, const void* where, uint64_t bytes) {
    Check(*this, base, where, bytes);
    uint64_t address = reinterpret_cast<uint64_t>(where);
    g_launch->tick++;
    Touch(*this, address, bytes, false);
    Counters& counters = g_core->counters;
    if (pipe == kS) {
        CacheRead(*this, address, bytes);
        counters.scalar_read_bytes += bytes;
        return;
    }
    CheckAgainstCaches(*this, address, bytes, false);
    counters.read_bytes += bytes;
    counters.read_sectors += Sectors(address, bytes);
    counters.read_bursts++;
}

void Instruction::WriteGlobal(const void* base, const void* where, uint64_t bytes) {
    const GlobalBuffer& buffer = Check(*this, base, where, bytes);
    if (!buffer.writable) {
        Violate("gm-read-only", at, "%s writes argument buffer %d, which is an input", op,
                static_cast<int>(&buffer - g_launch->buffers.data()));
    }
    uint64_t address = reinterpret_cast<uint64_t>(where);
    g_launch->tick++;
    Counters& counters = g_core->counters;
    if (pipe == kS) {
        CacheWrite(*this, address, bytes);
        Touch(*this, address, bytes, true);
        counters.scalar_write_bytes += bytes;
        return;
    }
    CheckAgainstCaches(*this, address, bytes, true);
    Touch(*this, address, bytes, true);
    counters.write_bytes += bytes;
    counters.write_sectors += Sectors(address, bytes);
    counters.write_bursts++;
}

}  // namespace twin
