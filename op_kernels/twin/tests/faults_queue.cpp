// Faults in the discipline of queues: AllocTensor, EnQue, DeQue, FreeTensor.
#include "fault.h"

struct Queues {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 1> out;
    __aicore__ inline Queues() {
        pipe.InitBuffer(in, 2, 256);
        pipe.InitBuffer(out, 2, 256);
    }
};

FAULT(queue_not_initialised) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    queue.AllocTensor<float>();  // BREAKS uninitialised
}
CLEAN(queue_not_initialised) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 32);
    LocalTensor<float> t = queue.AllocTensor<float>();
    queue.FreeTensor(t);
}

FAULT(exhausted) {
    Queues q;
    for (int i = 0; i < 3; ++i) {
        q.in.AllocTensor<float>();  // BREAKS queue-exhausted
    }
}
CLEAN(exhausted) {
    Queues q;
    for (int i = 0; i < 3; ++i) {
        LocalTensor<float> t = q.in.AllocTensor<float>();
        q.in.FreeTensor(t);
    }
}

FAULT(not_freed) {
    Queues q;
    q.in.AllocTensor<float>();  // BREAKS tensor-not-freed
}
CLEAN(not_freed) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.FreeTensor(t);
}
FAULT(dequeued_not_freed) {
    Queues q;
    q.in.EnQue(q.in.AllocTensor<float>());
    q.in.DeQue<float>();  // BREAKS tensor-not-freed
}
CLEAN(dequeued_not_freed) {
    Queues q;
    q.in.EnQue(q.in.AllocTensor<float>());
    LocalTensor<float> t = q.in.DeQue<float>();
    q.in.FreeTensor(t);
}
FAULT(not_dequeued) {
    Queues q;
    q.in.EnQue(q.in.AllocTensor<float>());  // BREAKS queue-not-empty
}
CLEAN(not_dequeued) {
    Queues q;
    q.in.EnQue(q.in.AllocTensor<float>());
    LocalTensor<float> t = q.in.DeQue<float>();
    q.in.FreeTensor(t);
}

FAULT(free_while_queued) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.EnQue(t);
    q.in.FreeTensor(t);  // BREAKS queue-order
}
CLEAN(free_while_queued) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.EnQue(t);
    t = q.in.DeQue<float>();
    q.in.FreeTensor(t);
}
FAULT(enque_twice) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.EnQue(t);
    q.in.EnQue(t);  // BREAKS queue-order
}
CLEAN(enque_twice) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.EnQue(t);
    t = q.in.DeQue<float>();
    q.in.EnQue(t);
    t = q.in.DeQue<float>();
    q.in.FreeTensor(t);
}
FAULT(depth) {
    Queues q;
    q.out.EnQue(q.out.AllocTensor<float>());
    q.out.EnQue(q.out.AllocTensor<float>());  // BREAKS queue-depth
}
CLEAN(depth) {
    Queues q;
    q.in.EnQue(q.in.AllocTensor<float>());
    q.in.EnQue(q.in.AllocTensor<float>());
    for (int i = 0; i < 2; ++i) {
        LocalTensor<float> t = q.in.DeQue<float>();
        q.in.FreeTensor(t);
    }
}
FAULT(deque_empty) {
    Queues q;
    q.in.DeQue<float>();  // BREAKS queue-empty
}
CLEAN(deque_empty) {
    Queues q;
    if (q.in.HasTensorInQue()) {
        q.in.DeQue<float>();
    }
}
FAULT(foreign) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.out.EnQue(t);  // BREAKS queue-foreign
}
CLEAN(foreign) {
    Queues q;
    LocalTensor<float> t = q.out.AllocTensor<float>();
    q.out.EnQue(t);
    t = q.out.DeQue<float>();
    q.out.FreeTensor(t);
}
FAULT(use_after_free) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.FreeTensor(t);
    Duplicate(t, 0.0f, 8);  // BREAKS use-after-free
}
CLEAN(use_after_free) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    Duplicate(t, 0.0f, 8);
    q.in.FreeTensor(t);
}
FAULT(free_twice) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.FreeTensor(t);
    q.in.FreeTensor(t);  // BREAKS use-after-free
}
CLEAN(free_twice) {
    Queues q;
    LocalTensor<float> t = q.in.AllocTensor<float>();
    q.in.FreeTensor(t);
    t = q.in.AllocTensor<float>();
    q.in.FreeTensor(t);
}

// Each freed buffer holds one of the eight events of its pair of pipes until it is taken again.
FAULT(nine_buffers_freed) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> first, second;
    pipe.InitBuffer(first, 8, 32);
    pipe.InitBuffer(second, 1, 32);
    for (int i = 0; i < 8; ++i) {
        LocalTensor<float> t = first.AllocTensor<float>();
        first.FreeTensor(t);
    }
    LocalTensor<float> t = second.AllocTensor<float>();
    second.FreeTensor(t);  // BREAKS event-ids
}
CLEAN(nine_buffers_freed) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> first;
    TQue<TPosition::VECOUT, 1> second;
    pipe.InitBuffer(first, 8, 32);
    pipe.InitBuffer(second, 1, 32);
    for (int i = 0; i < 8; ++i) {
        LocalTensor<float> t = first.AllocTensor<float>();
        first.FreeTensor(t);
    }
    LocalTensor<float> t = second.AllocTensor<float>();
    second.FreeTensor(t);
}
