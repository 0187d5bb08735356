// The CPU operators under their names, whose schemas stand in ascend_kv/ops/*.py, and what may be
// asked about them.
#include <torch/library.h>

#include "common/cpu_dispatch.h"
#include "common/cpu_operators.h"

#define SERVE(name)                                                                        \
  m.impl(#name, TORCH_FN((ascend_kv::cpu::Served<"ascend_kv_reference::" #name,            \
                                                 &ascend_kv::cpu::name>::call)))

TORCH_LIBRARY(ascend_kv_cpu, m) {
  m.def("whole_number_bits() -> int", &ascend_kv::cpu::whole_number_bits);
}

TORCH_LIBRARY_IMPL(ascend_kv, CPU, m) {
  SERVE(hca_compress);
  SERVE(kv_cache_dequantize);
  SERVE(kv_cache_load);
  SERVE(kv_cache_quantize);
  SERVE(kv_cache_store);
  SERVE(paged_attention);
}
