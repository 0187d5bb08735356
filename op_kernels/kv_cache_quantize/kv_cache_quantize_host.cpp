// Host function of kv_cache_quantize.
#include <ATen/ops/zeros.h>

#include "../host/device.h"
#include "../host/granularity.h"
#include "../host/hosts.h"
#include "../host/reference.h"
#include "kv_cache_quantize_tiling.h"

#include "aclrtlaunch_kv_cache_quantize.h"
#include "aclrtlaunch_kv_cache_quantize_reduce.h"
#include "aclrtlaunch_kv_cache_quantize_scales.h"

namespace ascend_kv {
namespace {

const GranularityShape &FindGranularity(c10::string_view name)
{
    for (const GranularityShape &shape : GRANULARITIES) {
        if (name == shape.name) {
            return shape;
        }
    }
    ASCEND_KV_REQUIRE(false, "granularity", name, "layer, head, token, token_head, channel, group");
}

void CheckGiven(const at::Tensor &x, bool symmetric, const OptionalTensor &scale,
                const OptionalTensor &zero_point, at::IntArrayRef groups)
{
    ASCEND_KV_REQUIRE(!zero_point || (scale && !symmetric), "zero_point", zero_point->sizes(),
                      "None where symmetric, and without scale");
    if (!scale) {
        return;
    }
    CheckScale("scale", *scale, groups);
    CheckDevice("scale", *scale, x);
    ASCEND_KV_REQUIRE(zero_point || symmetric, "zero_point", "None",
                      "a tensor as scale, where asymmetric and static");
    if (zero_point) {
        CheckScale("zero_point", *zero_point, scale->sizes());
        CheckDevice("zero_point", *zero_point, x);
    }
}

void LaunchQuantize(const at::Tensor &x, const at::Tensor &codes, const at::Tensor &scale,
                    const at::Tensor &zero_point, const KvCacheQuantizeTiling &tiling)
{
    void *zeros = tiling.symmetric != 0 ? nullptr : Address(zero_point);
    if (tiling.passes == 3) {
        at::Tensor workspace = Workspace(tiling.workspace_bytes, x);
        Launch("kv_cache_quantize_reduce", aclrtlaunch_kv_cache_quantize_reduce, tiling.cores,
               Address(x), Address(workspace), tiling);
        Launch("kv_cache_quantize_scales", aclrtlaunch_kv_cache_quantize_scales, tiling.cores,
               Address(workspace), Address(scale), zeros, tiling);
    }
    Launch("kv_cache_quantize", aclrtlaunch_kv_cache_quantize, tiling.cores, Address(x),
           Address(codes), Address(scale), zeros, tiling);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> KvCacheQuantizeHost(
    const at::Tensor &x, c10::string_view granularity, bool symmetric, const OptionalTensor &scale,
    const OptionalTensor &zero_point, int64_t group_size, c10::string_view storage)
{
    if (storage != "int8") {
        auto results = CallReference("kv_cache_quantize", NO_KERNEL, x, granularity, symmetric,
                                     scale, zero_point, group_size, storage);
        return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
    }
    CheckDim("x", x, 4, "[batch, kv_heads, tokens, head_dim]");
    CheckFloatType("x", x.scalar_type());
    const GranularityShape &shape = FindGranularity(granularity);
    if (shape.granularity == Granularity::GROUP) {
        CheckGroupSize(group_size, x.size(3));
    } else {
        ASCEND_KV_REQUIRE(group_size == 0, "group_size", group_size, "0 with granularity ",
                          granularity);
    }
    std::array<int64_t, 4> groups = ScaleShape(shape, x.sizes(), group_size);
    CheckGiven(x, symmetric, scale, zero_point, groups);

    c10::DeviceGuard guard(x.device());
    KvCacheQuantizeTiling tiling = TileKvCacheQuantize(
        {x.size(0), x.size(1), x.size(2), x.size(3), shape.granularity, group_size,
         ElementOf(x.scalar_type()), symmetric, scale.has_value()},
        Limits());
    if (x.numel() != 0) {
        if (const char *reason = WhyNoQuantizeKernel(tiling)) {
            auto results = CallReference("kv_cache_quantize", reason, x, granularity, symmetric,
                                         scale, zero_point, group_size, storage);
            return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
        }
    }
    at::TensorOptions floats = x.options().dtype(at::kFloat);
    at::Tensor codes = at::empty(x.sizes(), x.options().dtype(at::kChar));
    at::Tensor scales = WriteOut(scale, groups);
    at::Tensor zeros = WriteOut(zero_point, groups);
    if (!scale) {
        // An empty group has no largest value: its scale is 0.
        auto make = [&] { return x.numel() == 0 ? at::zeros(groups, floats) : at::empty(groups, floats); };
        scales = make();
        zeros = symmetric ? at::Tensor() : make();
    }
    if (x.numel() != 0) {
        LaunchQuantize(x.contiguous(), codes, scales, zeros, tiling);
    }
    // The results of an operator are its own: a given scale comes back as a copy.
    at::Tensor none = at::empty({0}, floats);
    if (scale) {
        return {codes, scale->clone(), zero_point ? zero_point->clone() : none};
    }
    return {codes, scales, symmetric ? none : zeros};
}

}  // namespace ascend_kv
