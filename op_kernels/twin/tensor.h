// GlobalTensor and LocalTensor: typed windows on global memory and on the unified buffer of this
// core.
#pragma once
#include "machine.h"
#include "types.h"

namespace AscendC {

template <typename T>
class LocalTensor {
  public:
    using PrimType = T;
    LocalTensor() {}

    T GetValue(uint32_t index, TWIN_AT) const {
        twin::Instruction scalar(twin::kS, "GetValue", at);
        scalar.Read(view_, index * sizeof(T), sizeof(T));
        T value;
        std::memcpy(&value, twin::Ub(view_.address + index * sizeof(T)), sizeof(T));
        return value;
    }
    template <typename S>
    void SetValue(uint32_t index, S value, TWIN_AT) const {
        twin::Instruction scalar(twin::kS, "SetValue", at);
        scalar.Write(view_, index * sizeof(T), sizeof(T));
        T typed = static_cast<T>(value);
        std::memcpy(twin::Ub(view_.address + index * sizeof(T)), &typed, sizeof(T));
    }
    LocalTensor operator[](uint32_t offset) const {
        LocalTensor result = *this;
        result.view_.address += offset * sizeof(T);
        result.size_ = offset < size_ ? size_ - offset : 0;
        return result;
    }
    template <typename U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(view_,
                              static_cast<uint32_t>(uint64_t{size_} * sizeof(T) / sizeof(U)));
    }
    uint32_t GetSize() const { return size_; }
    void SetSize(uint32_t size) { size_ = size; }

    // Not part of the API: how the twin makes and reads a tensor.
    LocalTensor(const twin::View& view, uint32_t size) : view_(view), size_(size) {}
    const twin::View& TwinView() const { return view_; }
    uint8_t* TwinData() const { return twin::Ub(view_.address); }

  private:
    twin::View view_;
    uint32_t size_ = 0;
};

template <typename T>
class GlobalTensor {
  public:
    using PrimType = T;
    GlobalTensor() {}
    void SetGlobalBuffer(__gm__ T* buffer, uint64_t size) {
        base_ = address_ = buffer;
        size_ = size;
    }
    void SetGlobalBuffer(__gm__ T* buffer) { SetGlobalBuffer(buffer, 0); }
    const __gm__ T* GetPhyAddr() const { return address_; }
    __gm__ T* GetPhyAddr(uint64_t offset) const { return address_ + offset; }
    uint64_t GetSize() const { return size_; }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor result = *this;
        result.address_ = address_ + offset;
        return result;
    }
    T GetValue(uint64_t offset, TWIN_AT) const {
        twin::Instruction scalar(twin::kS, "GlobalTensor::GetValue", at);
        scalar.ReadGlobal(base_, address_ + offset, sizeof(T));
        return address_[offset];
    }
    void SetValue(uint64_t offset, T value, TWIN_AT) const {
        twin::Instruction scalar(twin::kS, "GlobalTensor::SetValue", at);
        scalar.WriteGlobal(base_, address_ + offset, sizeof(T));
        address_[offset] = value;
    }
    void SetL2CacheHint(CacheMode) {}

    T* TwinBase() const { return base_; }
    T* TwinAddress() const { return address_; }

  private:
    T* base_ = nullptr;
    T* address_ = nullptr;
    uint64_t size_ = 0;
};

}  // namespace AscendC
