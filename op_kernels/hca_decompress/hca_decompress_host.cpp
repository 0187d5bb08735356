// Host function of hca_decompress.
#include "../host/checks.h"
#include "../host/device.h"
#include "../host/hosts.h"
#include "../host/reference.h"
#include "hca_decompress_tiling.h"

#include "aclrtlaunch_hca_decompress.h"

namespace ascend_kv {

at::Tensor HcaDecompressHost(const at::Tensor &entries, at::IntArrayRef lengths, int64_t ratio)
{
    CheckDim("entries", entries, 2, "[entries, head_dim]");
    CheckFloatType("entries", entries.scalar_type());
    ASCEND_KV_REQUIRE(ratio >= 1, "ratio", ratio, "1 or more tokens a window");
    CheckLengths("lengths", lengths);
    int64_t windows = 0;
    for (int64_t length : lengths) {
        windows += length / ratio;
    }
    ASCEND_KV_REQUIRE(entries.size(0) == windows, "entries", entries.sizes(), "[", windows,
                      ", head_dim], as lengths");

    c10::DeviceGuard guard(entries.device());
    HcaDecompressTiling tiling = TileHcaDecompress(windows, entries.size(1), ratio,
                                                   entries.element_size(), Limits());
    at::Tensor rows = at::empty({windows * ratio, entries.size(1)}, entries.options());
    if (tiling.cores == 0) {
        return rows;
    }
    if (tiling.copies == 0) {
        return CallReference("hca_decompress", "an entry too large for the unified buffer", entries,
                             lengths, ratio)[0].toTensor();
    }
    at::Tensor source = entries.contiguous();
    Launch("hca_decompress", aclrtlaunch_hca_decompress, tiling.cores, Address(source),
           Address(rows), tiling);
    return rows;
}

}  // namespace ascend_kv
