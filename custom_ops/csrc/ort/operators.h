// Computes one call of each operator on the CPU: tensors in, kernel parameters checked, kernel run.
#pragma once

#include "context.h"

namespace ortolan {

void compute_ring_kv_append(const Context& context, cpu::ParallelFor& parallel);
void compute_swa_attention(const Context& context, cpu::ParallelFor& parallel);
void compute_snapkv_capture(const Context& context, cpu::ParallelFor& parallel);
void compute_snapkv_score(const Context& context, cpu::ParallelFor& parallel);
void compute_kv_compact(const Context& context, cpu::ParallelFor& parallel);

}  // namespace ortolan
