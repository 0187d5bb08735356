// Host function of hca_compress.
#include <vector>

#include "../host/checks.h"
#include "../host/device.h"
#include "../host/hosts.h"
#include "../host/reference.h"
#include "hca_compress_tiling.h"

#include "aclrtlaunch_hca_compress.h"

namespace ascend_kv {
namespace {

// What the operator was given, by its names.
struct CompressArguments {
    const at::Tensor &kv;
    const at::Tensor &gate;
    at::IntArrayRef lengths;
    int64_t ratio;
    const OptionalTensor &position_bias;
    bool overlap;
    at::OptionalIntArrayRef first_windows;
    const OptionalTensor &previous_kv;
    const OptionalTensor &previous_gate;
    const OptionalTensor &norm_weight;
    const OptionalTensor &rotary_table;
    int64_t rotary_dim;

    int64_t Dim() const { return overlap ? kv.size(1) / 2 : kv.size(1); }
    int64_t FirstWindow(size_t i) const { return first_windows.has_value() ? (*first_windows)[i] : 0; }
};

void CheckTokens(const CompressArguments &a)
{
    const char *legal = a.overlap ? "[tokens, 2 * head_dim]" : "[tokens, head_dim]";
    CheckDim("kv", a.kv, 2, legal);
    ASCEND_KV_REQUIRE(!a.overlap || a.kv.size(1) % 2 == 0, "kv", a.kv.sizes(), legal);
    CheckFloatType("kv", a.kv.scalar_type());
    CheckShape("gate", a.gate, a.kv.sizes());
    CheckType("gate", a.gate, a.kv.scalar_type());
    CheckDevice("gate", a.gate, a.kv);
    ASCEND_KV_REQUIRE(a.ratio >= 1, "ratio", a.ratio, "1 or more tokens a window");
    CheckLengths("lengths", a.lengths);
    int64_t tokens = 0;
    for (int64_t length : a.lengths) {
        tokens += length;
    }
    ASCEND_KV_REQUIRE(tokens == a.kv.size(0), "lengths", tokens, a.kv.size(0), " in all, as kv");
}

void CheckPart(const char *field, const OptionalTensor &tensor, at::IntArrayRef shape,
               const at::Tensor &kv)
{
    if (tensor.has_value()) {
        CheckShape(field, *tensor, shape);
        CheckFloatType(field, tensor->scalar_type());
        CheckDevice(field, *tensor, kv);
    }
}

void CheckPrevious(const CompressArguments &a)
{
    bool later = false;
    if (a.first_windows.has_value()) {
        size_t given = a.first_windows->size();
        ASCEND_KV_REQUIRE(given == a.lengths.size(), "first_windows", given,
                          a.lengths.size(), " numbers, as lengths");
        for (int64_t first : *a.first_windows) {
            ASCEND_KV_REQUIRE(first >= 0, "first_windows", first, "0 or more");
            later = later || first > 0;
        }
    }
    const OptionalTensor *tensors[] = {&a.previous_kv, &a.previous_gate};
    const char *fields[] = {"previous_kv", "previous_gate"};
    for (int i = 0; i < 2; ++i) {
        const OptionalTensor &tensor = *tensors[i];
        ASCEND_KV_REQUIRE(a.overlap || !tensor, fields[i], "a tensor", "None without overlap");
        ASCEND_KV_REQUIRE(tensor || !(a.overlap && later), fields[i], "None",
                          "a tensor, where a first window is not window 0");
        ASCEND_KV_REQUIRE(tensor || !*tensors[1 - i], fields[i], "None",
                          "a tensor: previous_kv and previous_gate come together");
        CheckPart(fields[i], tensor, {static_cast<int64_t>(a.lengths.size()), a.ratio, a.Dim()},
                  a.kv);
        if (tensor) {
            CheckType(fields[i], *tensor, a.kv.scalar_type());
        }
    }
}

void CheckRotary(const CompressArguments &a)
{
    ASCEND_KV_REQUIRE(a.rotary_dim >= 0 && a.rotary_dim <= a.Dim() && a.rotary_dim % 2 == 0,
                      "rotary_dim", a.rotary_dim, "an even number up to ", a.Dim());
    ASCEND_KV_REQUIRE(a.rotary_table.has_value() == (a.rotary_dim > 0), "rotary_table",
                      a.rotary_table ? "a tensor" : "None", "a tensor where rotary_dim is not 0");
    if (!a.rotary_table) {
        return;
    }
    int64_t rows = 0;
    for (size_t i = 0; i < a.lengths.size(); ++i) {
        int64_t count = a.lengths[i] / a.ratio;
        rows = count == 0 ? rows : Larger(rows, a.ratio * (a.FirstWindow(i) + count - 1) + 1);
    }
    const at::Tensor &table = *a.rotary_table;
    ASCEND_KV_REQUIRE(table.dim() == 3 && table.size(0) >= rows &&
                          table.size(1) == a.rotary_dim / 2 && table.size(2) == 2,
                      "rotary_table", table.sizes(), "[", rows, " or more, ", a.rotary_dim / 2,
                      ", 2]");
    CheckFloatType("rotary_table", table.scalar_type());
    CheckDevice("rotary_table", table, a.kv);
}

// Rows of the kernel's table of sequences: first token, first entry, first window, 0.
std::vector<int64_t> SequenceRows(const CompressArguments &a)
{
    std::vector<int64_t> rows;
    int64_t token = 0;
    int64_t entry = 0;
    for (size_t i = 0; i < a.lengths.size(); ++i) {
        for (int64_t field : {token, entry, a.FirstWindow(i), int64_t{0}}) {
            rows.push_back(field);
        }
        token += a.lengths[i];
        entry += a.lengths[i] / a.ratio;
    }
    return rows;
}

const char *WhyNoCompressKernel(const CompressArguments &a, const HcaCompressTiling &tiling)
{
    if (a.rotary_dim % 8 != 0 || (a.Dim() - a.rotary_dim) % 8 != 0) {
        return "rotary_dim, or the channels before it, not a multiple of 8";
    }
    if (tiling.chunk == 0) {
        return "a window too large for the unified buffer";
    }
    return a.kv.size(0) > INT32_MAX ? "more than 2**31 - 1 tokens" : nullptr;
}

at::Tensor ContiguousFloat(const OptionalTensor &tensor)
{
    return tensor ? tensor->to(at::kFloat).contiguous() : at::Tensor();
}

}  // namespace

at::Tensor HcaCompressHost(const at::Tensor &kv, const at::Tensor &gate, at::IntArrayRef lengths,
                           int64_t ratio, const OptionalTensor &position_bias, bool overlap,
                           at::OptionalIntArrayRef first_windows,
                           const OptionalTensor &previous_kv, const OptionalTensor &previous_gate,
                           const OptionalTensor &norm_weight, double norm_eps,
                           const OptionalTensor &rotary_table, int64_t rotary_dim,
                           std::optional<at::ScalarType> dtype)
{
    CompressArguments a{kv,          gate,          lengths,     ratio,        position_bias, overlap,
                        first_windows, previous_kv, previous_gate, norm_weight, rotary_table,
                        rotary_dim};
    CheckTokens(a);
    CheckPart("position_bias", position_bias, {ratio, kv.size(1)}, kv);
    CheckPart("norm_weight", norm_weight, {a.Dim()}, kv);
    CheckPrevious(a);
    CheckRotary(a);
    at::ScalarType type = dtype.value_or(kv.scalar_type());
    CheckFloatType("dtype", type);

    c10::DeviceGuard guard(kv.device());
    int64_t windows = 0;
    for (int64_t length : lengths) {
        windows += length / ratio;
    }
    HcaCompressTiling tiling = TileHcaCompress(
        {windows, static_cast<int64_t>(lengths.size()), a.Dim(), ratio, overlap,
         position_bias.has_value(), norm_weight.has_value(), rotary_dim,
         ElementOf(kv.scalar_type()), ElementOf(type), static_cast<float>(norm_eps)},
        Limits());
    at::Tensor entries = at::empty({windows, a.Dim()}, kv.options().dtype(type));
    if (windows * a.Dim() == 0) {
        return entries;
    }
    if (const char *reason = WhyNoCompressKernel(a, tiling)) {
        return CallReference("hca_compress", reason, kv, gate, lengths, ratio, position_bias,
                             overlap, first_windows, previous_kv, previous_gate, norm_weight,
                             norm_eps, rotary_table, rotary_dim, dtype)[0].toTensor();
    }
    at::Tensor values = kv.contiguous();
    at::Tensor gates = gate.contiguous();
    at::Tensor sequences = ToDevice(SequenceRows(a), kv);
    at::Tensor bias = ContiguousFloat(position_bias);
    at::Tensor before = previous_kv ? previous_kv->contiguous() : at::Tensor();
    at::Tensor gate_before = previous_gate ? previous_gate->contiguous() : at::Tensor();
    at::Tensor weight = ContiguousFloat(norm_weight);
    at::Tensor table = ContiguousFloat(rotary_table);
    at::Tensor workspace =
        tiling.workspace_bytes == 0 ? at::Tensor() : Workspace(tiling.workspace_bytes, kv);
    Launch("hca_compress", aclrtlaunch_hca_compress, tiling.cores, Address(values),
           Address(gates), Address(sequences), Address(bias), Address(before),
           Address(gate_before), Address(weight), Address(table), Address(workspace),
           Address(entries), tiling);
    return entries;
}

}  // namespace ascend_kv
