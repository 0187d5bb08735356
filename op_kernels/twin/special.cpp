// Vector instructions with a shape of their own: reductions, single elements, comparisons.
#include <cstring>

#include "operands.h"

namespace twin {

void ReduceInstruction(const char* op, At at, const Lanes& lanes, const Operand& source,
                       const View& dst, uint32_t result_bytes, uint32_t result_stride) {
    if (lanes.Empty()) return;
    Instruction now(kV, op, at);
    CheckAligned(at, op, source.view, "source");
    for (uint32_t r = 0; r < lanes.repeats; ++r) {
        Runs(lanes, source, r, [&](uint32_t o, uint32_t b) {
            uint32_t low = source.view.address + o, to = dst.address + r * result_stride;
            if (source.view.buffer == dst.buffer && low < to + result_bytes && to < low + b) {
                Violate("operand-overlap", at, "the result of %s overlaps its source (UB byte %u)",
                        op, to);
            }
            now.Read(source.view, o, b);
        });
        now.Write(dst, r * result_stride, result_bytes);
    }
    g_core->counters.vector_repeats += lanes.repeats;
}

uint32_t ReduceScratchBytes(uint32_t count, uint32_t size, bool index) {
    auto up = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
    uint32_t lanes = 256 / size, block = kBlock / size;
    uint32_t first = up(count, lanes) * 2, second = up(first, lanes) * 2,
             third = up(second, lanes) * 2;
    uint32_t blocks = up(first, block);
    if (index) blocks += up(second, block) + (second > 2 ? up(third, block) : 0);
    return blocks * kBlock;
}

void ReduceAllInstruction(const char* op, At at, const View& src, const Lanes& lanes,
                          const View* scratch, const View& dst, uint32_t size, bool index) {
    uint32_t result = (scratch ? 2 : 1) * size;
    if (dst.address % result) {
        Violate("ub-alignment", at, "the result of %s starts at UB byte %u, not a multiple of %u",
                op, dst.address, result);
    }
    {
        Instruction now(kV, op, at);
        CheckAligned(at, op, src, "source");
        now.Read(src, 0, lanes.count * size);
        g_core->counters.vector_repeats += (uint64_t{lanes.count} * size + 255) / 256;
        if (scratch) {
            uint32_t bytes = ReduceScratchBytes(lanes.count, size, index);
            CheckAligned(at, op, *scratch, "scratch");
            if (scratch->address + bytes > scratch->high) {
                Violate("reduce-scratch", at,
                        "%s of %u elements needs %u bytes of scratch, given %u", op, lanes.count,
                        bytes, scratch->high - scratch->address);
            }
            now.Poison(*scratch, 0, bytes);
        }
        if (index && lanes.count * size <= 256) {  // one instruction does it
            now.Write(dst, 0, result);
            return;
        }
    }
    // The scalar unit fetches the result and stores it, with the events that takes.
    auto hand = [at](int event) {
        int id = FetchEvent(event, at);
        SetEvent(event, id, at);
        WaitEvent(event, id, at);
    };
    hand(kVtoS);
    Instruction(kS, op, at).Write(dst, 0, index ? result : size);
    hand(kStoV);
    hand(kStoMte3);
}

void CreateIndexInstruction(At at, const View& dst, uint32_t count, uint32_t size) {
    CheckAligned(at, "CreateVecIndex", dst, "result");
    // The scalar unit writes the first block, the vector unit continues from there.
    uint32_t first = count * size < kBlock ? count * size : kBlock, all = count * size;
    Instruction(kS, "CreateVecIndex", at).Write(dst, 0, first);
    int id = FetchEvent(kStoV, at);
    SetEvent(kStoV, id, at);
    WaitEvent(kStoV, id, at);
    if (all == first) return;
    Instruction(kV, "CreateVecIndex", at).Write(dst, first, all - first);
    Barrier(kV);
    g_core->counters.vector_repeats += 7 + (all + 255) / 256;
}

void BrcbInstruction(At at, const View& dst, const View& src, Repeats repeats,
                     uint32_t block_stride, uint32_t repeat_stride, uint32_t size) {
    uint32_t number = CheckRepeats(at, "Brcb", repeats) * 8;
    if (number == 0) return;
    Instruction now(kV, "Brcb", at);
    CheckAligned(at, "Brcb", dst, "result");
    CheckAligned(at, "Brcb", src, "source");
    for (uint32_t i = 0; i < number; ++i) {
        if (i % 8 == 0) now.Read(src, i * size, 8 * size);
        uint32_t to = (i / 8 * repeat_stride + i % 8 * block_stride) * kBlock;
        now.Write(dst, to, kBlock);
        for (uint32_t b = 0; b < kBlock; b += size)
            std::memcpy(Ub(dst.address + to + b), Ub(src.address + i * size), size);
    }
    g_core->counters.vector_repeats += number / 8;
}

void GatherInstruction(At at, const View& dst, const View& src, const View& offsets, uint32_t base,
                       const Lanes& lanes, uint32_t repeat_stride, uint32_t size) {
    if (lanes.Empty()) return;
    Instruction now(kV, "Gather", at);
    CheckAligned(at, "Gather", dst, "result");
    CheckAligned(at, "Gather", src, "source");
    CheckAligned(at, "Gather", offsets, "offset");
    uint32_t per_repeat = 256 / size;
    auto one = [&](uint32_t index, uint32_t to) {
        now.Read(offsets, index * 4, 4);
        uint32_t offset;
        std::memcpy(&offset, Ub(offsets.address + index * 4), 4);
        if ((base + offset) % size) {
            Violate("gather-offset", at, "Gather from byte %u, not a multiple of %u bytes",
                    base + offset, size);
        }
        now.Read(src, base + offset, size);
        now.Write(dst, to, size);
        std::memcpy(Ub(dst.address + to), Ub(src.address + base + offset), size);
    };
    if (lanes.counter) {
        for (uint32_t i = 0; i < lanes.count; ++i) one(i, i * size);
    } else {
        for (uint32_t r = 0; r < lanes.repeats; ++r) {
            for (uint32_t lane = 0; lane < per_repeat; ++lane) {
                if (lanes.Has(lane))
                    one(r * per_repeat + lane, r * repeat_stride * kBlock + lane * size);
            }
        }
    }
    g_core->counters.vector_repeats +=
        lanes.counter ? (lanes.count + per_repeat - 1) / per_repeat : lanes.repeats;
}

uint64_t GatherMaskInstruction(At at, const View& dst, const View& src, int pattern, bool counter,
                               uint32_t mask, uint32_t repeats, uint32_t block_stride,
                               uint32_t repeat_stride, uint32_t size) {
    if (pattern < 1 || pattern > 7)
        Violate("gather-pattern", at, "GatherMask has no pattern %d, legal are 1 to 7", pattern);
    Instruction now(kV, "GatherMask", at);
    CheckAligned(at, "GatherMask", dst, "result");
    CheckAligned(at, "GatherMask", src, "source");
    Operand source{src, size, block_stride, repeat_stride};
    uint32_t number = counter ? mask : 256 / size;
    uint64_t kept = 0;
    for (uint32_t r = 0; r < repeats; ++r) {
        for (uint32_t i = 0; i < number; ++i) {
            now.Read(src, source.Offset(r, i), size);
            bool take =
                pattern == 7 || (pattern <= 2 ? i % 2 == static_cast<uint32_t>(pattern - 1)
                                              : i % 4 == static_cast<uint32_t>(pattern - 3));
            if (!take) continue;
            uint32_t to = static_cast<uint32_t>(kept++) * size;
            now.Write(dst, to, size);
            std::memcpy(Ub(dst.address + to), Ub(src.address + source.Offset(r, i)), size);
        }
    }
    g_core->counters.vector_repeats += uint64_t{repeats} * ((uint64_t{number} * size + 255) / 256);
    return kept;
}

void CompareInstruction(const char* op, At at, const Lanes& lanes, Operand* sources, int number,
                        const View& dst) {
    if (lanes.Empty()) return;
    uint32_t size = sources[0].size,
             repeats = lanes.counter ? lanes.count * size / 256 : lanes.repeats;
    if (lanes.counter && lanes.count * size % 256) {
        Violate("compare-count", at,
                "%s of %u elements of %u bytes: must be whole repeats of 256 bytes", op,
                lanes.count, size);
    }
    Instruction now(kV, op, at);
    CheckAligned(at, op, dst, "result");
    for (int i = 0; i < number; ++i) {
        CheckAligned(at, op, sources[i].view, "source");
        for (uint32_t r = 0; r < lanes.repeats; ++r) {
            Runs(lanes, sources[i], r,
                 [&](uint32_t o, uint32_t b) { now.Read(sources[i].view, o, b); });
        }
    }
    now.Write(dst, 0, repeats * (256 / size) / 8);
    g_core->counters.vector_repeats += repeats;
}

void SelectInstruction(At at, const Lanes& lanes, Operand* operands, int number, const View& mask,
                       bool same_mask, bool reserves) {
    if (lanes.Empty()) return;
    Core& core = *g_core;
    if (reserves) {
        core.ub_reserved = kReservedBytes;
        if (core.ub_used + kReservedBytes > kUbBytes) {
            Violate("ub-reserved", at,
                    "Select in this mode keeps the last 8192 bytes of UB for itself, %u bytes are "
                    "in use",
                    core.ub_used);
        }
        if (core.ub_used + kReservedBytes > core.counters.ub_high_water) {
            core.counters.ub_high_water = core.ub_used + kReservedBytes;
        }
    }
    Instruction now(kV, "Select", at);
    CheckAligned(at, "Select", mask, "mask");
    uint32_t per_repeat = 256 / operands[0].size;
    uint32_t bits = lanes.counter
                        ? (same_mask && lanes.count > per_repeat ? per_repeat : lanes.count)
                        : (same_mask ? 1 : lanes.repeats) * per_repeat;
    now.Read(mask, 0, (bits + 7) / 8);
    core.counters.instructions[kV] += 2;  // it first tells the unit where the mask lies
    TouchOperands(now, lanes, operands, number);
}

}  // namespace twin
