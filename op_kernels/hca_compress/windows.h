// Which windows a core works on, and where their tokens lie in the packed kv and gate [T, C].
#pragma once
#include "../common/values.h"
#include "hca_compress_tiling.h"

namespace ascend_kv {

// A row of the table of sequences, int32 [B, 4] in global memory.
enum SequenceField : uint32_t { FIRST_TOKEN = 0, FIRST_ENTRY, FIRST_WINDOW, SEQUENCE_FIELDS = 4 };

// Windows of one sequence that follow each other.
struct WindowRun {
    int64_t sequence;
    int64_t entry;    // row of the result of the first window
    int64_t count;
    int64_t token;    // row of kv of the first window's first token
    int64_t window;   // index of the first window in its sequence, earlier calls included
    bool first;       // it is the sequence's first window in this call
};

// Walks entries `begin` to `end` in runs.
class WindowRuns {
public:
    __aicore__ inline WindowRuns(const HcaCompressTiling &tiling, GM_ADDR sequences,
                                 int64_t begin, int64_t end)
        : t_(tiling), sequence_(0), entry_(begin), end_(end)
    {
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(sequences));
    }

    __aicore__ inline bool Valid() const { return entry_ < end_; }

    // Whether the next window is its sequence's first in this call.
    __aicore__ inline bool AtStart()
    {
        while (EntriesEnd(sequence_) <= entry_) {
            ++sequence_;
        }
        return entry_ == Field(sequence_, FIRST_ENTRY);
    }

    // At most `most` windows.
    __aicore__ inline WindowRun Take(int64_t most)
    {
        bool first = AtStart();
        int64_t inside = entry_ - Field(sequence_, FIRST_ENTRY);
        int64_t count = Smaller(Smaller(EntriesEnd(sequence_), end_) - entry_, most);
        WindowRun run{sequence_,
                      entry_,
                      count,
                      Field(sequence_, FIRST_TOKEN) + inside * t_.ratio,
                      Field(sequence_, FIRST_WINDOW) + inside,
                      first};
        entry_ += count;
        return run;
    }

private:
    __aicore__ inline int64_t Field(int64_t sequence, uint32_t field)
    {
        return table_.GetValue(sequence * SEQUENCE_FIELDS + field);
    }

    __aicore__ inline int64_t EntriesEnd(int64_t sequence)
    {
        return sequence + 1 < t_.sequences ? Field(sequence + 1, FIRST_ENTRY) : t_.windows;
    }

    const HcaCompressTiling &t_;
    GlobalTensor<int32_t> table_;
    int64_t sequence_;
    int64_t entry_;
    int64_t end_;
};

}  // namespace ascend_kv
