// The copies themselves: alignment and size rules, the padded rows, atomic stores.
#include "copy.h"

#include <cstring>

#include "state.h"

namespace twin {

static void CheckCopy(At at, bool aligned, const View& local, const void* global, const Rows& rows,
                      Element element) {
    const char* op = aligned ? "DataCopy" : "DataCopyPad";
    if (local.address % kBlock) {
        Violate("ub-alignment", at, "%s with a UB address of %u, not a multiple of 32", op,
                local.address);
    }
    if (local.place == Place::kCalc && !aligned) {
        Violate("copy-place", at,
                "DataCopyPad reaches VECIN and VECOUT buffers, not VECCALC, on the A2");
    }
    if (rows.count > 4095 || rows.length > 2097151u) {
        Violate("copy-limit", at, "%s of %u blocks of %u bytes, at most 4095 of 2097151", op,
                rows.count, rows.length);
    }
    if (rows.length % element.size) {
        Violate("copy-limit", at, "%s of blocks of %u bytes, not whole elements of %u", op,
                rows.length, element.size);
    }
    if (!aligned) return;
    if (rows.length % kBlock) {
        Violate("copy-alignment", at, "DataCopy of %u bytes, not a multiple of 32: use DataCopyPad",
                rows.length);
    }
    if (reinterpret_cast<uint64_t>(global) % kBlock) {
        Violate("copy-alignment", at,
                "DataCopy with a global address %u bytes past a multiple of 32: use DataCopyPad",
                static_cast<unsigned>(reinterpret_cast<uint64_t>(global) % kBlock));
    }
}

static bool IsZero(const void* value, uint32_t size) {
    for (uint32_t i = 0; i < size; ++i) {
        if (static_cast<const uint8_t*>(value)[i]) return false;
    }
    return true;
}

void CopyIn(At at, bool aligned, const View& local, const void* base, const void* global,
            const Rows& rows, const Padding& padding, Element element) {
    CheckCopy(at, aligned, local, global, rows, element);
    if (padding.left > kBlock || padding.right > kBlock) {
        Violate("copy-padding", at, "DataCopyPad pads %u and %u bytes, at most 32 a side",
                padding.left, padding.right);
    }
    if (padding.value && element.size == 8 && !IsZero(padding.value, 8)) {
        Violate("copy-padding", at, "DataCopyPad pads elements of 8 bytes with zero only");
    }
    if (rows.count == 0 || rows.length == 0) return;
    Instruction now(kMte2, aligned ? "DataCopy" : "DataCopyPad", at);
    uint32_t used = padding.left + rows.length + padding.right,
             whole = (used + kBlock - 1) / kBlock * kBlock;
    bool filled = padding.value && (padding.left || padding.right);
    for (uint32_t row = 0; row < rows.count; ++row) {
        const uint8_t* from = static_cast<const uint8_t*>(global) + row * rows.global_stride;
        uint64_t to = row * rows.local_stride;
        if (to + whole > kUbBytes) CheckUse(local, kUbBytes, whole, at, now.op);
        uint32_t offset = static_cast<uint32_t>(to);
        now.ReadGlobal(base, from, rows.length);
        uint8_t* data = nullptr;
        if (filled) {
            now.Write(local, offset, whole);
            data = Ub(local.address + offset);
            for (uint32_t i = 0; i < padding.left; i += element.size)
                std::memcpy(data + i, padding.value, element.size);
            for (uint32_t i = padding.left + rows.length; i + element.size <= whole;
                 i += element.size) {
                std::memcpy(data + i, padding.value, element.size);
            }
        } else {  // what the hardware puts around the row is nothing to rely on
            if (whole != rows.length) now.Poison(local, offset, whole);
            now.Write(local, offset + padding.left, rows.length);
            data = Ub(local.address + offset);
            if (whole != rows.length) std::memset(data, 0xA5, whole);
        }
        std::memcpy(data + padding.left, from, rows.length);
    }
}

static float Combined(float a, float b, Atomic atomic) {
    return atomic == kAtomicAdd ? a + b : atomic == kAtomicMax ? (b > a ? b : a) : (b < a ? b : a);
}
template <typename T>
static void Combine(uint8_t* to, const uint8_t* from, uint32_t bytes, const Registers& registers) {
    for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
        T a, b;
        std::memcpy(&a, to + i, sizeof(T));
        std::memcpy(&b, from + i, sizeof(T));
        if constexpr (std::is_same_v<T, half>) {
            float sum = Combined(HalfValue(a.bits), HalfValue(b.bits), registers.atomic);
            a.bits = HalfResult(sum, Round::kRint, registers.keeps_infinity);
        } else if constexpr (std::is_same_v<T, bfloat16_t>) {
            float sum = Combined(BfloatValue(a.bits), BfloatValue(b.bits), registers.atomic);
            a.bits = BfloatResult(sum, Round::kRint, registers.keeps_infinity);
        } else if constexpr (std::is_same_v<T, float>) {
            a = Combined(a, b, registers.atomic);
        } else {
            a = registers.atomic == kAtomicAdd   ? static_cast<T>(a + b)
                : registers.atomic == kAtomicMax ? (b > a ? b : a)
                                                 : (b < a ? b : a);
        }
        std::memcpy(to + i, &a, sizeof(T));
    }
}

