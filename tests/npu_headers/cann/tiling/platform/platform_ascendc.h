// Stands in for CANN's header of this name, as far as the host functions use it: an Atlas A2.
#pragma once
#include <cstdint>

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM, RESERVED };

class PlatformAscendC {
public:
    uint32_t GetCoreNumAiv() const { return 48; }
    void GetCoreMemSize(const CoreMemType &type, uint64_t &size) const
    {
        size = type == CoreMemType::UB ? 196608 : 0;
    }
};

class PlatformAscendCManager {
public:
    static PlatformAscendC *GetInstance()
    {
        static PlatformAscendC platform;
        return &platform;
    }
};

}  // namespace platform_ascendc
