// Searches that tilings share. Host only.
#pragma once
#include "limits.h"

#ifndef ASCEND_KV_ON_DEVICE

namespace ascend_kv {

// Into how many tiles, of at most `max` of its `length` units, to cut each group, so that the core
// with most to do has least and, if it costs nothing, none has nothing. `small` units cost about
// as much as starting a tile does.
inline int64_t EvenTiles(int64_t groups, int64_t length, int64_t cores, int64_t max, int64_t small)
{
    int64_t best = 0;
    int64_t least = 0;
    int64_t fewest = DivUp(length, max);
    for (int64_t tiles = fewest; tiles <= Smaller(fewest + cores, length); ++tiles) {
        int64_t cost = DivUp(groups * tiles, cores) * (DivUp(length, tiles) + small);
        if (best == 0 || cost <= least) {
            best = tiles;
            least = cost;
        }
    }
    return best;
}

// The largest n from 0 to `most` for which `fits(n)`; small numbers fit if larger do.
template <typename Fits>
inline int64_t Largest(int64_t most, Fits fits)
{
    int64_t low = 0;
    int64_t high = most;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (fits(middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

}  // namespace ascend_kv

#endif  // ASCEND_KV_ON_DEVICE
