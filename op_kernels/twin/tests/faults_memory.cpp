// Faults in how the unified buffer is laid out and addressed.
#include "fault.h"

FAULT(ub_capacity) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> big, more;
    pipe.InitBuffer(big, 192 * 1024);
    pipe.InitBuffer(more, 1);  // BREAKS ub-capacity
}
CLEAN(ub_capacity) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> big, more;
    pipe.InitBuffer(big, 192 * 1024 - 32);
    pipe.InitBuffer(more, 1);
}

FAULT(queue_capacity) {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> queue;
    pipe.InitBuffer(queue, 3, 65568);  // BREAKS ub-capacity
}
CLEAN(queue_capacity) {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> queue;
    pipe.InitBuffer(queue, 3, 65536);
}

FAULT(buffer_of_nothing) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 0);  // BREAKS ub-capacity
}
CLEAN(buffer_of_nothing) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 1);
}

FAULT(reserved) {
    Bench b(x, y);
    TBuf<TPosition::VECCALC> big;
    b.pipe.InitBuffer(big, 184 * 1024 - 3 * 1024 + 32);
    b.Fill();
    LocalTensor<uint8_t> mask = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, mask, b.in, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);  // BREAKS ub-reserved
}
CLEAN(reserved) {
    Bench b(x, y);
    TBuf<TPosition::VECCALC> big;
    b.pipe.InitBuffer(big, 184 * 1024 - 3 * 1024);
    b.Fill();
    LocalTensor<uint8_t> mask = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, mask, b.in, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
}

FAULT(reserved_later) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> mask = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, mask, b.in, b.in, SELMODE::VSEL_TENSOR_TENSOR_MODE, kCount);
    TBuf<TPosition::VECCALC> big;
    b.pipe.InitBuffer(big, 184 * 1024 - 3 * 1024 + 32);  // BREAKS ub-capacity
}
CLEAN(reserved_later) {
    Bench b(x, y);
    b.Fill();
    LocalTensor<uint8_t> mask = b.calc.ReinterpretCast<uint8_t>();
    Select(b.out, mask, b.in, b.in, SELMODE::VSEL_CMPMASK_SPR, kCount);
    TBuf<TPosition::VECCALC> big;
    b.pipe.InitBuffer(big, 184 * 1024 - 3 * 1024 + 32);
}

FAULT(buffer_number) {
    TPipe pipe;
    TQue<TPosition::VECIN, 32> first, second;
    TBuf<TPosition::VECCALC> last;
    pipe.InitBuffer(first, 32, 32);
    pipe.InitBuffer(second, 32, 32);
    pipe.InitBuffer(last, 32);  // BREAKS buffer-number
}
CLEAN(buffer_number) {
    TPipe pipe;
    TQue<TPosition::VECIN, 32> first, second;
    TBuf<TPosition::VECCALC> last;
    pipe.InitBuffer(first, 32, 32);
    pipe.InitBuffer(second, 31, 32);
    pipe.InitBuffer(last, 32);
}

FAULT(bounds) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, kCount + 1);  // BREAKS ub-bounds
}
CLEAN(bounds) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, kCount);
}
FAULT(bounds_by_stride) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, 64, 4, 1, 9);  // BREAKS ub-bounds
}
CLEAN(bounds_by_stride) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, 40, 4, 1, 9);
}
FAULT(bounds_of_copy) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {2, 508, 0, 1, 0}, {false, 0, 0, 0});  // BREAKS ub-bounds
}
CLEAN(bounds_of_copy) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {2, 476, 0, 1, 0}, {false, 0, 0, 0});
}
FAULT(bounds_before) {
    Bench b(x, y);
    Duplicate(b.calc[-8], 0.0f, 8);  // BREAKS ub-bounds
}
CLEAN(bounds_before) {
    Bench b(x, y);
    Duplicate(b.calc[8][-8], 0.0f, 8);
}
FAULT(bounds_of_view) {
    Bench b(x, y);
    b.calcBuffer.GetWithOffset<float>(kCount, 32);  // BREAKS ub-bounds
}
CLEAN(bounds_of_view) {
    Bench b(x, y);
    b.calcBuffer.GetWithOffset<float>(kCount - 8, 32);
}

FAULT(alignment) {
    Bench b(x, y);
    Duplicate(b.in[4], 0.0f, 8);  // BREAKS ub-alignment
}
CLEAN(alignment) {
    Bench b(x, y);
    Duplicate(b.in[8], 0.0f, 8);
}
FAULT(alignment_of_source) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in[1], 0.0f, 8);  // BREAKS ub-alignment
}
CLEAN(alignment_of_source) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in[16], 0.0f, 9);
}
FAULT(alignment_of_copy) {
    Bench b(x, y);
    DataCopyPad(b.in[2], b.x, {1, 32, 0, 0, 0}, {false, 0, 0, 0});  // BREAKS ub-alignment
}
CLEAN(alignment_of_copy) {
    Bench b(x, y);
    DataCopyPad(b.in[8], b.x[2], {1, 32, 0, 0, 0}, {false, 0, 0, 0});
}
FAULT(alignment_of_local_copy) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.out, b.in, 12);  // BREAKS ub-alignment
}
CLEAN(alignment_of_local_copy) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.out, b.in, 16);
}
FAULT(alignment_of_maximum) {
    Bench b(x, y);
    b.Fill();
    WholeReduceMax(b.out[1], b.in, 64, 1, 1, 1, 8);  // BREAKS ub-alignment
}
CLEAN(alignment_of_maximum) {
    Bench b(x, y);
    b.Fill();
    WholeReduceMax(b.out[1], b.in, 64, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
}
FAULT(alignment_of_blocks) {
    Bench b(x, y);
    b.Fill();
    BlockReduceMax(b.out[4], b.in, 1, 64, 1, 1, 8);  // BREAKS ub-alignment
}
CLEAN(alignment_of_blocks) {
    Bench b(x, y);
    b.Fill();
    BlockReduceMax(b.out[8], b.in, 1, 64, 1, 1, 8);
}
FAULT(alignment_of_view) {
    Bench b(x, y);
    b.calcBuffer.Get<float>(12);  // BREAKS ub-alignment
}
CLEAN(alignment_of_view) {
    Bench b(x, y);
    b.calcBuffer.Get<float>(16);
}

FAULT(tensor_of_nothing) {
    LocalTensor<float> tensor;
    Duplicate(tensor, 1.0f, 8);  // BREAKS uninitialised
}
CLEAN(tensor_of_nothing) {
    Bench b(x, y);
    LocalTensor<float> tensor;
    tensor = b.in;
    Duplicate(tensor, 1.0f, 8);
}
FAULT(buffer_not_initialised) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    buffer.Get<float>();  // BREAKS uninitialised
}
CLEAN(buffer_not_initialised) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 32);
    buffer.Get<float>();
}
FAULT(tensor_of_pipe_before) {
    Bench b(x, y);
    b.pipe.Reset();
    Duplicate(b.in, 1.0f, 8);  // BREAKS use-after-free
}
CLEAN(tensor_of_pipe_before) {
    Bench b(x, y);
    b.pipe.Reset();
    b.pipe.InitBuffer(b.inBuffer, 32);
    Duplicate(b.inBuffer.Get<float>(), 1.0f, 8);
}
