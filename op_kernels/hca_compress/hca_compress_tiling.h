// How hca_compress cuts its windows into work: sizes and device limits in, a struct out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// A part is some channels of all windows; cores share part 0's windows, then part 1's, ... What a
// core reads of the position bias and of the norm's weight is its parts', so narrow parts save
// traffic where there are few windows, and cost short bursts. The norm needs all channels of a
// window: where there are several parts (`joint`), cores exchange sums of squares, window by
// window, and each keeps its pooled values in UB meanwhile.
struct HcaCompressTiling {
    int32_t element;        // ElementType of kv and gate
    int32_t out_element;    // ElementType of the entries
    int32_t overlap;        // 1: C = 2 D
    int32_t has_bias;
    int32_t has_norm;
    int32_t joint;          // the norm is over several cores' channels
    int32_t bias_stays;     // the bias of a part stays in UB; else it is read with each tile
    int32_t cores;
    int32_t rotary_dim;     // of the last channels, 0: none
    int32_t chunk;          // channels of a part; 0: too large for UB
    int32_t stride;         // elements from row to row in UB
    int32_t fold;           // tokens side by side in a vector's lanes, where a part is narrower
    int32_t tile_rows;      // tokens: whole windows, or a piece of one; a multiple of fold
    int32_t tile_windows;
    int32_t finish_rows;    // entries in a tile of norm and RoPE
    int32_t kept_rows;      // pooled rows in UB
    int64_t windows;        // W, of all sequences
    int64_t round_windows;  // so many are pooled before their norms are exchanged
    int64_t sequences;      // B
    int64_t dim;            // D
    int64_t ratio;
    float norm_eps;
    float norm_factor;      // 1 / D
    int64_t workspace_bytes;
    int64_t ub_bytes;       // what the kernels allocate at most
};

__aicore__ inline int64_t Parts(const HcaCompressTiling &t)
{
    return DivUp<int64_t>(t.dim, t.chunk);
}

__aicore__ inline int64_t Channels(const HcaCompressTiling &t)
{
    return t.overlap != 0 ? 2 * t.dim : t.dim;
}

// Windows whose sums of squares one core adds up, a sector of floats or more.
constexpr int64_t SUMS_GRANULE = 8;

#ifndef ASCEND_KV_ON_DEVICE

struct CompressSizes {
    int64_t windows, sequences, dim, ratio;
    bool overlap, has_bias, has_norm;
    int64_t rotary_dim;  // a multiple of 8, as dim - rotary_dim
    ElementType element, out_element;
    float norm_eps;
};

