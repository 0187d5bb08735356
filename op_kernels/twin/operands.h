// What vector.cpp and special.cpp share about the operands of an instruction.
#pragma once
#include "state.h"

namespace twin {

uint32_t CheckRepeats(At at, const char* op, Repeats repeats);
void CheckAligned(At at, const char* op, const View& view, const char* what);
// Reads and writes of all operands, repeat by repeat; operands[0] is the result.
void TouchOperands(Instruction& now, const Lanes& lanes, Operand* operands, int number);

// The bytes of an operand in one repeat, in runs: fn(offset, bytes). In counter mode everything is
// one repeat.
template <typename F>
void Runs(const Lanes& lanes, const Operand& operand, uint32_t repeat, F&& fn) {
    if (lanes.counter) {
        fn(0u, lanes.count * operand.size);
        return;
    }
    if (lanes.prefix && operand.block_stride == 1) {
        fn(operand.Offset(repeat, 0), lanes.prefix * operand.size);
        return;
    }
    uint32_t start = 0, length = 0;
    for (uint32_t lane = 0; lane < 128; ++lane) {
        if (!lanes.Has(lane)) continue;
        uint32_t offset = operand.Offset(repeat, lane);
        if (length && offset == start + length) {
            length += operand.size;
            continue;
        }
        if (length) fn(start, length);
        start = offset;
        length = operand.size;
    }
    if (length) fn(start, length);
}

}  // namespace twin
