// Queues, events and barriers of one core, and what must be in order when a kernel ends.
#include "state.h"

namespace twin {

// In the order of AscendC::HardEvent.
const EventPipes kEventPipes[kEvents] = {
    {kMte2, kV}, {kV, kMte2}, {kMte3, kV}, {kV, kMte3}, {kV, kV},    {kMte3, kMte2}, {kMte2, kMte3},
    {kS, kV},    {kV, kS},    {kS, kMte2}, {kMte2, kS}, {kS, kMte3}, {kMte3, kS}};
const char* const kEventNames[kEvents] = {"MTE2_V",    "V_MTE2",    "MTE3_V", "V_MTE3", "V_V",
                                          "MTE3_MTE2", "MTE2_MTE3", "S_V",    "V_S",    "S_MTE2",
                                          "MTE2_S",    "S_MTE3",    "MTE3_S"};

int FetchEvent(int event, At at) {
    for (int id = 0; id < kEventIds; ++id) {
        if (!(g_core->event_taken[event] >> id & 1)) return id;
    }
    Violate("event-ids", at, "all %d event ids of %s are taken", kEventIds, kEventNames[event]);
}
int AllocEvent(int event, At at) {
    int id = FetchEvent(event, at);
    g_core->event_taken[event] |= 1 << id;
    return id;
}
static void CheckId(int event, int id, At at) {
    if (id < 0 || id >= kEventIds)
        Violate("event-ids", at, "%s has no event id %d, legal are 0 to 7", kEventNames[event], id);
}
void ReleaseEvent(int event, int id, At at) {
    CheckId(event, id, at);
    g_core->event_taken[event] &= ~(1 << id);
}

void SetEvent(int event, int id, At at) {
    CheckId(event, id, at);
    Core& core = *g_core;
    if (core.flag[event][id]) {
        Violate("event-set-twice", at, "SetFlag<%s>(%d) again before WaitFlag, first set at %s:%d",
                kEventNames[event], id, core.flag_at[event][id].file, core.flag_at[event][id].line);
    }
    Pipe source = kEventPipes[event].source;
    core.flag[event][id] = true;
    core.flag_at[event][id] = at;
    Clock& flag = core.flag_clock[event][id];
    flag = core.pipe[source];
    flag.known[source] = core.clock[source];
    core.counters.events++;
}

void WaitEvent(int event, int id, At at) {
    CheckId(event, id, at);
    Core& core = *g_core;
    if (!core.flag[event][id]) {
        Violate("event-never-set", at,
                "WaitFlag<%s>(%d) without a SetFlag before it: the core hangs", kEventNames[event],
                id);
    }
    core.flag[event][id] = false;
    core.pipe[kEventPipes[event].target].Merge(core.flag_clock[event][id]);
}

void Barrier(int pipe) {
    static const int kOfPipe[] = {-1, kV, -1, -1, kMte2, kMte3};
    Core& core = *g_core;
    core.counters.barriers++;
    if (pipe != kAllPipes) {
        int p = kOfPipe[pipe];
        core.pipe[p].known[p] = core.clock[p];
        return;
    }
    for (int p = 0; p < kPipes; ++p) {
        for (int q = 0; q < kPipes; ++q) core.pipe[p].known[q] = core.clock[q];
    }
}

int NewBuffers(At at, int number, uint32_t bytes, Place place, int free_event) {
    Core& core = *g_core;
    if (bytes == 0 || number == 0)
        Violate("ub-capacity", at, "InitBuffer of %d buffers of %u bytes", number, bytes);
    bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    int first = static_cast<int>(core.buffers.size());
    if (uint64_t{bytes} * number + core.ub_used + core.ub_reserved > kUbBytes) {
        Violate("ub-capacity", at,
                "%d buffers of %u bytes with %u bytes in use: more than the %u bytes of UB", number,
                bytes, core.ub_used + core.ub_reserved, kUbBytes);
    }
    if (first + number - core.first_buffer > 64) {
        Violate("buffer-number", at, "%d buffers, a TPipe manages 64",
                first + number - core.first_buffer);
    }
    for (int i = 0; i < number; ++i) {
        Buffer buffer{};
        buffer.address = core.ub_used;
        buffer.bytes = bytes;
        buffer.queue = free_event >= 0;
        buffer.free_event = free_event;
        buffer.place = place;
        buffer.last = at;
        core.buffers.push_back(buffer);
        core.ub_used += bytes;
    }
    uint32_t used = core.ub_used + core.ub_reserved;
    if (used > core.counters.ub_high_water) core.counters.ub_high_water = used;
    return first;
}

View BufferView(int index) {
    const Buffer& buffer = g_core->buffers[index];
    View view;
    view.address = view.low = buffer.address;
    view.high = buffer.address + buffer.bytes;
    view.buffer = index;
    view.generation = buffer.generation;
    view.place = buffer.place;
    return view;
}

static Buffer& QueueBuffer(QueueState& queue, const View& view, const char* op, At at) {
    if (queue.first < 0) Violate("uninitialised", at, "%s on a queue before TPipe::InitBuffer", op);
    if (view.buffer < queue.first || view.buffer >= queue.first + queue.number) {
        Violate("queue-foreign", at, "%s of a tensor that this queue did not allocate", op);
    }
    Buffer& buffer = g_core->buffers[view.buffer];
    if (buffer.generation != view.generation) {
        Violate("use-after-free", at, "%s of a tensor after FreeTensor (%s:%d)", op,
                buffer.last.file, buffer.last.line);
    }
    return buffer;
}

int AllocBuffer(QueueState& queue, int free_event, At at) {
    if (queue.first < 0)
        Violate("uninitialised", at, "AllocTensor on a queue before TPipe::InitBuffer");
    for (int tried = 0; tried < queue.number; ++tried) {
        int index = queue.first + queue.cursor;
        queue.cursor = (queue.cursor + 1) % queue.number;
        Buffer& buffer = g_core->buffers[index];
        if (buffer.state != Buffer::kFree) continue;
        buffer.state = Buffer::kOccupied;
        buffer.last = at;
        if (buffer.free_id >= 0) {
            WaitEvent(free_event, buffer.free_id, at);
            ReleaseEvent(free_event, buffer.free_id, at);
            buffer.free_id = -1;
        }
        return index;
    }
    Violate("queue-exhausted", at,
            "AllocTensor with all %d buffers in use (the next from %s:%d): the core hangs",
            queue.number, g_core->buffers[queue.first + queue.cursor].last.file,
            g_core->buffers[queue.first + queue.cursor].last.line);
}

void FreeBuffer(QueueState& queue, const View& view, int free_event, At at) {
    Buffer& buffer = QueueBuffer(queue, view, "FreeTensor", at);
    if (buffer.state == Buffer::kEnqued) {
        Violate("queue-order", at,
                "FreeTensor of a tensor that still waits in the queue (EnQue at %s:%d)",
                buffer.last.file, buffer.last.line);
    }
    buffer.free_id = AllocEvent(free_event, at);
    SetEvent(free_event, buffer.free_id, at);
    buffer.state = Buffer::kFree;
    buffer.generation++;
    buffer.last = at;
}

void EnqueBuffer(QueueState& queue, const View& view, int event, int depth, At at) {
    Buffer& buffer = QueueBuffer(queue, view, "EnQue", at);
    if (buffer.state == Buffer::kEnqued) {
        Violate("queue-order", at, "EnQue of a tensor that waits in the queue already (%s:%d)",
                buffer.last.file, buffer.last.line);
    }
    if (queue.used >= depth)
        Violate("queue-depth", at, "EnQue into a queue of depth %d that is full", depth);
    queue.waiting[(queue.head + queue.used++) % 64] = view.buffer;
    buffer.state = Buffer::kEnqued;
    buffer.last = at;
    buffer.enque_id = AllocEvent(event, at);
    SetEvent(event, buffer.enque_id, at);
}

int DequeBuffer(QueueState& queue, int event, At at) {
    if (queue.used == 0) Violate("queue-empty", at, "DeQue from an empty queue");
    int index = queue.waiting[queue.head];
    queue.head = (queue.head + 1) % 64;
    queue.used--;
    Buffer& buffer = g_core->buffers[index];
    buffer.state = Buffer::kDequed;
    buffer.last = at;
    WaitEvent(event, buffer.enque_id, at);
    ReleaseEvent(event, buffer.enque_id, at);
    buffer.enque_id = -1;
    return index;
}

// A tensor that was freed leaves its event set; TPipe takes it back.
static void DropBuffers(At at) {
    Core& core = *g_core;
    for (Buffer& buffer : core.buffers) {
        if (!buffer.queue) continue;
        if (buffer.state != Buffer::kFree) {
            const char* what = buffer.state == Buffer::kEnqued ? "EnQue without DeQue"
                                                               : "AllocTensor without FreeTensor";
            Violate(buffer.state == Buffer::kEnqued ? "queue-not-empty" : "tensor-not-freed",
                    buffer.last, "%s", what);
        }
        if (buffer.free_id >= 0) {
            WaitEvent(buffer.free_event, buffer.free_id, at);
            ReleaseEvent(buffer.free_event, buffer.free_id, at);
            buffer.free_id = -1;
        }
    }
}

void ResetPipe(At at) {
    DropBuffers(at);
    for (Buffer& buffer : g_core->buffers) {
        buffer.generation++;  // tensors of the pipe before are void
        buffer.queue = false;
    }
    g_core->ub_reserved = 0;
    g_core->first_buffer = static_cast<int>(g_core->buffers.size());
    g_core->ub_used = 0;
}
void ClosePipe(At at) {
    DropBuffers(at);
    Barrier(kAllPipes);
}

void CheckCoreEnd(At at) {
    DropBuffers(at);
    CheckCacheEnd();
    for (int event = 0; event < kEvents; ++event) {
        for (int id = 0; id < kEventIds; ++id) {
            if (g_core->flag[event][id]) {
                Violate("event-not-waited", g_core->flag_at[event][id],
                        "SetFlag<%s>(%d) has no WaitFlag", kEventNames[event], id);
            }
        }
    }
}

void SetKernelType(int type) { g_core->kernel_type = type; }

void SyncCores(At at) {
    if (g_core->kernel_type != 2) {  // KERNEL_TYPE_MIX_AIV_1_0
        Violate("sync-all-type", at,
                "SyncAll needs KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0) in the kernel");
    }
    Barrier(kAllPipes);
    YieldAtSync(at);
}

}  // namespace twin
