// Faults in global memory: bounds, and cores that touch the same bytes. Run on 3 cores.
#include "fault.h"

FAULT(bounds_global) {
    Bench b(x, y);
    DataCopy(b.in, b.x[kGlobal - kCount + 8], kCount);  // BREAKS gm-bounds
}
CLEAN(bounds_global) {
    Bench b(x, y);
    DataCopy(b.in, b.x[kGlobal - kCount], kCount);
}
FAULT(bounds_below) {
    Bench b(x, y);
    DataCopy(b.in, b.x[-8], 8);  // BREAKS gm-bounds
}
CLEAN(bounds_below) {
    Bench b(x, y);
    DataCopy(b.in, b.x[8][-8], 8);
}
FAULT(bounds_last_row) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x[kGlobal - 32], {2, 64, 4, 0, 0}, {false, 0, 0, 0});  // BREAKS gm-bounds
}
CLEAN(bounds_last_row) {
    Bench b(x, y);
    DataCopyPad(b.in, b.x[kGlobal - 33], {2, 64, 4, 0, 0}, {false, 0, 0, 0});
}
FAULT(tensor_nowhere) {
    Bench b(x, y);
    GlobalTensor<float> nowhere;
    DataCopy(b.in, nowhere, 8);  // BREAKS gm-bounds
}
CLEAN(tensor_nowhere) {
    Bench b(x, y);
    GlobalTensor<float> somewhere;
    somewhere = b.x;
    DataCopy(b.in, somewhere, 8);
}
FAULT(input_written) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.x, b.out, 8);  // BREAKS gm-read-only
}
CLEAN(input_written) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.y[GetBlockIdx() * 8], b.out, 8);
}

FAULT(two_cores_write) {
    Bench b(x, y);
    b.Fill();
    DataCopyPad(b.y[GetBlockIdx() * 3], b.out, {1, 16, 0, 0, 0});  // BREAKS gm-two-cores
}
CLEAN(two_cores_write) {
    Bench b(x, y);
    b.Fill();
    DataCopyPad(b.y[GetBlockIdx() * 3], b.out, {1, 12, 0, 0, 0});
}
FAULT(two_cores_without_sync) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    SyncAll();
    DataCopy(b.y, b.out, 8);  // BREAKS gm-two-cores
}
CLEAN(two_cores_without_sync) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() == 0) {
        DataCopy(b.y, b.out, 8);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(b.y, b.out, 8);
    }
}
FAULT(core_reads_other) {
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() == 0) {
        DataCopy(b.y, b.out, 8);
    } else {
        DataCopy(b.in, b.y, 8);
    }
    // The order of the cores decides which of the two lines it is: BREAKS gm-unsynchronised
}
CLEAN(core_reads_other) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() == 0) {
        DataCopy(b.y, b.out, 8);
    }
    SyncAll();
    DataCopy(b.in, b.y, 8);
}
FAULT(reader_writes) {
    Bench b(x, y);
    b.Fill();
    DataCopy(b.in, b.y, 8);
    Hand<HardEvent::MTE2_MTE3>();
    if (GetBlockIdx() == 1) {
        DataCopy(b.y, b.out, 8);
    }
    // Core 1 has read these bytes, and so have others: BREAKS gm-unsynchronised
}
CLEAN(reader_writes) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    DataCopy(b.in, b.y, 8);
    SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(b.y, b.out, 8);
    }
}
FAULT(atomic_beside_plain) {
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() != 1) {
        SetAtomicAdd<float>();
    }
    DataCopy(b.y, b.out, 8);  // BREAKS gm-two-cores
    SetAtomicNone();
}
CLEAN(atomic_beside_plain) {
    Bench b(x, y);
    b.Fill();
    SetAtomicAdd<float>();
    DataCopy(b.y, b.out, 8);
    SetAtomicNone();
}
FAULT(atomic_of_other_type) {
    Bench b(x, y);
    b.Fill();
    SetAtomicMax<int32_t>();
    DataCopy(b.y, b.out, 8);  // BREAKS atomic-type
}
CLEAN(atomic_of_other_type) {
    Bench b(x, y);
    b.Fill();
    SetAtomicMax<float>();
    DataCopy(b.y, b.out, 8);
}