namespace compress_tiling {

constexpr int64_t BIAS_BYTES = 64 * 1024;  // the most that stays in UB
constexpr int64_t KEPT_BYTES = 32 * 1024;  // the most of pooled rows that wait for their norms
constexpr int64_t MAX_ROWS = 32;  // windows at once
constexpr int64_t FIXED_BYTES = 1024;
// Parts are as wide as keeps what several cores read, or hand over, within this share of the call.
constexpr int64_t SHARED_TRAFFIC = 56;
// A window of a part narrower than a vector repeat fills at least so many repeats.
constexpr int64_t MIN_REPEATS = 8;

inline int64_t Halves(const CompressSizes &s)
{
    return s.overlap ? 2 : 1;
}

// How a width of parts would do.
struct PartPlan {
    int64_t chunk, fold, stride, parts, cores, rounds, round_windows, kept_rows;
    bool joint, bias_stays;
    int64_t shared_bytes;  // read again by further cores, or handed from core to core
};

inline int64_t BiasBytes(const CompressSizes &s, int64_t row)
{
    return s.has_bias ? Halves(s) * s.ratio * row * 4 : 0;
}

// Bytes that have to move.
inline int64_t NeededBytes(const CompressSizes &s)
{
    int64_t window = 2 * Halves(s) * s.ratio * s.dim * ElementBytes(s.element);
    int64_t entry = s.dim * ElementBytes(s.out_element) + s.rotary_dim * 4;
    return s.windows * (window + entry) + BiasBytes(s, s.dim) + (s.has_norm ? s.dim * 4 : 0);
}

// How many parts the cores work on, each counted for itself.
inline int64_t PartsOfCores(int64_t windows, int64_t parts, int64_t cores)
{
    int64_t count = 0;
    for (int64_t core = 0; core < cores; ++core) {
        Range range = PartsRange(windows, parts, cores, core);
        count += range.begin == range.end ? 0 : (range.end - 1) / windows - range.begin / windows + 1;
    }
    return count;
}

inline PartPlan PlanParts(const CompressSizes &s, int64_t chunk, int64_t max_cores)
{
    PartPlan p{};
    p.chunk = chunk;
    p.parts = DivUp(s.dim, chunk);
    p.fold = chunk < LANES && p.parts > 1 ? LANES / chunk : 1;
    p.stride = p.fold > 1 ? chunk : RoundUp(chunk, ROW_ALIGNMENT);
    p.cores = Smaller(max_cores, s.windows * p.parts);
    p.joint = p.parts > 1 && s.has_norm;
    p.bias_stays = s.has_bias && BiasBytes(s, p.stride) <= BIAS_BYTES;
    p.rounds = 1;
    p.round_windows = s.windows;
    if (p.joint) {
        int64_t most = Larger<int64_t>(KEPT_BYTES / (p.stride * 4) * p.cores / p.parts, 1);
        p.rounds = DivUp(s.windows, most);
        p.round_windows = DivUp(s.windows, p.rounds);
        int64_t groups = CommonDivisor(p.parts, p.cores);
        p.kept_rows = DivUp(p.round_windows * (p.parts / groups), p.cores / groups);
    }
    int64_t part = BiasBytes(s, chunk) + (s.has_norm ? chunk * 4 : 0);
    int64_t times = p.cores % p.parts == 0 ? 1 : p.rounds;  // a core with one part keeps it
    p.shared_bytes = (times * PartsOfCores(p.round_windows, p.parts, p.cores) - p.parts) * part;
    if (p.joint) {  // sums written and read, roots written and read
        p.shared_bytes += s.windows * 4 * (3 * p.parts + 1);
    }
    if (s.has_bias && !p.bias_stays) {
        p.shared_bytes += s.windows * BiasBytes(s, s.dim);
    }
    return p;
}

// The next narrower part, 0: none. Parts keep to sectors, and their lanes are full.
inline int64_t Narrower(const CompressSizes &s, int64_t chunk)
{
    if (s.dim % 16 != 0) {
        return 0;
    }
    if (chunk > LANES) {
        return RoundUp(DivUp<int64_t>(chunk, 2), LANES);
    }
    for (int64_t lanes = LANES / 2; lanes >= 16; lanes /= 2) {
        bool full = s.dim % lanes == 0 && s.ratio % (LANES / lanes) == 0;
        if (lanes < chunk && full && s.ratio * lanes >= MIN_REPEATS * LANES) {
            return lanes;
        }
    }
    return 0;
}

// The widest parts that have work for all cores and share little; else what is nearest to it.
inline PartPlan ChooseParts(const CompressSizes &s, int64_t cores)
{
    PartPlan best = PlanParts(s, s.dim, cores);
    for (int64_t chunk = s.dim; chunk != 0; chunk = Narrower(s, chunk)) {
        PartPlan plan = PlanParts(s, chunk, cores);
        bool better = plan.cores > best.cores || plan.shared_bytes < best.shared_bytes;
        best = better && plan.cores >= best.cores ? plan : best;
        if (best.cores == cores && best.shared_bytes * SHARED_TRAFFIC <= NeededBytes(s)) {
            break;
        }
    }
    return best;
}

// Norm and RoPE of `rows` rows, and the exchange of norms (norm.h, finish.h).
inline int64_t FinishBytes(const CompressSizes &s, const PartPlan &p, int64_t rows)
{
    int64_t row = p.stride * 4;
    int64_t turned = Smaller(s.rotary_dim, p.stride) * 4;
    int64_t norm = rows * row + row + LANES * (4 + BLOCK_BYTES);
    int64_t turning = rows * turned * (1 + 3) + 4 * turned;
    int64_t granules = DivUp(DivUp(p.round_windows, SUMS_GRANULE), p.cores);
    int64_t sums = granules * SUMS_GRANULE * 4;
    int64_t kept = RoundUp(p.kept_rows, SUMS_GRANULE) * 4;
    int64_t exchange = p.joint ? 2 * Larger(sums, kept) + Larger(p.parts * sums, kept) : 0;
    return norm + turning + 2 * rows * row + exchange + FIXED_BYTES;
}

// Pooling of tiles of `rows` tokens with `windows` windows (pool.h).
inline int64_t PoolBytes(const CompressSizes &s, const PartPlan &p, int64_t rows, int64_t windows)
{
    int64_t in = 2 * 2 * rows * p.stride * ElementBytes(s.element);
    int64_t floats = (2 * rows + DivUp<int64_t>(rows / p.fold, 2) * p.fold) * p.stride * 4;
    int64_t bias = p.bias_stays ? BiasBytes(s, p.stride) : s.has_bias ? 2 * rows * p.stride * 4 : 0;
    int64_t states = (3 * windows + 1) * p.fold * p.stride * 4;
    int64_t pooled = (p.joint ? p.kept_rows : windows) * p.stride * 4;
    return in + floats + bias + states + pooled + FIXED_BYTES;
}

// Tokens of a tile: as many windows as fit, or an even part of one.
inline int64_t TileRows(const CompressSizes &s, const PartPlan &p, int64_t max_windows, int64_t ub)
{
    int64_t most = Smaller(max_windows * s.ratio, MAX_COPY_BLOCKS) / p.fold;
    int64_t rows = p.fold * Largest(most, [&](int64_t n) {
        return n == 0 || PoolBytes(s, p, n * p.fold, DivUp(n * p.fold, s.ratio)) <= ub;
    });
    if (rows >= s.ratio) {
        return RoundDown(rows, s.ratio);
    }
    return rows == 0 ? 0 : RoundUp(DivUp(s.ratio, DivUp(s.ratio, rows)), p.fold);
}

}  // namespace compress_tiling

