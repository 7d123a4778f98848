#include "kernels/cpu/kernels.h"
#include "operators.h"
#include "read_params.h"

namespace ortolan {
namespace {

// Reads one call's parameters and runs the kernel on ONNX Runtime's threads.
template <auto kRead, auto kKernel>
void compute(const Context& context) {
  OrtParallelFor parallel(context);
  kKernel(kRead(context), parallel);
}

}  // namespace

const Computes& cpu_computes() {
  static constexpr Computes computes{
      .ring_kv_append = compute<read_ring_kv_append, cpu::ring_kv_append>,
      .swa_attention = compute<read_swa_attention, cpu::swa_attention>,
      .snapkv_capture = compute<read_snapkv_capture, cpu::snapkv_capture>,
      .snapkv_score = compute<read_snapkv_score, cpu::snapkv_score>,
      .kv_select = compute<read_kv_select, cpu::kv_select>,
      .kv_compact = compute<read_kv_compact, cpu::kv_compact>,
  };
  return computes;
}

#ifndef ORTOLAN_CUDA
Resources acquire_resources(Provider) { return nullptr; }
#endif

}  // namespace ortolan
