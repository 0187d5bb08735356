// Events used against their contract, and cores that wait for each other. Run on 3 cores.
#include "fault.h"

FAULT(wait_without_set) {
    WaitFlag<HardEvent::MTE2_V>(0);  // BREAKS event-never-set
}
CLEAN(wait_without_set) {
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
}
FAULT(wait_of_other_event) {
    SetFlag<HardEvent::MTE2_V>(1);
    WaitFlag<HardEvent::V_MTE2>(1);  // BREAKS event-never-set
}
CLEAN(wait_of_other_event) {
    SetFlag<HardEvent::MTE2_V>(1);
    SetFlag<HardEvent::V_MTE2>(1);
    WaitFlag<HardEvent::V_MTE2>(1);
    WaitFlag<HardEvent::MTE2_V>(1);
}
FAULT(set_twice) {
    SetFlag<HardEvent::V_S>(2);
    SetFlag<HardEvent::V_S>(2);  // BREAKS event-set-twice
}
CLEAN(set_twice) {
    SetFlag<HardEvent::V_S>(2);
    SetFlag<HardEvent::V_S>(3);
    WaitFlag<HardEvent::V_S>(2);
    WaitFlag<HardEvent::V_S>(3);
}
FAULT(never_waited) {
    SetFlag<HardEvent::V_MTE3>(0);  // BREAKS event-not-waited
}
CLEAN(never_waited) {
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
}
FAULT(event_eight) {
    SetFlag<HardEvent::V_MTE3>(8);  // BREAKS event-ids
}
CLEAN(event_eight) {
    SetFlag<HardEvent::V_MTE3>(7);
    WaitFlag<HardEvent::V_MTE3>(7);
}
FAULT(ids_run_out) {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) {
        pipe.AllocEventID<HardEvent::V_S>();  // BREAKS event-ids
    }
}
CLEAN(ids_run_out) {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) {
        pipe.ReleaseEventID<HardEvent::V_S>(pipe.AllocEventID<HardEvent::V_S>());
    }
}
// FetchEventID does not take the id: a queue may use the same one meanwhile.
FAULT(fetched_id_held) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 32);
    LocalTensor<float> t = queue.AllocTensor<float>();
    TEventID id = pipe.FetchEventID<HardEvent::MTE2_V>();
    SetFlag<HardEvent::MTE2_V>(id);
    queue.EnQue(t);  // BREAKS event-set-twice
}
CLEAN(fetched_id_held) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 32);
    LocalTensor<float> t = queue.AllocTensor<float>();
    TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
    SetFlag<HardEvent::MTE2_V>(id);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    WaitFlag<HardEvent::MTE2_V>(id);
    queue.FreeTensor(t);
}

FAULT(sync_by_some) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    if (GetBlockIdx() != 1) {
        SyncAll();  // BREAKS sync-all-missing
    }
}
CLEAN(sync_by_some) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    SyncAll();
    SyncAll();
}
FAULT(sync_of_plain_kernel) {
    SyncAll();  // BREAKS sync-all-type
}
CLEAN(sync_of_plain_kernel) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    SyncAll();
}
