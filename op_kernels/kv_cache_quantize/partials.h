// Extremes that several cores found for one group, in the workspace:
//
//     float32 [high, witness, low][groups][share][lanes]
//
// Of the `share` places of a group those of the cores that hold tiles of it are filled, in order,
// from the first.
#pragma once
#include "../common/values.h"
#include "items.h"

namespace ascend_kv {

template <typename Item>
class Partials {
public:
    __aicore__ inline void Init(TPipe &pipe, const KvCacheQuantizeTiling &tiling,
                                GM_ADDR workspace)
    {
        t_ = &tiling;
        workspace_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(workspace));
        in_.Init(pipe, Item::Scales(tiling));
        out_.Init(pipe, Item::Scales(tiling));
    }

    // What this core found for `group`.
    __aicore__ inline void Write(const Scales &scales, int64_t group)
    {
        int64_t place = GetBlockIdx() - CoreWith(group, 0);
        uint32_t count = Item::Scales(*t_);
        out_.Write(workspace_[At(HIGH, group, place)], scales.high, count);
        out_.Write(workspace_[At(WITNESS, group, place)], scales.witness, count);
        if (!scales.Symmetric()) {
            out_.Write(workspace_[At(LOW, group, place)], scales.low, count);
        }
    }

    // What all cores found for `group` -> high, low, witness.
    __aicore__ inline void Merge(const Scales &scales, int64_t group)
    {
        MergeOne<MaxOp>(scales.high, scales.divisor, HIGH, group);
        MergeOne<AddOp>(scales.witness, scales.divisor, WITNESS, group);
        if (!scales.Symmetric()) {
            MergeOne<MinOp>(scales.low, scales.divisor, LOW, group);
        }
    }

private:
    enum Extreme : int64_t { HIGH = 0, WITNESS, LOW };

    template <typename Op>
    __aicore__ inline void MergeOne(const LocalTensor<float> &dst, const LocalTensor<float> &spare,
                                    Extreme extreme, int64_t group)
    {
        uint32_t count = Item::Scales(*t_);
        int64_t places = CoreWith(group, Item::TilesAGroup(*t_) - 1) - CoreWith(group, 0) + 1;
        in_.Read(dst, workspace_[At(extreme, group, 0)], count);
        for (int64_t place = 1; place < places; ++place) {
            in_.Read(spare, workspace_[At(extreme, group, place)], count);
            ApplyTile<Op>(dst, dst, spare, Line(count));
            VectorDone();
        }
    }

    // The core that holds a tile of a group.
    __aicore__ inline int64_t CoreWith(int64_t group, int64_t tile) const
    {
        int64_t tiles = Item::TilesAGroup(*t_);
        return CoreOf(t_->groups * tiles, t_->cores, group * tiles + tile);
    }

    __aicore__ inline int64_t At(Extreme extreme, int64_t group, int64_t place) const
    {
        return ((extreme * t_->groups + group) * t_->share + place) * Item::Lanes(*t_);
    }

    const KvCacheQuantizeTiling *t_;
    GlobalTensor<float> workspace_;
    VectorsIn in_;
    VectorsOut out_;
};

// First of three kernels: each core leaves the extremes of its tiles in the workspace.
template <typename T, typename Item>
class ReduceItems {
public:
    __aicore__ inline explicit ReduceItems(const KvCacheQuantizeTiling &tiling) : t_(tiling) {}

    __aicore__ inline void Process(TPipe &pipe, GM_ADDR x, GM_ADDR workspace)
    {
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(x));
        tiles_.Init(pipe, Item::TileValues(t_));
        pipe.InitBuffer(scratch_, Item::TileValues(t_) * sizeof(float));
        scales_.Init(pipe, Item::Scales(t_), t_.symmetric != 0, false, false);
        partials_.Init(pipe, t_, workspace);
        Range range = ItemsOfCore<Item>(t_);
        int64_t tiles = Item::TilesAGroup(t_);
        for (int64_t number = range.begin; number < range.end; ++number) {
            Item item = Item::Of(t_, number);
            Tile(item, number != range.begin && number % tiles != 0);
            if (number + 1 == range.end || (number + 1) % tiles == 0) {
                partials_.Write(scales_, item.group);
            }
        }
    }

private:
    __aicore__ inline void Tile(const Item &item, bool merge)
    {
        LocalTensor<T> tile = tiles_.Alloc();
        LoadRows(tile, x_[item.at], item.view);
        tiles_.Loaded(tile);
        LocalTensor<float> values = tiles_.Values(item.view);
        FindExtremes(scales_, values, scratch_.Get<float>(), item.Groups(), merge);
        tiles_.Release();
    }

    const KvCacheQuantizeTiling &t_;
    GlobalTensor<T> x_;
    ValueTiles<T> tiles_;
    TBuf<TPosition::VECCALC> scratch_;
    Scales scales_;
    Partials<Item> partials_;
};

// Second of three kernels: scales and zero points out of the workspace.
template <typename Item>
class MergeItems {
public:
    __aicore__ inline explicit MergeItems(const KvCacheQuantizeTiling &tiling) : t_(tiling) {}

    __aicore__ inline void Process(TPipe &pipe, GM_ADDR workspace, GM_ADDR scale,
                                   GM_ADDR zero_point)
    {
        uint32_t count = Item::Scales(t_);
        scale_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(scale));
        zero_point_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(zero_point));
        scales_.Init(pipe, count, t_.symmetric != 0, false, false);
        partials_.Init(pipe, t_, workspace);
        out_.Init(pipe, count);
        Range range = CoreRange(t_.groups, t_.cores, GetBlockIdx(), 1);
        for (int64_t group = range.begin; group < range.end; ++group) {
            partials_.Merge(scales_, group);
            scales_.FromExtremes(count);
            out_.Write(scale_[group * count], scales_.scale, count);
            if (!scales_.Symmetric()) {
                out_.Write(zero_point_[group * count], scales_.zero_point, count);
            }
        }
    }

private:
    const KvCacheQuantizeTiling &t_;
    GlobalTensor<float> scale_;
    GlobalTensor<float> zero_point_;
    VectorsOut out_;
    Scales scales_;
    Partials<Item> partials_;
};

}  // namespace ascend_kv