// No windows give cores == 0: nothing to launch.
inline HcaCompressTiling TileHcaCompress(const CompressSizes &s, const DeviceLimits &limits)
{
    using namespace compress_tiling;
    HcaCompressTiling t{};
    if (s.windows * s.dim == 0) {
        return t;
    }
    t.element = s.element;
    t.out_element = s.out_element;
    t.overlap = s.overlap ? 1 : 0;
    t.has_bias = s.has_bias ? 1 : 0;
    t.has_norm = s.has_norm ? 1 : 0;
    t.rotary_dim = static_cast<int32_t>(s.rotary_dim);
    t.windows = s.windows;
    t.sequences = s.sequences;
    t.dim = s.dim;
    t.ratio = s.ratio;
    t.norm_eps = s.norm_eps;
    t.norm_factor = 1.0f / static_cast<float>(s.dim);

    int64_t ub = UsableUb(limits);
    PartPlan p = ChooseParts(s, Smaller(limits.cores, MAX_CORES));
    // Tiles of tokens get the most of what a core's bias and waiting rows leave.
    int64_t left = ub - (p.bias_stays ? BiasBytes(s, p.stride) : 0) - p.kept_rows * p.stride * 4;
    int64_t finish_rows = Largest(MAX_ROWS, [&](int64_t n) {
        return n == 0 || FinishBytes(s, p, n) <= left / 3;
    });
    if (finish_rows == 0) {
        return t;
    }
    int64_t finish = FinishBytes(s, p, finish_rows);
    int64_t rows = TileRows(s, p, finish_rows, ub - finish);
    if (rows == 0) {
        return t;
    }
    t.joint = p.joint ? 1 : 0;
    t.bias_stays = p.bias_stays ? 1 : 0;
    t.cores = static_cast<int32_t>(p.cores);
    t.chunk = static_cast<int32_t>(p.chunk);
    t.stride = static_cast<int32_t>(p.stride);
    t.fold = static_cast<int32_t>(p.fold);
    t.tile_rows = static_cast<int32_t>(rows);
    t.tile_windows = static_cast<int32_t>(Larger<int64_t>(rows / s.ratio, 1));
    t.finish_rows = static_cast<int32_t>(finish_rows);
    t.kept_rows = static_cast<int32_t>(p.joint ? p.kept_rows : t.tile_windows);
    t.round_windows = p.round_windows;
    t.workspace_bytes = p.joint ? (p.parts + 1) * RoundUp(p.round_windows, SUMS_GRANULE) * 4 : 0;
    t.ub_bytes = PoolBytes(s, p, t.tile_rows, t.tile_windows) + finish;
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::HcaCompressTiling;  // see common/limits.h
