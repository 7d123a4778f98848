// What computes one call of each operator: tensors in, kernel parameters checked, kernel run.
#pragma once

#include <memory>

#include "context.h"

namespace ortolan {

using Compute = void (*)(const Context&);

// Null where a provider has no kernel.
struct Computes {
  Compute ring_kv_append;
  Compute swa_attention;
  Compute snapkv_capture;
  Compute snapkv_score;
  Compute kv_select;
  Compute kv_compact;
  Compute fused_linear = nullptr;
  Compute qkv_rope_append = nullptr;
  Compute rope_angles = nullptr;
  Compute last_rows = nullptr;
  Compute rms_norm_add = nullptr;
};

const Computes& cpu_computes();
const Computes& cuda_computes();

// What a provider's kernels share; it is freed when the last kernel that holds it is gone.
using Resources = std::shared_ptr<void>;
Resources acquire_resources(Provider provider);

}  // namespace ortolan
