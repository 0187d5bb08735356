// Faults between pipes: reads and writes of the unified buffer that nothing orders.
#include "fault.h"

FAULT(vector_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-hazard
}
CLEAN(vector_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Hand<HardEvent::MTE2_V>();
    Adds(b.out, b.in, 1.0f, kCount);
}
FAULT(vector_reads_one_byte_of_copy) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, kCount);
    PipeBarrier<PIPE_ALL>();
    DataCopy(b.in[248], b.x, 8);
    Adds(b.out, b.in, 1.0f, 249);  // BREAKS pipe-hazard
}
CLEAN(vector_reads_one_byte_of_copy) {
    Bench b(x, y);
    Duplicate(b.in, 0.0f, kCount);
    PipeBarrier<PIPE_ALL>();
    DataCopy(b.in[248], b.x, 8);
    Adds(b.out, b.in, 1.0f, 248);
}
FAULT(store_reads_vector) {
    Bench b(x, y);
    Duplicate(b.out, 1.0f, kCount);
    DataCopy(b.y, b.out, kCount);  // BREAKS pipe-hazard
}
CLEAN(store_reads_vector) {
    Bench b(x, y);
    Duplicate(b.out, 1.0f, kCount);
    Hand<HardEvent::V_MTE3>();
    DataCopy(b.y, b.out, kCount);
}
FAULT(store_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    DataCopy(b.y, b.in, kCount);  // BREAKS pipe-hazard
}
CLEAN(store_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Hand<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, b.in, kCount);
}
FAULT(vector_overwrites_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, kCount);
    Duplicate(b.out, 1.0f, kCount);  // BREAKS pipe-hazard
}
CLEAN(vector_overwrites_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, kCount);
    Hand<HardEvent::MTE3_V>();
    Duplicate(b.out, 1.0f, kCount);
}
FAULT(copy_overwrites_vector) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in, 1.0f, kCount);
    DataCopy(b.in, b.x, kCount);  // BREAKS pipe-hazard
}
CLEAN(copy_overwrites_vector) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in, 1.0f, kCount);
    Hand<HardEvent::V_MTE2>();
    DataCopy(b.in, b.x, kCount);
}
FAULT(scalar_reads_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, kCount);
    b.in.GetValue(3);  // BREAKS pipe-hazard
}
CLEAN(scalar_reads_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, kCount);
    Hand<HardEvent::V_S>();
    b.in.GetValue(3);
}
FAULT(vector_reads_scalar) {
    Bench b(x, y);
    b.Fill();
    b.in.SetValue(3, 1.0f);
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-hazard
}
CLEAN(vector_reads_scalar) {
    Bench b(x, y);
    b.Fill();
    b.in.SetValue(3, 1.0f);
    Hand<HardEvent::S_V>();
    Adds(b.out, b.in, 1.0f, kCount);
}
FAULT(scalar_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    b.in.GetValue(3);  // BREAKS pipe-hazard
}
CLEAN(scalar_reads_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Hand<HardEvent::MTE2_S>();
    b.in.GetValue(3);
}
FAULT(store_reads_scalar) {
    Bench b(x, y);
    b.Fill();
    b.out.SetValue(3, 1.0f);
    DataCopy(b.y, b.out, kCount);  // BREAKS pipe-hazard
}
CLEAN(store_reads_scalar) {
    Bench b(x, y);
    b.Fill();
    b.out.SetValue(3, 1.0f);
    Hand<HardEvent::S_MTE3>();
    DataCopy(b.y, b.out, kCount);
}
// An event of the right pipes that was set too early orders nothing that came after.
FAULT(event_too_early) {
    Bench b(x, y);
    SetFlag<HardEvent::MTE2_V>(0);
    DataCopy(b.in, b.x, kCount);
    WaitFlag<HardEvent::MTE2_V>(0);
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-hazard
}
CLEAN(event_too_early) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    SetFlag<HardEvent::MTE2_V>(0);
    DataCopy(b.calc, b.x, kCount);
    WaitFlag<HardEvent::MTE2_V>(0);
    Adds(b.out, b.in, 1.0f, kCount);
}
FAULT(wait_too_late) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    SetFlag<HardEvent::MTE2_V>(0);
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-hazard
    WaitFlag<HardEvent::MTE2_V>(0);
}
CLEAN(wait_too_late) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    SetFlag<HardEvent::MTE2_V>(0);
    Duplicate(b.out, 1.0f, kCount);
    WaitFlag<HardEvent::MTE2_V>(0);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, kCount);
}
// Order is handed on: what the vector pipe waited for is done for whoever waits for that pipe.
FAULT(order_handed_on) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Duplicate(b.out, 1.0f, kCount);
    Hand<HardEvent::V_MTE3>();
    DataCopy(b.y, b.in, kCount);  // BREAKS pipe-hazard
}
CLEAN(order_handed_on) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Hand<HardEvent::MTE2_V>();
    Duplicate(b.out, 1.0f, kCount);
    Hand<HardEvent::V_MTE3>();
    DataCopy(b.y, b.in, kCount);
}
// The scalar unit issues everything: what it waited for is done for all that it issues later.
FAULT(order_through_scalar) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Duplicate(b.out, 1.0f, kCount);
    Hand<HardEvent::V_S>();
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-hazard
}
CLEAN(order_through_scalar) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    Duplicate(b.out, 1.0f, kCount);
    Hand<HardEvent::MTE2_S>();
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, kCount);
}
// Queues carry the events: the tensor that EnQue handed over, used before DeQue.
FAULT(queue_bypassed) {
    Bench b(x, y);
    TQue<TPosition::VECIN, 1> queue;
    b.pipe.InitBuffer(queue, 1, 256);
    LocalTensor<float> t = queue.AllocTensor<float>();
    DataCopy(t, b.x, 64);
    queue.EnQue(t);
    Adds(b.out, t, 1.0f, 64);  // BREAKS pipe-hazard
}
CLEAN(queue_bypassed) {
    Bench b(x, y);
    TQue<TPosition::VECIN, 1> queue;
    b.pipe.InitBuffer(queue, 1, 256);
    LocalTensor<float> t = queue.AllocTensor<float>();
    DataCopy(t, b.x, 64);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    Adds(b.out, t, 1.0f, 64);
    queue.FreeTensor(t);
}
FAULT(freed_before_use) {
    Bench b(x, y);
    TQue<TPosition::VECOUT, 1> queue;
    b.pipe.InitBuffer(queue, 1, 256);
    LocalTensor<float> t = queue.AllocTensor<float>();
    Duplicate(t, 1.0f, 64);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    DataCopy(b.y, t, 64);
    Duplicate(t, 2.0f, 64);  // BREAKS pipe-hazard
    queue.FreeTensor(t);
}
CLEAN(freed_before_use) {
    Bench b(x, y);
    TQue<TPosition::VECOUT, 1> queue;
    b.pipe.InitBuffer(queue, 1, 256);
    LocalTensor<float> t = queue.AllocTensor<float>();
    Duplicate(t, 1.0f, 64);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    DataCopy(b.y, t, 64);
    queue.FreeTensor(t);
    t = queue.AllocTensor<float>();
    Duplicate(t, 2.0f, 64);
    queue.FreeTensor(t);
}
