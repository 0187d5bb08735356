// Faults within one pipe, and between copies through global memory: what barriers are for.
#include "fault.h"

FAULT(vector_reads_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, kCount);
    Adds(b.out, b.in, 1.0f, kCount);  // BREAKS pipe-barrier
}
CLEAN(vector_reads_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Adds(b.out, b.in, 1.0f, kCount);
}
FAULT(vector_writes_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, kCount);
    Duplicate(b.in[64], 2.0f, 64);  // BREAKS pipe-barrier
}
CLEAN(vector_writes_vector) {
    Bench b(x, y);
    Duplicate(b.in, 1.0f, 64);
    Duplicate(b.in[64], 2.0f, 64);
}
FAULT(vector_writes_what_vector_reads) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in, 1.0f, kCount);
    Duplicate(b.in, 2.0f, 64);  // BREAKS pipe-barrier
}
CLEAN(vector_writes_what_vector_reads) {
    Bench b(x, y);
    b.Fill();
    Adds(b.out, b.in[64], 1.0f, 64);
    Duplicate(b.in, 2.0f, 64);
}
FAULT(copy_writes_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    DataCopy(b.in, b.x, 8);  // BREAKS pipe-barrier
}
CLEAN(copy_writes_copy) {
    Bench b(x, y);
    DataCopy(b.in, b.x, kCount);
    PipeBarrier<PIPE_MTE2>();
    DataCopy(b.in, b.x, 8);
}
FAULT(store_writes_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, 64);
    DataCopy(b.y[56], b.in, 64);  // BREAKS pipe-barrier
}
CLEAN(store_writes_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, 64);
    PipeBarrier<PIPE_MTE3>();
    DataCopy(b.y[56], b.in, 64);
}
FAULT(copy_reads_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, 64);
    DataCopy(b.in, b.y, 64);  // BREAKS pipe-hazard
}
CLEAN(copy_reads_store) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y, b.out, 64);
    Hand<HardEvent::MTE3_MTE2>();
    DataCopy(b.in, b.y, 64);
}
FAULT(store_overwrites_copy) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.in, b.y, 64);
    DataCopy(b.y, b.out, 64);  // BREAKS pipe-hazard
}
CLEAN(store_overwrites_copy) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.in, b.y, 64);
    Hand<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, b.out, 64);
}
