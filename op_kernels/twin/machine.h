// The simulated vector core: what the API headers report their accesses to. Every rule is checked
// behind these few functions, so the templates in the API headers stay thin.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twin {

struct At {  // where in the kernel's source an API function was called
    const char* file;
    int line;
    // As a default argument: the caller's place, templates included.
    static constexpr At Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
#define TWIN_AT twin::At at = twin::At::Here()

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kReservedBytes =
    8 * 1024;  // at the end of UB, for Select with a scalar or two tensors
constexpr uint32_t kBlock = 32;
constexpr int kEventIds = 8;  // per pair of pipes

enum Pipe : uint8_t { kS, kV, kMte2, kMte3, kPipes };

[[noreturn]] void Violate(const char* rule, At at, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

enum class Place : uint8_t { kNone, kIn, kOut, kCalc };  // the TPosition of a buffer
struct View {  // a local tensor: where it starts and the buffer it must stay in
    uint32_t address = 0;
    uint32_t low = 0, high = 0;
    int32_t buffer = -1;
    uint32_t generation = 0;
    Place place = Place::kNone;
};

// A repeat count as the API takes it: 8 bits. Larger values would be cut off silently.
struct Repeats {
    template <typename I>
    Repeats(I value) : count(static_cast<int64_t>(value)) {}
    int64_t count;
};

struct Lanes {             // which elements of how many repeats an instruction works on
    bool counter = false;  // count elements in a row, strides do not matter
    uint32_t count = 0;
    uint32_t repeats = 1;
    uint32_t prefix = 0;  // the first so many lanes of a repeat; 0: those in mask
    uint64_t mask[2] = {0, 0};
    bool Empty() const { return counter ? count == 0 : repeats == 0; }
    bool Has(uint32_t lane) const { return mask[lane / 64] >> (lane % 64) & 1; }
};
Lanes CountLanes(At at, const char* op, int64_t count);
Lanes MaskLanes(At at, const char* op, uint64_t mask, Repeats repeats, uint32_t lanes_per_repeat);
Lanes BitLanes(At at, const char* op, const uint64_t* mask, Repeats repeats,
               uint32_t lanes_per_repeat);

struct Operand {  // of a vector instruction; strides in blocks of 32 bytes
    View view;
    uint32_t size = 0;  // of an element
    uint32_t block_stride = 1, repeat_stride = 8;
    bool write = false;
    bool accumulates = false;  // may be the result of an earlier repeat
    uint32_t Offset(uint32_t repeat, uint32_t lane) const {
        uint32_t per_block = kBlock / size;
        return (repeat * repeat_stride + lane / per_block * block_stride) * kBlock +
               lane % per_block * size;
    }
};

// One instruction: the constructor issues it on its pipe, the rest reports what it touches.
class Instruction {
  public:
    Instruction(Pipe pipe, const char* op, At at);
    void Read(const View& view, uint32_t offset, uint32_t bytes);
    void Write(const View& view, uint32_t offset, uint32_t bytes);
    void Poison(const View& view, uint32_t offset,
                uint32_t bytes);  // written, with a value nobody may use
    void ReadGlobal(const void* base, const void* address, uint64_t bytes);
    void WriteGlobal(const void* base, const void* address, uint64_t bytes);
    At at;
    const char* op;
    Pipe pipe;
    uint32_t clock, site;
    bool accumulating = false;
};

// Check and count an instruction, all operands at once. Call before computing; nothing to compute
// if lanes.Empty().
void VectorInstruction(const char* op, At at, const Lanes& lanes, Operand* operands, int number);
// Reductions, whose results lie closer together than their operands; result_stride in bytes.
void ReduceInstruction(const char* op, At at, const Lanes& lanes, const Operand& source,
                       const View& dst, uint32_t result_bytes, uint32_t result_stride);
// Of a whole tensor. scratch: null where the instruction needs none. index: the result is value and
// index.
void ReduceAllInstruction(const char* op, At at, const View& src, const Lanes& lanes,
                          const View* scratch, const View& dst, uint32_t size, bool index);
void CreateIndexInstruction(At at, const View& dst, uint32_t count, uint32_t size);
// These compute as well.
void BrcbInstruction(At at, const View& dst, const View& src, Repeats repeats,
                     uint32_t block_stride, uint32_t repeat_stride, uint32_t size);
void GatherInstruction(At at, const View& dst, const View& src, const View& offsets, uint32_t base,
                       const Lanes& lanes, uint32_t repeat_stride, uint32_t size);
uint64_t GatherMaskInstruction(At at, const View& dst, const View& src, int pattern, bool counter,
                               uint32_t mask, uint32_t repeats, uint32_t block_stride,
                               uint32_t repeat_stride, uint32_t size);
// Comparisons write one bit an element, Select reads it.
void CompareInstruction(const char* op, At at, const Lanes& lanes, Operand* sources, int number,
                        const View& dst);
void SelectInstruction(At at, const Lanes& lanes, Operand* operands, int number, const View& mask,
                       bool same_mask, bool reserves);

void CheckUse(const View& view, uint32_t offset, uint32_t bytes, At at, const char* op);
uint8_t* Ub(uint32_t address);

// Queues and buffers of the current core.
int NewBuffers(At at, int number, uint32_t bytes, Place place,
               int free_event);  // index of the first one
View BufferView(int index);
struct QueueState {
    int32_t first = -1, number = 0, cursor = 0, head = 0, used = 0;
    int32_t waiting[64];
};
int AllocBuffer(QueueState& queue, int free_event, At at);
void FreeBuffer(QueueState& queue, const View& view, int free_event, At at);
void EnqueBuffer(QueueState& queue, const View& view, int event, int depth, At at);
int DequeBuffer(QueueState& queue, int event, At at);
void ResetPipe(At at);
void ClosePipe(At at);

// Synchronisation. Events are numbered as AscendC::HardEvent, pipes as pipe_t.
int AllocEvent(int event, At at);
void ReleaseEvent(int event, int id, At at);
int FetchEvent(int event, At at);
void SetEvent(int event, int id, At at);
void WaitEvent(int event, int id, At at);
constexpr int kAllPipes = 6;  // PIPE_ALL
void Barrier(int pipe);
void SyncCores(At at);
void SetKernelType(int type);

void*& PipePointer();  // the TPipe that the kernel constructed last
int BlockIndex();
int BlockNumber();

enum Atomic : uint8_t { kNoAtomic, kAtomicAdd, kAtomicMax, kAtomicMin };
struct Registers {
    Atomic atomic = kNoAtomic;
    uint8_t atomic_kind = 0;
    bool keeps_infinity =
        false;  // CTRL[48]; off: half and bfloat16 results saturate, NaN becomes 0
    bool has_deq_scale = false;
    float deq_scale = 0;
};
Registers& CoreRegisters();
// Where the documentation leaves the result open, the seed of the launch decides.
struct Unspecified {
    bool nan_wins;  // a maximum or minimum lets a NaN through
    bool fused;     // multiply-add rounds once
};
const Unspecified& Choice();
void CleanCache(const void* address, bool everything, At at);

}  // namespace twin
