// Host function of kv_cache_dequantize.
#include "../host/device.h"
#include "../host/granularity.h"
#include "../host/hosts.h"
#include "../host/reference.h"
#include "kv_cache_dequantize_tiling.h"

#include "aclrtlaunch_kv_cache_dequantize.h"

namespace ascend_kv {
namespace {

// The coarsest granularity whose scales differ wherever these do; null if there is none.
const GranularityShape *FindShape(const at::Tensor &scale, int64_t group_size)
{
    if (group_size > 0) {
        return &GRANULARITIES[5];
    }
    for (const GranularityShape &shape : GRANULARITIES) {
        bool fits = shape.granularity != Granularity::GROUP;
        for (size_t i = 0; i < 4; ++i) {
            fits = fits && (shape.kept[i] || scale.size(i) == 1);
        }
        if (fits) {
            return &shape;
        }
    }
    return nullptr;
}

}  // namespace

at::Tensor KvCacheDequantizeHost(const at::Tensor &codes, const at::Tensor &scale,
                                 const OptionalTensor &zero_point, int64_t group_size,
                                 std::optional<at::ScalarType> dtype)
{
    if (!HasKernels(codes.scalar_type())) {
        return CallReference("kv_cache_dequantize", NO_KERNEL, codes, scale, zero_point, group_size,
                             dtype)[0].toTensor();
    }
    CheckDim("codes", codes, 4, "[batch, kv_heads, tokens, head_dim]");
    CheckType("codes", codes, at::kChar);
    at::ScalarType type = dtype.value_or(at::kFloat);
    CheckFloatType("dtype", type);
    std::array<int64_t, 4> most{codes.size(0), codes.size(1), codes.size(2), codes.size(3)};
    if (group_size != 0) {
        CheckGroupSize(group_size, codes.size(3));
        most[3] /= group_size;
    }
    CheckScale("scale", scale, most);
    CheckDevice("scale", scale, codes);
    bool symmetric = !zero_point || (zero_point->dim() == 1 && zero_point->size(0) == 0);
    if (!symmetric) {
        CheckScale("zero_point", *zero_point, scale.sizes());
        CheckDevice("zero_point", *zero_point, codes);
    }

    c10::DeviceGuard guard(codes.device());
    at::Tensor values = at::empty(codes.sizes(), codes.options().dtype(type));
    if (codes.numel() == 0) {
        return values;
    }
    const char *reason = "scales that differ by token and channel";
    const GranularityShape *shape = FindShape(scale, group_size);
    KvCacheQuantizeTiling tiling{};
    if (shape != nullptr) {
        tiling = TileKvCacheDequantize({codes.size(0), codes.size(1), codes.size(2), codes.size(3),
                                        shape->granularity, group_size, ElementOf(type), symmetric,
                                        true},
                                       Limits());
        reason = WhyNoQuantizeKernel(tiling);
    }
    if (reason != nullptr) {
        return CallReference("kv_cache_dequantize", reason, codes, scale, zero_point, group_size,
                             dtype)[0].toTensor();
    }
    std::array<int64_t, 4> groups = ScaleShape(*shape, codes.sizes(), group_size);
    at::Tensor source = codes.contiguous();
    at::Tensor scales = WriteOut(scale, groups);
    at::Tensor zeros = symmetric ? at::Tensor() : WriteOut(zero_point, groups);
    Launch("kv_cache_dequantize", aclrtlaunch_kv_cache_dequantize, tiling.cores, Address(source),
           Address(scales), Address(zeros), Address(values), tiling);
    return values;
}

}  // namespace ascend_kv
