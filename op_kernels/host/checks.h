// What host functions say about their arguments: a wrong one is refused by name, with what was
// given and what is legal, as ascend_kv/errors.py does. Plain torch, no device is asked.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "../common/limits.h"

namespace ascend_kv {

using OptionalTensor = std::optional<at::Tensor>;

// A ValueError in Python.
#define ASCEND_KV_REQUIRE(holds, field, given, ...) \
    TORCH_CHECK_VALUE(holds, field, ": got ", given, "; legal: ", __VA_ARGS__)

inline bool IsFloatType(at::ScalarType type)
{
    return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat;
}

// Whether kernels read and write what is stored so: not FP8, nor INT4, whose bytes are Byte.
inline bool HasKernels(at::ScalarType type)
{
    return type != at::kByte && type != at::kFloat8_e4m3fn && type != at::kFloat8_e5m2;
}
constexpr const char *NO_KERNEL = "FP8 and INT4";

inline bool IsIndexType(at::ScalarType type)
{
    return type == at::kInt || type == at::kLong;
}

inline ElementType ElementOf(at::ScalarType type)
{
    TORCH_INTERNAL_ASSERT(IsFloatType(type) || type == at::kChar);
    return type == at::kHalf ? HALF : type == at::kBFloat16 ? BFLOAT16 : type == at::kFloat ? FLOAT : INT8;
}

inline void CheckDevice(const char *field, const at::Tensor &tensor, const at::Tensor &as)
{
    ASCEND_KV_REQUIRE(tensor.device() == as.device(), field, tensor.device(), as.device());
}

inline void CheckDim(const char *field, const at::Tensor &tensor, int64_t dim, const char *legal)
{
    ASCEND_KV_REQUIRE(tensor.dim() == dim, field, tensor.sizes(), legal);
}

inline void CheckShape(const char *field, const at::Tensor &tensor, at::IntArrayRef shape)
{
    ASCEND_KV_REQUIRE(tensor.sizes() == shape, field, tensor.sizes(), shape);
}

inline void CheckType(const char *field, const at::Tensor &tensor, at::ScalarType type)
{
    ASCEND_KV_REQUIRE(tensor.scalar_type() == type, field, tensor.scalar_type(), type);
}

inline void CheckFloatType(const char *field, at::ScalarType type)
{
    ASCEND_KV_REQUIRE(IsFloatType(type), field, type, "Half, BFloat16, Float");
}

inline void CheckIndexType(const char *field, const at::Tensor &tensor)
{
    ASCEND_KV_REQUIRE(IsIndexType(tensor.scalar_type()), field, tensor.scalar_type(), "Int, Long");
}

// Float32 and of a shape that broadcasts to `shape`.
inline void CheckScale(const char *field, const at::Tensor &scale, at::IntArrayRef shape)
{
    bool fits = scale.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) {
        fits = scale.size(i) == 1 || scale.size(i) == shape[i];
    }
    ASCEND_KV_REQUIRE(fits, field, scale.sizes(), shape, ", any of them as 1");
    CheckType(field, scale, at::kFloat);
}

// A list of lengths in tokens; returns the largest.
inline int64_t CheckLengths(const char *field, at::IntArrayRef lengths)
{
    int64_t longest = 0;
    for (int64_t length : lengths) {
        ASCEND_KV_REQUIRE(length >= 0, field, length, "0 or more tokens");
        longest = Larger(longest, length);
    }
    return longest;
}

}  // namespace ascend_kv
