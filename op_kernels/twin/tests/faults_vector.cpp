// Faults in vector instructions: masks, repeats, modes, overlap of operands.
#include "fault.h"

FAULT(repeats) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 256 * 32);
    LocalTensor<float> t = buffer.Get<float>();
    uint32_t repeats = 256;
    Duplicate(t, 1.0f, 8, repeats, 1, 1);  // BREAKS repeat-limit
}
CLEAN(repeats) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 256 * 32);
    LocalTensor<float> t = buffer.Get<float>();
    uint32_t repeats = 255;
    Duplicate(t, 1.0f, 8, repeats, 1, 1);
}
FAULT(repeats_of_reduction) {
    Bench b(x, y);
    b.Fill();
    WholeReduceSum(b.out, b.in, 8, 256, 1, 1, 0);  // BREAKS repeat-limit
}
CLEAN(repeats_of_reduction) {
    Bench b(x, y);
    b.Fill();
    WholeReduceSum(b.out, b.in, 8, 255, 1, 1, 0);
}
FAULT(mask) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 65, 1, 1, 8);  // BREAKS mask-limit
}
CLEAN(mask) {
    Bench b(x, y);
    Duplicate(b.in.ReinterpretCast<half>(), half(1.0f), 65, 1, 1, 8);
}
FAULT(mask_of_a_cast) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<half> halves = b.in.ReinterpretCast<half>();
    Cast(b.out, halves, RoundMode::CAST_NONE, 128, 1, {1, 1, 8, 4});  // BREAKS mask-limit
}
CLEAN(mask_of_a_cast) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<half> halves = b.in.ReinterpretCast<half>();
    Cast(b.out, halves, RoundMode::CAST_NONE, 64, 2, {1, 1, 8, 4});
}
FAULT(mask_bits) {
    Bench b(x, y);
    uint64_t bits[2] = {0, 1};
    Duplicate(b.in, 1.0f, bits, 1, 1, 8);  // BREAKS mask-limit
}
CLEAN(mask_bits) {
    Bench b(x, y);
    uint64_t bits[2] = {1, 0};
    Duplicate(b.in, 1.0f, bits, 1, 1, 8);
}
FAULT(count) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, -1);  // BREAKS count-range
}
CLEAN(count) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 0);
}

