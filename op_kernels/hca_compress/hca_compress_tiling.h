// How hca_compress cuts its windows into work: sizes and device limits in, a struct out.
#pragma once
#include "../common/tile_search.h"

namespace ascend_kv {

// One launch (hca_compress) where each core takes whole windows, all their channels. Where the
// position bias of all channels does not stay in UB, or there are fewer windows than cores, two:
// hca_compress_pool takes some channels of a window and leaves them in the workspace [W, D]
// float32, hca_compress_finish makes entries of its rows.
struct HcaCompressTiling {
    int32_t element;        // ElementType of kv and gate
    int32_t out_element;    // ElementType of the entries
    int32_t overlap;        // 1: C = 2 D
    int32_t has_bias;
    int32_t has_norm;
    int32_t split;          // two launches
    int32_t bias_stays;     // the bias of a part stays in UB; else it is read with each tile
    int32_t cores;
    int32_t finish_cores;
    int32_t rotary_dim;     // of the last channels, 0: none
    int32_t chunk;          // channels of a part; 0: too large for UB
    int32_t stride;         // elements from row to row in UB, of a part
    int32_t row_stride;     // the same, of an entry
    int32_t tile_rows;      // tokens: whole windows, or a piece of one
    int32_t tile_windows;
    int32_t finish_rows;    // entries in a tile of the finish
    int64_t windows;        // W, of all sequences
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
constexpr int64_t MAX_TILE_WINDOWS = 8;
constexpr int64_t MAX_FINISH_ROWS = 8;
constexpr int64_t FIXED_BYTES = 1024;

inline int64_t BiasBytes(const CompressSizes &s, int64_t chunk)
{
    int64_t halves = s.overlap ? 2 : 1;
    return s.has_bias ? halves * s.ratio * RoundUp(chunk, ROW_ALIGNMENT) * 4 : 0;
}

// Norm and RoPE of `rows` entries (finish.h).
inline int64_t FinishBytes(const CompressSizes &s, int64_t rows)
{
    int64_t row = RoundUp(s.dim, ROW_ALIGNMENT) * 4;
    int64_t squares = rows * row + row + LANES * (4 + BLOCK_BYTES);
    int64_t turning = rows * s.rotary_dim * 4 * (1 + 3) + 4 * s.rotary_dim * 4;
    return squares + turning + 2 * rows * row + FIXED_BYTES;
}

// Pooling of tiles of `rows` tokens with `windows` windows (pool.h).
inline int64_t PoolBytes(const CompressSizes &s, int64_t chunk, int64_t rows, int64_t windows,
                         bool bias_stays)
{
    int64_t row = RoundUp(chunk, ROW_ALIGNMENT);
    int64_t in = 2 * 2 * rows * row * ElementBytes(s.element);
    int64_t floats = (2 * rows + DivUp<int64_t>(rows, 2)) * row * 4;
    int64_t bias = bias_stays ? BiasBytes(s, chunk) : s.has_bias ? 2 * rows * row * 4 : 0;
    int64_t states = (3 * windows + 1) * row * 4;
    return in + floats + bias + states + 2 * windows * row * 4 + FIXED_BYTES;
}

// Tokens of a tile: as many windows as fit, or an even part of one.
inline int64_t TileRows(const CompressSizes &s, int64_t chunk, int64_t ub, bool bias_stays)
{
    int64_t most = Smaller(MAX_TILE_WINDOWS * s.ratio, MAX_COPY_BLOCKS);
    int64_t rows = Largest(most, [&](int64_t n) {
        return n == 0 || PoolBytes(s, chunk, n, DivUp(n, s.ratio), bias_stays) <= ub;
    });
    if (rows >= s.ratio) {
        return RoundDown(rows, s.ratio);
    }
    return rows == 0 ? 0 : DivUp(s.ratio, DivUp(s.ratio, rows));
}

// Channels of a part: few enough that the bias stays and that there is work for all cores, but at
// least two vector repeats, whose copies are 256 bytes long.
inline int64_t Chunk(const CompressSizes &s, int64_t cores)
{
    int64_t chunk = s.dim;
    while (chunk > 2 * LANES && (BiasBytes(s, chunk) > BIAS_BYTES ||
                                 s.windows * DivUp(s.dim, chunk) < cores)) {
        chunk = RoundUp(DivUp<int64_t>(chunk, 2), LANES);
    }
    return chunk;
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
    t.row_stride = static_cast<int32_t>(RoundUp(s.dim, ROW_ALIGNMENT));

    int64_t ub = UsableUb(limits);
    int64_t cores = Smaller(limits.cores, MAX_CORES);
    int64_t chunk = Chunk(s, cores);
    t.split = chunk < s.dim ? 1 : 0;
    // One launch pools and finishes with the same UB.
    t.finish_rows = static_cast<int32_t>(Largest(MAX_FINISH_ROWS, [&](int64_t n) {
        return n == 0 || FinishBytes(s, n) + n * t.row_stride * 4 * 2 <= ub / 3;
    }));
    int64_t finish = t.split != 0 ? 0 : FinishBytes(s, t.finish_rows);
    t.bias_stays = s.has_bias && BiasBytes(s, chunk) <= BIAS_BYTES ? 1 : 0;
    int64_t rows = TileRows(s, chunk, ub - finish, t.bias_stays != 0);
    if (rows == 0 || t.finish_rows == 0) {
        return t;
    }
    t.chunk = static_cast<int32_t>(chunk);
    t.stride = static_cast<int32_t>(RoundUp(chunk, ROW_ALIGNMENT));
    t.tile_rows = static_cast<int32_t>(rows);
    t.tile_windows = static_cast<int32_t>(Larger<int64_t>(rows / s.ratio, 1));
    if (t.split == 0 && t.tile_windows > t.finish_rows) {
        t.tile_windows = t.finish_rows;
        t.tile_rows = static_cast<int32_t>(t.finish_rows * s.ratio);
    }
    t.cores = static_cast<int32_t>(Smaller(cores, s.windows * Parts(t)));
    t.finish_cores = static_cast<int32_t>(Smaller(cores, s.windows));
    t.workspace_bytes = t.split != 0 ? s.windows * s.dim * 4 : 0;
    int64_t pool = PoolBytes(s, chunk, t.tile_rows, t.tile_windows, t.bias_stays != 0) + finish;
    t.ub_bytes = Larger(pool, FinishBytes(s, t.finish_rows) + 2 * t.finish_rows * t.row_stride * 4);
    return t;
}

#endif  // ASCEND_KV_ON_DEVICE

}  // namespace ascend_kv

using ascend_kv::HcaCompressTiling;  // see common/limits.h
