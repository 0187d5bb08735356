// Faults with the scalar unit's data cache in front of global memory. Run on 3 cores.
#include "fault.h"

__aicore__ inline void Clean(const GlobalTensor<float>& tensor) {
    DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(tensor);
}

FAULT(cores_share_line) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 8, 1.0f);  // BREAKS cache-line
    Clean(b.y[GetBlockIdx() * 8]);
}
CLEAN(cores_share_line) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);
    Clean(b.y[GetBlockIdx() * 16]);
}
FAULT(copy_into_line_of_other_core) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() == 0) {
        b.y.SetValue(0, 1.0f);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(b.y[8], b.out, 8);  // BREAKS cache-line
    }
    SyncAll();
    Clean(b.y);
}
CLEAN(copy_into_line_of_other_core) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    b.Fill();
    if (GetBlockIdx() == 0) {
        b.y.SetValue(0, 1.0f);
        Clean(b.y);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(b.y[8], b.out, 8);
    }
}
FAULT(store_not_cleaned) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);  // BREAKS cache-not-cleaned
}
CLEAN(store_not_cleaned) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);
    DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(b.y);
}
// Cleaning goes from the address to the end of its line, no further back.
FAULT(cleaned_from_the_middle) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16 + 3, 1.0f);  // BREAKS cache-not-cleaned
    Clean(b.y[GetBlockIdx() * 16 + 8]);
}
CLEAN(cleaned_from_the_middle) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16 + 3, 1.0f);
    Clean(b.y[GetBlockIdx() * 16 + 2]);
}
FAULT(copy_reads_dirty) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);
    Hand<HardEvent::S_MTE2>();
    DataCopy(b.in, b.y[GetBlockIdx() * 16], 8);  // BREAKS cache-not-cleaned
}
CLEAN(copy_reads_dirty) {
    Bench b(x, y);
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);
    Clean(b.y[GetBlockIdx() * 16]);
    Hand<HardEvent::S_MTE2>();
    DataCopy(b.in, b.y[GetBlockIdx() * 16], 8);
}
FAULT(copy_beside_dirty) {
    Bench b(x, y);
    b.Fill();
    b.y.SetValue(GetBlockIdx() * 16, 1.0f);
    DataCopy(b.y[GetBlockIdx() * 16 + 8], b.out, 8);  // BREAKS cache-not-cleaned
}
CLEAN(copy_beside_dirty) {
    Bench b(x, y);
    b.Fill();
    b.y.SetValue(GetBlockIdx() * 64, 1.0f);
    DataCopy(b.y[GetBlockIdx() * 64 + 16], b.out, 8);
    Clean(b.y[GetBlockIdx() * 64]);
}
FAULT(other_core_reads_dirty) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    if (GetBlockIdx() == 0) {
        b.y.SetValue(0, 1.0f);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        b.y.GetValue(0);  // BREAKS cache-not-cleaned
    }
    SyncAll();
    Clean(b.y);
}
CLEAN(other_core_reads_dirty) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    if (GetBlockIdx() == 0) {
        b.y.SetValue(0, 1.0f);
        Clean(b.y);
    }
    SyncAll();
    b.y.GetValue(0);
}
FAULT(other_core_stores_beside_dirty) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    if (GetBlockIdx() == 0) {
        b.y.SetValue(0, 1.0f);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        b.y.SetValue(1, 1.0f);  // BREAKS cache-not-cleaned
    }
    SyncAll();
    Clean(b.y);
}
CLEAN(other_core_stores_beside_dirty) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Bench b(x, y);
    for (int core = 0; core < 2; ++core) {
        if (GetBlockIdx() == core) {
            b.y.SetValue(core, 1.0f);
            Clean(b.y);
        }
        SyncAll();
    }
}
FAULT(stale_copy) {
    Bench b(x, y);
    b.Fill();
    GlobalTensor<float> mine = b.y[GetBlockIdx() * 16];
    mine.GetValue(0);
    DataCopy(mine, b.out, 8);
    Hand<HardEvent::MTE3_S>();
    mine.GetValue(0);  // BREAKS cache-stale
}
CLEAN(stale_copy) {
    Bench b(x, y);
    b.Fill();
    GlobalTensor<float> mine = b.y[GetBlockIdx() * 16];
    mine.GetValue(0);
    DataCopy(mine, b.out, 8);
    Hand<HardEvent::MTE3_S>();
    Clean(mine);
    mine.GetValue(0);
    mine.GetValue(1);
}
FAULT(scalar_reads_own_store) {
    Bench b(x, y);
    b.Fill();
    GlobalTensor<float> mine = b.y[GetBlockIdx() * 16];
    DataCopy(mine, b.out, 8);
    mine.GetValue(0);  // BREAKS pipe-hazard
}
CLEAN(scalar_reads_own_store) {
    Bench b(x, y);
    b.Fill();
    GlobalTensor<float> mine = b.y[GetBlockIdx() * 16];
    DataCopy(mine, b.out, 8);
    Hand<HardEvent::MTE3_S>();
    mine.GetValue(0);
}
