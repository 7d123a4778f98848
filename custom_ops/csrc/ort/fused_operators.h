// Reads one call's tensors into the parameters of the fused operators' kernels, checked. CUDA alone has them.
#pragma once

#include "context.h"
#include "kernels/fused_params.h"
#include "kernels/qkv_params.h"

namespace ortolan {

// All but the cuBLAS handle.
FusedLinearParams read_fused_linear(const Context& context);
RopeAnglesParams read_rope_angles(const Context& context);
LastRowsParams read_last_rows(const Context& context);
RmsNormAddParams read_rms_norm_add(const Context& context);
QkvRopeAppendParams read_qkv_rope_append(const Context& context);

}  // namespace ortolan
