// The tilings with a C interface, for tests and the self-test: sizes in, the struct's bytes out.
#include <cstring>

#include "hca_compress/hca_compress_tiling.h"
#include "hca_decompress/hca_decompress_tiling.h"
#include "kv_cache_dequantize/kv_cache_dequantize_tiling.h"
#include "kv_cache_load/kv_cache_load_tiling.h"
#include "kv_cache_quantize/kv_cache_quantize_tiling.h"
#include "kv_cache_store/kv_cache_store_tiling.h"

using namespace ascend_kv;

static QuantizeSizes ReadQuantize(const int64_t *s)
{
    return {s[0], s[1], s[2], s[3], static_cast<Granularity>(s[4]), s[5],
            static_cast<ElementType>(s[6]), s[7] != 0, s[8] != 0};
}

extern "C" {

// begin and end of what `core` works on.
void core_range(int64_t units, int64_t cores, int64_t core, int64_t granule, int64_t *range)
{
    Range found = CoreRange(units, cores, core, granule);
    range[0] = found.begin;
    range[1] = found.end;
}

// The same of the units of all parts.
void parts_range(int64_t units, int64_t parts, int64_t cores, int64_t core, int64_t *range)
{
    Range found = PartsRange(units, parts, cores, core);
    range[0] = found.begin;
    range[1] = found.end;
}

int64_t core_of(int64_t units, int64_t cores, int64_t unit)
{
    return CoreOf(units, cores, unit);
}

int64_t usable_ub(int64_t ub_bytes)
{
    return UsableUb({1, ub_bytes});
}

// Each returns the size of its struct and fills `out` when it is not null.
int64_t tile_kv_cache_quantize(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        KvCacheQuantizeTiling tiling = TileKvCacheQuantize(ReadQuantize(s), {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(KvCacheQuantizeTiling);
}

int64_t tile_kv_cache_dequantize(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        KvCacheDequantizeTiling tiling = TileKvCacheDequantize(ReadQuantize(s), {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(KvCacheDequantizeTiling);
}

int64_t tile_kv_cache_store(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        StoreSizes sizes{s[0], s[1], s[2], s[3], s[4], s[5], static_cast<StoreMode>(s[6]),
                         static_cast<ElementType>(s[7]), static_cast<ElementType>(s[8]),
                         s[9] != 0, s[10] != 0, s[11] != 0, s[12], s[13]};
        KvCacheStoreTiling tiling = TileKvCacheStore(sizes, {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(KvCacheStoreTiling);
}

int64_t tile_kv_cache_load(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        LoadSizes sizes{s[0], s[1], s[2], s[3], s[4], s[5], static_cast<LoadMode>(s[6]),
                        static_cast<ElementType>(s[7]), static_cast<ElementType>(s[8]),
                        s[9] != 0, s[10] != 0, s[11] != 0, static_cast<LoadOffset>(s[12]), s[13]};
        KvCacheLoadTiling tiling = TileKvCacheLoad(sizes, {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(KvCacheLoadTiling);
}

// norm_eps comes in units of 1e-9.
int64_t tile_hca_compress(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        CompressSizes sizes{s[0], s[1], s[2], s[3], s[4] != 0, s[5] != 0, s[6] != 0, s[7],
                            static_cast<ElementType>(s[8]), static_cast<ElementType>(s[9]),
                            static_cast<float>(static_cast<double>(s[10]) * 1e-9)};
        HcaCompressTiling tiling = TileHcaCompress(sizes, {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(HcaCompressTiling);
}

int64_t tile_hca_decompress(const int64_t *s, int64_t cores, int64_t ub_bytes, void *out)
{
    if (out != nullptr) {
        HcaDecompressTiling tiling = TileHcaDecompress(s[0], s[1], s[2], s[3], {cores, ub_bytes});
        std::memcpy(out, &tiling, sizeof(tiling));
    }
    return sizeof(HcaDecompressTiling);
}

}  // extern "C"
