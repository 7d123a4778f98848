// What the kernels around attention take: raw pointers, sizes and attributes. No tensor type, no runtime.
#pragma once

#include <cstdint>

#include "params.h"

namespace ortolan {

namespace cuda {
class Cublas;
}

// act(gate) * up; kNone: a plain product. kClampedSiluMul belongs to experts: see MoeExpertsParams.
enum class GatedActivation { kNone, kSiluMul, kGeluMul, kGeluTanhMul, kClampedSiluMul };

// output = epilogue(normalised(input) * weight^T + bias) + residual.
// The normalised rows, where norm_weight is given, are input * rsqrt(mean(input^2) + epsilon) * norm_weight:
// computed in float32 and rounded once to the element type. With an activation, rows 0 .. N of weight and
// bias are the gate and rows N .. 2N the factor it scales; or all rows are the gate, and the factor is given.
struct FusedLinearParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;        // T
  int64_t num_outputs = 0;       // N
  int64_t num_inputs = 0;        // K
  const void* input = nullptr;   // [T, K]
  const void* weight = nullptr;  // [N, K], or [2N, K] where it has two parts; no earlier kernel writes it
  const void* norm_weight = nullptr;  // [K] or null; no earlier kernel writes it
  float epsilon = 0.0f;
  const void* bias = nullptr;      // [N], or [2N] where weight has two parts, or null
  const void* residual = nullptr;  // [T, N] or null; may be the output itself
  const void* factor = nullptr;    // row t's are N from t * factor_stride on; null, or there is no residual
  int64_t factor_stride = 0;
  GatedActivation activation = GatedActivation::kNone;
  bool output_float32 = false;     // else the element type
  bool batch_invariant = false;    // a row's bits do not depend on the other rows, nor on their number
  void* output = nullptr;          // [T, N]
  cuda::Cublas* cublas = nullptr;  // for many tokens; null: own kernels, correct but slow there

  // Whether weight has rows of gates and as many of factors.
  ORTOLAN_HOST_DEVICE bool is_two_part() const { return activation != GatedActivation::kNone && !factor; }
};

// cosine[t, r] = factor * cos(positions[t] * inv_freq[r]), sine likewise, in float32.
struct RopeAnglesParams {
  int64_t num_tokens = 0;              // T
  int64_t rotary_pairs = 0;            // R
  const int64_t* positions = nullptr;  // [T]
  const float* inv_freq = nullptr;     // [R]
  float factor = 1.0f;
  float* cosine = nullptr;  // [T, R]
  float* sine = nullptr;    // [T, R]
};

// output[r] = rows[row_indices[r]]; zeros where the index is not a row's.
struct GatherRowsParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_rows = 0;                  // T
  int64_t row_size = 0;                  // H
  int64_t num_indices = 0;               // R
  const void* rows = nullptr;            // [T, H]
  const int64_t* row_indices = nullptr;  // [R]
  void* output = nullptr;                // [R, H]
};

// query_start_out[b] is the number of wanted rows that come before sequence b's first one, and at most
// query_start[b]: where all rows are wanted, what follows them, such as row 0 again, is nobody's.
// past_len_out is past_len and, for each sequence, the rows of it that are not wanted.
struct NarrowStepParams {
  int64_t num_tokens = 0;                // T
  int64_t num_sequences = 0;             // B
  int64_t num_indices = 0;               // R
  int64_t lengths = 0;                   // of a sequence: Hkv, or 1
  const int32_t* query_start = nullptr;  // [B+1]
  const int32_t* past_len = nullptr;     // [B, lengths]
  const int64_t* row_indices = nullptr;  // [R]
  const int64_t* positions = nullptr;    // [T] or null
  int32_t* query_start_out = nullptr;    // [B+1]
  int32_t* past_len_out = nullptr;       // [B, lengths]
  int64_t* positions_out = nullptr;      // [R] or null

  // Of a wanted row.
  ORTOLAN_HOST_DEVICE int64_t position(int64_t r) const {
    const int64_t row = row_indices[r];
    return row >= 0 && row < num_tokens ? positions[row] : 0;
  }
};

// y = residual + x * rsqrt(mean(x^2) + epsilon) * norm_weight, in float32, rounded once.
struct RmsNormAddParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;             // T
  int64_t row_size = 0;               // I
  const void* x = nullptr;            // [T, I]
  const void* norm_weight = nullptr;  // [I]; no earlier kernel writes it
  const void* residual = nullptr;     // [T, I] or null; may be the output itself
  const void* scale = nullptr;        // [1] or null; no earlier kernel writes it
  float epsilon = 0.0f;
  void* y = nullptr;  // [T, I]
};

}  // namespace ortolan
