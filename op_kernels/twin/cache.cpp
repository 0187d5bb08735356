// The data cache between a core's scalar unit and global memory: 64-byte lines, written back whole
// and only by DataCacheCleanAndInvalid, not coherent with other cores nor with copies.
#include "state.h"

namespace twin {

constexpr uint64_t kLine = 64;

static uint64_t Bits(uint64_t line, uint64_t address, uint64_t end) {
    uint64_t low = address > line * kLine ? address - line * kLine : 0;
    uint64_t high = end < (line + 1) * kLine ? end - line * kLine : kLine;
    uint64_t upto = high == kLine ? ~0ull : (1ull << high) - 1;
    return upto & ~((1ull << low) - 1);
}

static void CheckFresh(const Instruction& now, const CacheLine& cached, uint64_t line,
                       uint64_t bits) {
    uint16_t me = static_cast<uint16_t>(g_core->index + 1);
    for (uint64_t i = 0; i < kLine; ++i) {
        if (!(bits >> i & 1) || !(cached.valid >> i & 1)) continue;
        const GmCell* cell = FindCell(line * kLine + i);
        if (!cell || cell->write_tick <= cached.loaded ||
            (cell->writer == me && cell->write_pipe == kS))
            continue;
        Violate("cache-stale", now.at,
                "%s uses the data cache's copy of bytes that %s wrote since: "
                "DataCacheCleanAndInvalid first",
                now.op, SiteText(cell->write_site).c_str());
    }
}

static CacheLine& Load(const Instruction& now, uint64_t line, uint64_t bits) {
    CacheLine& cached = g_core->cache[line];
    if ((cached.valid & bits) == bits) {
        CheckFresh(now, cached, line, bits);
        return cached;
    }
    if (cached.valid == 0) cached.loaded = g_launch->tick;
    cached.valid = ~0ull;
    g_core->counters.cache_lines++;
    return cached;
}

void CacheRead(const Instruction& now, uint64_t address, uint64_t bytes) {
    uint64_t end = address + bytes;
    for (uint64_t line = address / kLine; line * kLine < end; ++line) {
        auto holder = g_launch->dirty.find(line);
        if (holder != g_launch->dirty.end() && holder->second != g_core->index + 1) {
            const CacheLine& other = g_launch->cores[holder->second - 1]->cache[line];
            if (other.dirty & Bits(line, address, end)) {
                Violate("cache-not-cleaned", now.at,
                        "%s reads bytes that %s stored on core %d, with no "
                        "DataCacheCleanAndInvalid",
                        now.op, SiteText(other.site).c_str(), holder->second - 1);
            }
        }
        Load(now, line, Bits(line, address, end));
    }
}

void CacheWrite(const Instruction& now, uint64_t address, uint64_t bytes) {
    uint16_t me = static_cast<uint16_t>(g_core->index + 1);
    uint64_t end = address + bytes;
    for (uint64_t line = address / kLine; line * kLine < end; ++line) {
        for (uint64_t i = 0; i < kLine; ++i) {  // the whole line goes back, over what others wrote
            const GmCell* cell = FindCell(line * kLine + i);
            if (cell && cell->writer && cell->writer != me &&
                cell->write_epoch == g_launch->epoch) {
                Violate("cache-line", now.at,
                        "%s on core %d stores into a cache line of 64 bytes that core %d writes "
                        "too (%s)",
                        now.op, me - 1, cell->writer - 1, SiteText(cell->write_site).c_str());
            }
        }
        auto holder = g_launch->dirty.find(line);
        if (holder != g_launch->dirty.end() && holder->second != me) {
            Violate("cache-not-cleaned", now.at,
                    "%s stores into a cache line that core %d has not cleaned", now.op,
                    holder->second - 1);
        }
        CacheLine& cached = Load(now, line, ~0ull);
        cached.dirty |= Bits(line, address, end);
        cached.site = now.site;
        g_launch->dirty[line] = me;
    }
}

void CheckAgainstCaches(const Instruction& now, uint64_t address, uint64_t bytes, bool write) {
    if (g_launch->dirty.empty()) return;
    uint64_t end = address + bytes;
    for (uint64_t line = address / kLine; line * kLine < end; ++line) {
        auto holder = g_launch->dirty.find(line);
        if (holder == g_launch->dirty.end()) continue;
        const CacheLine& cached = g_launch->cores[holder->second - 1]->cache[line];
        int core = holder->second - 1;
        if (write && core != g_core->index) {
            Violate("cache-line", now.at,
                    "%s on core %d writes a cache line of 64 bytes that core %d stores into (%s)",
                    now.op, g_core->index, core, SiteText(cached.site).c_str());
        }
        if (write || (cached.dirty & Bits(line, address, end))) {
            Violate("cache-not-cleaned", now.at,
                    "%s %s bytes beside or of a store (%s) that is still in the data cache: "
                    "DataCacheCleanAndInvalid first",
                    now.op, write ? "writes" : "reads", SiteText(cached.site).c_str());
        }
    }
}

void CleanCache(const void* where, bool everything, At at) {
    Instruction now(kS, "DataCacheCleanAndInvalid", at);
    uint64_t address = reinterpret_cast<uint64_t>(where);
    for (auto cached = g_core->cache.begin(); cached != g_core->cache.end();) {
        uint64_t line = cached->first;
        if (!everything && line != address / kLine) {
            ++cached;
            continue;
        }
        // From the address to the end of its line, no more.
        uint64_t bits = everything ? ~0ull : Bits(line, address, (line + 1) * kLine);
        cached->second.valid &= ~bits;
        cached->second.dirty &= ~bits;
        if (cached->second.dirty == 0) g_launch->dirty.erase(line);
        cached = cached->second.valid == 0 ? g_core->cache.erase(cached) : std::next(cached);
    }
}

void CheckCacheEnd() {
    for (const auto& cached : g_core->cache) {
        if (!cached.second.dirty) continue;
        const Site& site = g_launch->sites[cached.second.site];
        Violate("cache-not-cleaned", site.at,
                "%s leaves bytes in the data cache: DataCacheCleanAndInvalid is missing", site.op);
    }
}

}  // namespace twin