FAULT(overlap) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in[8], b.in, 1.0f, 64);  // BREAKS operand-overlap
}
CLEAN(overlap) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in, b.in, 1.0f, 64);
}
FAULT(overlap_of_widening) {
    Bench b(x, y);
    b.Fill();
    Cast(b.in, b.in.ReinterpretCast<half>(), RoundMode::CAST_NONE, 64);  // BREAKS operand-overlap
}
CLEAN(overlap_of_widening) {
    Bench b(x, y);
    b.Fill();
    Cast(b.in.ReinterpretCast<int32_t>(), b.in, RoundMode::CAST_RINT, 64);
}
FAULT(overlap_of_strides) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in, b.in, 1.0f, 64, 1, {1, 2, 8, 8});  // BREAKS operand-overlap
}
CLEAN(overlap_of_strides) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in, b.in, 1.0f, 64, 1, {2, 2, 8, 8});
}
FAULT(overlap_of_repeats) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in[64], b.in, 1.0f, 64, 3, {1, 1, 8, 8});  // BREAKS operand-overlap
}
CLEAN(overlap_of_repeats) {
    Bench b(x, y);
    b.Fill();
    Adds(b.in, b.in[64], 1.0f, 64, 3, {1, 1, 8, 8});
}
// Add, Sub, Mul, Max and Min may take their own result as second source, to sum up repeats.
FAULT(accumulation) {
    Bench b(x, y);
    b.Fill();
    Max(b.out, b.out, b.in, 64, 4, {1, 1, 1, 0, 0, 8});  // BREAKS operand-overlap
}
CLEAN(accumulation) {
    Bench b(x, y);
    b.Fill();
    Max(b.out, b.in, b.out, 64, 4, {1, 1, 1, 0, 8, 0});
}
FAULT(overlap_of_reduction) {
    Bench b(x, y);
    b.Fill();
    WholeReduceSum(b.in, b.in, 64, 4, 1, 1, 8);  // BREAKS operand-overlap
}
CLEAN(overlap_of_reduction) {
    Bench b(x, y);
    b.Fill();
    WholeReduceSum(b.in, b.in[64], 64, 3, 1, 1, 8);
}
FAULT(scratch) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<float> small = b.calc[kCount - 8];
    ReduceMax(b.out, b.in, small, kCount, true);  // BREAKS reduce-scratch
}
CLEAN(scratch) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<float> small = b.calc[kCount - 16];
    ReduceMax(b.out, b.in, small, kCount, true);
}
// ReduceMax of one repeat with its index is a vector instruction; others end in the scalar unit.
FAULT(maximum_of_one_repeat) {
    Bench b(x, y);
    b.Fill();
    ReduceMax(b.out, b.in, b.calc, 64, true);
    b.out.GetValue(0);  // BREAKS pipe-hazard
}
CLEAN(maximum_of_one_repeat) {
    Bench b(x, y);
    b.Fill();
    ReduceMax(b.out, b.in, b.calc, 65, true);
    b.out.GetValue(0);
}
FAULT(maximum_at_odd_place) {
    Bench b(x, y);
    b.Fill();
    ReduceMin(b.out[1], b.in, b.calc, 64);  // BREAKS ub-alignment
}
CLEAN(maximum_at_odd_place) {
    Bench b(x, y);
    b.Fill();
    ReduceSum(b.out[1], b.in, b.calc, 64);
}
// The first block of an index vector is written by the scalar unit.
FAULT(index_over_vector) {
    Bench b(x, y);
    b.Fill();
    Duplicate(b.out, 1.0f, 8);
    CreateVecIndex(b.out, 0.0f, 8);  // BREAKS pipe-hazard
}
CLEAN(index_over_vector) {
    Bench b(x, y);
    b.Fill();
    Duplicate(b.in, 1.0f, 8);
    CreateVecIndex(b.out, 0.0f, 64);
    Adds(b.calc, b.out, 1.0f, 64);
}
FAULT(gather_offset) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint32_t> offsets = b.calc.ReinterpretCast<uint32_t>();
    Duplicate(offsets, uint32_t{6}, 8);
    PipeBarrier<PIPE_V>();
    Gather(b.out, b.in, offsets, 0, 8);  // BREAKS gather-offset
}
CLEAN(gather_offset) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint32_t> offsets = b.calc.ReinterpretCast<uint32_t>();
    Duplicate(offsets, uint32_t{12}, 8);
    PipeBarrier<PIPE_V>();
    Gather(b.out, b.in, offsets, 0, 8);
}
FAULT(gather_pattern) {
    Bench b(x, y);
    b.Fill();
    uint64_t kept;
    GatherMask(b.out, b.in, 8, true, 64, {1, 1, 8, 0}, kept);  // BREAKS gather-pattern
}
CLEAN(gather_pattern) {
    Bench b(x, y);
    b.Fill();
    uint64_t kept;
    GatherMask(b.out, b.in, 7, true, 64, {1, 1, 8, 0}, kept);
}
FAULT(compare_part_of_repeat) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> bits = b.out.ReinterpretCast<uint8_t>();
    Compares(bits, b.in, 0.0f, CMPMODE::GT, 60);  // BREAKS compare-count
}
CLEAN(compare_part_of_repeat) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> bits = b.out.ReinterpretCast<uint8_t>();
    Compares(bits, b.in, 0.0f, CMPMODE::GT, 64);
}
FAULT(select_mode) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> m = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, m, b.in, 1.0f, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);  // BREAKS select-mode
}
CLEAN(select_mode) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> m = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, m, b.in, b.in, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
}
FAULT(cast_mode) {
    Bench b(x, y);
    b.Fill();
    RoundMode mode = GetBlockNum() > 0 ? RoundMode::CAST_NONE : RoundMode::CAST_RINT;
    Cast(b.out.ReinterpretCast<int32_t>(), b.in, mode, 64);  // BREAKS cast-mode
}
CLEAN(cast_mode) {
    Bench b(x, y);
    b.Fill();
    RoundMode mode = GetBlockNum() > 0 ? RoundMode::CAST_RINT : RoundMode::CAST_NONE;
    Cast(b.out.ReinterpretCast<int32_t>(), b.in, mode, 64);
}
FAULT(deq_scale) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<int32_t> whole = b.in.ReinterpretCast<int32_t>();
    LocalTensor<half> halves = b.out.ReinterpretCast<half>();
    Cast(halves, whole, RoundMode::CAST_NONE, 64);  // BREAKS deq-scale
}
CLEAN(deq_scale) {
    Bench b(x, y);
    b.Fill();
    SetDeqScale(half(1.0f));
    LocalTensor<int32_t> whole = b.in.ReinterpretCast<int32_t>();
    LocalTensor<half> halves = b.out.ReinterpretCast<half>();
    Cast(halves, whole, RoundMode::CAST_NONE, 64);
}
