// Vector instructions in general: limits of masks and repeats, alignment, overlap of operands.
#include "operands.h"

namespace twin {

Lanes CountLanes(At at, const char* op, int64_t count) {
    if (count < 0 || count > kUbBytes) {
        Violate("count-range", at, "%s works on %lld elements", op, static_cast<long long>(count));
    }
    Lanes lanes;
    lanes.counter = true;
    lanes.count = static_cast<uint32_t>(count);
    return lanes;
}
uint32_t CheckRepeats(At at, const char* op, Repeats repeats) {
    if (repeats.count < 0 || repeats.count > 255) {
        Violate("repeat-limit", at, "%s repeats %lld times, legal are 0 to 255", op,
                static_cast<long long>(repeats.count));
    }
    return static_cast<uint32_t>(repeats.count);
}
Lanes MaskLanes(At at, const char* op, uint64_t mask, Repeats repeats, uint32_t lanes_per_repeat) {
    Lanes lanes;
    lanes.repeats = CheckRepeats(at, op, repeats);
    if (mask == 0 || mask > lanes_per_repeat) {
        Violate("mask-limit", at, "%s has mask %llu, legal are 1 to %u", op,
                static_cast<unsigned long long>(mask), lanes_per_repeat);
    }
    lanes.prefix = static_cast<uint32_t>(mask);
    for (uint32_t i = 0; i < mask; ++i) lanes.mask[i / 64] |= 1ull << (i % 64);
    return lanes;
}
Lanes BitLanes(At at, const char* op, const uint64_t* mask, Repeats repeats,
               uint32_t lanes_per_repeat) {
    Lanes lanes;
    lanes.repeats = CheckRepeats(at, op, repeats);
    lanes.mask[0] = mask[0];
    lanes.mask[1] = lanes_per_repeat > 64 ? mask[1] : 0;
    bool beyond = lanes_per_repeat < 64 && lanes.mask[0] >> lanes_per_repeat;
    if ((lanes.mask[0] | lanes.mask[1]) == 0 || beyond) {
        Violate("mask-limit", at, "%s has mask bits {%llx, %llx} for %u elements a repeat", op,
                static_cast<unsigned long long>(mask[0]),
                static_cast<unsigned long long>(lanes.mask[1]), lanes_per_repeat);
    }
    return lanes;
}

// Within a repeat a source and the result are the same bytes or share none.
static void CheckOverlap(const char* op, At at, const Lanes& lanes, const Operand& result,
                         const Operand& source, uint32_t repeat) {
    if (result.view.buffer != source.view.buffer) return;
    uint32_t from =
        result.view.address + (lanes.counter ? 0 : repeat * result.repeat_stride * kBlock);
    uint32_t to =
        source.view.address + (lanes.counter ? 0 : repeat * source.repeat_stride * kBlock);
    if (from == to && result.size == source.size &&
        (lanes.counter || result.block_stride == source.block_stride))
        return;
    Runs(lanes, result, repeat, [&](uint32_t o, uint32_t b) {
        uint32_t low = result.view.address + o;
        Runs(lanes, source, repeat, [&](uint32_t o2, uint32_t b2) {
            uint32_t low2 = source.view.address + o2;
            if (low < low2 + b2 && low2 < low + b) {
                Violate("operand-overlap", at,
                        "the result of %s partly overlaps a source (UB bytes %u and %u)", op, low,
                        low2);
            }
        });
    });
}

void CheckAligned(At at, const char* op, const View& view, const char* what) {
    if (view.address % kBlock) {
        Violate("ub-alignment", at, "the %s of %s starts at UB byte %u, not a multiple of 32", what,
                op, view.address);
    }
}

void TouchOperands(Instruction& now, const Lanes& lanes, Operand* operands, int number) {
    const char* op = now.op;
    At at = now.at;
    uint32_t widest = 1, repeats = lanes.counter ? 1 : lanes.repeats;
    for (int i = 0; i < number; ++i) {
        CheckAligned(at, op, operands[i].view, operands[i].write ? "result" : "source");
        if (operands[i].size > widest) widest = operands[i].size;
    }
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        for (int i = 0; i < number; ++i) {
            const Operand& operand = operands[i];
            if (operand.write) continue;
            CheckOverlap(op, at, lanes, operands[0], operand, repeat);
            now.accumulating = operand.accumulates;
            Runs(lanes, operand, repeat,
                 [&](uint32_t o, uint32_t b) { now.Read(operand.view, o, b); });
        }
        Runs(lanes, operands[0], repeat,
             [&](uint32_t o, uint32_t b) { now.Write(operands[0].view, o, b); });
    }
    g_core->counters.vector_repeats +=
        lanes.counter ? (uint64_t{lanes.count} * widest + 255) / 256 : lanes.repeats;
}

void VectorInstruction(const char* op, At at, const Lanes& lanes, Operand* operands, int number) {
    if (lanes.Empty()) return;
    Instruction now(kV, op, at);
    TouchOperands(now, lanes, operands, number);
}

}  // namespace twin
