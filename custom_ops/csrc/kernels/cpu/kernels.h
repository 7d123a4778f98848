// The CPU kernels: one function per operator. Arguments are valid when they arrive here.
#pragma once

#include "kernels/params.h"
#include "parallel.h"

namespace ortolan::cpu {

void ring_kv_append(const RingKvAppendParams& params, ParallelFor& parallel);
void swa_attention(const SwaAttentionParams& params, ParallelFor& parallel);
void snapkv_capture(const SnapKvCaptureParams& params, ParallelFor& parallel);
void snapkv_score(const SnapKvScoreParams& params, ParallelFor& parallel);
void kv_select(const KvSelectParams& params, ParallelFor& parallel);
void kv_compact(const KvCompactParams& params, ParallelFor& parallel);

// Instruction sets the arithmetic kernels are built for, in rising order.
enum class Isa { kPlain, kAvx2, kAvx512 };

Isa best_isa();
// Limits what later calls may use; for tests. Returns false where the machine lacks it.
bool limit_isa(Isa isa);

}  // namespace ortolan::cpu
