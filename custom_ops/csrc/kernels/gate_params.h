// What the kernels of gates on rows are called with.
#pragma once

#include <cstdint>

#include "element_types.h"

namespace ortolan {

enum class GateActivation { kSilu, kSigmoid, kSoftplus, kGelu, kGeluTanh };

// y = residual + activation(gate) * x, of `size` columns; x normalised, norm_size columns at a time, where
// norm_weight is given.
struct GateMulParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;  // T
  int64_t size = 0;        // O
  int64_t x_stride = 0;    // elements between rows
  int64_t gate_stride = 0;
  int64_t gate_columns = 0;  // of y, that share a gate
  int64_t norm_size = 0;     // N
  GateActivation activation = GateActivation::kSilu;
  float epsilon = 0.0f;
  const void* x = nullptr;            // the first row's first column
  const void* gate = nullptr;         // the same
  const void* norm_weight = nullptr;  // [N] or null; no earlier kernel writes it
  const void* residual = nullptr;     // [T, O] or null; may be the output itself
  void* y = nullptr;                  // [T, O]
};

// decay = -exp(a_log) * softplus(d + dt_bias), beta = beta_scale * sigmoid(b).
struct DeltaGatesParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;  // T
  int64_t num_heads = 0;   // Hv
  int64_t decay_stride = 0;
  int64_t beta_stride = 0;
  float beta_scale = 1.0f;
  const void* decay_rows = nullptr;  // the first row's first d
  const void* beta_rows = nullptr;   // the first row's first b
  const void* a_log = nullptr;       // [Hv]; no earlier kernel writes it
  const void* dt_bias = nullptr;     // [Hv]; no earlier kernel writes it
  float* decay = nullptr;            // [T, Hv]
  float* beta = nullptr;             // [T, Hv]
};

}  // namespace ortolan