void CopyOut(At at, bool aligned, const void* base, void* global, const View& local,
             const Rows& rows, Element element) {
    CheckCopy(at, aligned, local, global, rows, element);
    const Registers& registers = g_core->registers;
    if (registers.atomic && registers.atomic_kind != element.kind) {
        Violate("atomic-type", at, "%s of another type than the SetAtomic call before it",
                aligned ? "DataCopy" : "DataCopyPad");
    }
    if (rows.count == 0 || rows.length == 0) return;
    Instruction now(kMte3, aligned ? "DataCopy" : "DataCopyPad", at);
    for (uint32_t row = 0; row < rows.count; ++row) {
        uint8_t* to = static_cast<uint8_t*>(global) + row * rows.global_stride;
        uint64_t from = row * rows.local_stride;
        if (from + rows.length > kUbBytes) CheckUse(local, kUbBytes, rows.length, at, now.op);
        now.Read(local, static_cast<uint32_t>(from), rows.length);
        now.WriteGlobal(base, to, rows.length);
        const uint8_t* data = Ub(local.address + static_cast<uint32_t>(from));
        if (!registers.atomic) {
            std::memcpy(to, data, rows.length);
            continue;
        }
        switch (element.kind) {
            case kF32: Combine<float>(to, data, rows.length, registers); break;
            case kF16: Combine<half>(to, data, rows.length, registers); break;
            case kBf16: Combine<bfloat16_t>(to, data, rows.length, registers); break;
            case kI32: Combine<int32_t>(to, data, rows.length, registers); break;
            case kI16: Combine<int16_t>(to, data, rows.length, registers); break;
            default: Combine<int8_t>(to, data, rows.length, registers); break;
        }
    }
}

void CopyLocal(At at, const View& to, const View& from, uint32_t count, uint32_t length,
               uint32_t to_stride, uint32_t from_stride) {
    if (to.address % kBlock || from.address % kBlock || length % kBlock) {
        Violate("ub-alignment", at,
                "DataCopy within UB of %u bytes from %u to %u: all must be multiples of 32", length,
                from.address, to.address);
    }
    if (count > 4095) Violate("copy-limit", at, "DataCopy of %u blocks, at most 4095", count);
    if (count == 0 || length == 0) return;
    Instruction now(kV, "DataCopy", at);
    for (uint32_t row = 0; row < count; ++row) {
        now.Read(from, row * from_stride, length);
        now.Write(to, row * to_stride, length);
        std::memmove(Ub(to.address + row * to_stride), Ub(from.address + row * from_stride),
                     length);
    }
    g_core->counters.vector_repeats += (uint64_t{count} * length + 255) / 256;
}

}  // namespace twin
