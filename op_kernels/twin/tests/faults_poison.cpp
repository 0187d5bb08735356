// Faults in reading: bytes of the unified buffer that nothing defined.
#include "fault.h"

FAULT(poison) {
    Bench b(x, y);
    Adds(b.out, b.in, 1.0f, 8);  // BREAKS ub-poison
}
CLEAN(poison) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 8);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, 8);
}
FAULT(poison_last_lane) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 7);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, 8);  // BREAKS ub-poison
}
CLEAN(poison_last_lane) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 7);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, 7);
}
FAULT(poison_after_row) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 20, 0, 0, 0}, {false, 0, 0, 0});
    Hand<HardEvent::MTE2_V>();
    Adds(b.out, b.in, 1.0f, 8);  // BREAKS ub-poison
}
CLEAN(poison_after_row) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x, {1, 20, 0, 0, 0}, {true, 0, 3, 0});
    Hand<HardEvent::MTE2_V>();
    Adds(b.out, b.in, 1.0f, 8);
}
FAULT(poison_around_row) {
    Bench b(x, y);
    b.Fill();
    DataCopyPad(b.in, b.x, {1, 20, 0, 0, 0}, {false, 0, 0, 0});
    Hand<HardEvent::MTE2_V>();
    Adds(b.out, b.in, 1.0f, 6);  // BREAKS ub-poison
}
CLEAN(poison_around_row) {
    Bench b(x, y);
    b.Fill();
    DataCopyPad(b.in, b.x, {1, 20, 0, 0, 0}, {false, 0, 0, 0});
    Hand<HardEvent::MTE2_V>();
    Adds(b.out, b.in, 1.0f, 5);
    Adds(b.out[8], b.in[8], 1.0f, 8);
}
FAULT(poison_stored) {
    Bench b(x, y);
    Duplicate(b.out, 1.0f, 8);
    Hand<HardEvent::V_MTE3>();
    DataCopy(b.y, b.out, 16);  // BREAKS ub-poison
}
CLEAN(poison_stored) {
    Bench b(x, y);
    Duplicate(b.out, 1.0f, 8);
    Hand<HardEvent::V_MTE3>();
    DataCopy(b.y, b.out, 8);
}
FAULT(poison_scratch) {
    Bench b(x, y);
    b.Fill();
    ReduceMax(b.out, b.in, b.calc, 128);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.calc, 0.0f, 2);  // BREAKS ub-poison
}
CLEAN(poison_scratch) {
    Bench b(x, y);
    b.Fill();
    ReduceMax(b.out, b.in, b.calc, 128);
    Adds(b.in, b.out, 0.0f, 1);
}
FAULT(poison_scalar) {
    Bench b(x, y);
    b.in.GetValue(0);  // BREAKS ub-poison
}
CLEAN(poison_scalar) {
    Bench b(x, y);
    b.in.SetValue(0, 1.0f);
    b.in.GetValue(0);
}
