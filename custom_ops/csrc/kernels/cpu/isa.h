// The instruction sets that the CPU kernels are built for.
#pragma once

namespace ortolan::cpu {

// Instruction sets the arithmetic kernels are built for, in rising order.
enum class Isa { kPlain, kAvx2, kAvx512, kAvx512Vnni };

// Limits what later calls may use; for tests. Returns false where the machine lacks it.
bool limit_isa(Isa isa);
// Whether what is read once is read fastest past the caches behind L1; of the processor alone.
bool reads_past_caches();

}  // namespace ortolan::cpu
