// Faults in copies: alignment, limits, padding, places.
#include "fault.h"

FAULT(copy_of_odd_length) {
    Bench b(x, y);
    DataCopy(b.in, b.x, 12);  // BREAKS copy-alignment
}
CLEAN(copy_of_odd_length) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 12 * 4, 0, 0, 0}, {false, 0, 0, 0});
}
FAULT(copy_from_odd_address) {
    Bench b(x, y);
    DataCopy(b.in, b.x[4], 16);  // BREAKS copy-alignment
}
CLEAN(copy_from_odd_address) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x[4], {1, 16 * 4, 0, 0, 0}, {false, 0, 0, 0});
}
FAULT(copy_of_many_blocks) {
    TPipe pipe;
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 4096 * 32);
    GlobalTensor<float> from;
    from.SetGlobalBuffer((__gm__ float*)x);
    LocalTensor<float> to = buffer.Get<float>();
    DataCopyPad(to, from, {4096, 4, 0, 0, 0}, {false, 0, 0, 0});  // BREAKS copy-limit
}
CLEAN(copy_of_many_blocks) {
    TPipe pipe;
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 4096 * 32);
    GlobalTensor<float> from;
    from.SetGlobalBuffer((__gm__ float*)x);
    LocalTensor<float> to = buffer.Get<float>();
    DataCopyPad(to, from, {4095, 4, 0, 0, 0}, {false, 0, 0, 0});
}
FAULT(copy_of_half_an_element) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 14, 0, 0, 0}, {false, 0, 0, 0});  // BREAKS copy-limit
}
CLEAN(copy_of_half_an_element) {
    Bench b(x, y);
    GlobalTensor<half> halves;
    halves.SetGlobalBuffer((__gm__ half*)x);
    DataCopyPad(b.in.ReinterpretCast<half>(), halves, {1, 14, 0, 0, 0}, {false, 0, 0, 0});
}
FAULT(local_copy_of_many_blocks) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 64);
    LocalTensor<float> t = buffer.Get<float>();
    Duplicate(t, 1.0f, 8);
    PipeBarrier<PIPE_V>();
    DataCopyParams rows(4096, 0, 0, 0);
    DataCopy(t[8], t, rows);  // BREAKS copy-limit
}
CLEAN(local_copy_of_many_blocks) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 64);
    LocalTensor<float> t = buffer.Get<float>();
    Duplicate(t, 1.0f, 8);
    PipeBarrier<PIPE_V>();
    DataCopyParams rows(1, 1, 0, 0);
    DataCopy(t[8], t, rows);
}
FAULT(padding_too_wide) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 32, 0, 0, 0}, {true, 0, 9, 0});  // BREAKS copy-padding
}
CLEAN(padding_too_wide) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 32, 0, 0, 0}, {true, 8, 8, 0});
}
FAULT(padding_of_eight_bytes) {
    Bench b(x, y);
    GlobalTensor<int64_t> wide;
    wide.SetGlobalBuffer((__gm__ int64_t*)x);
    LocalTensor<int64_t> to = b.in.ReinterpretCast<int64_t>();
    DataCopyPad(to, wide, {1, 8, 0, 0, 0}, {true, 0, 1, -1});  // BREAKS copy-padding
}
CLEAN(padding_of_eight_bytes) {
    Bench b(x, y);
    GlobalTensor<int64_t> wide;
    wide.SetGlobalBuffer((__gm__ int64_t*)x);
    LocalTensor<int64_t> to = b.in.ReinterpretCast<int64_t>();
    DataCopyPad(to, wide, {1, 8, 0, 0, 0}, {true, 0, 1, 0});
}
FAULT(copy_to_calc) {
    Bench b(x, y);
    DataCopyPad(b.calc, b.x, {1, 4, 0, 0, 0}, {false, 0, 0, 0});  // BREAKS copy-place
}
CLEAN(copy_to_calc) {
    Bench b(x, y);
    DataCopyPad(b.out, b.x, {1, 4, 0, 0, 0}, {false, 0, 0, 0});
}
