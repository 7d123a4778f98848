// What the kernels of low-bit weights take: raw pointers, sizes and attributes. No tensor type, no runtime.
#pragma once

#include <cstdint>

#include "fused_params.h"

namespace ortolan {

enum class LowBitFormat { kInt4, kInt8, kFp8, kMxfp4, kNvfp4 };

ORTOLAN_HOST_DEVICE constexpr int64_t code_bits(LowBitFormat format) {
  return format == LowBitFormat::kInt8 || format == LowBitFormat::kFp8 ? 8 : 4;
}

// A weight [rows, K] of few bits; weight(n, k), with g = k / group_size:
//   int4, int8: (code - zero_point(n, g)) * scales[n, g]; zero points are 8 or 128 where there are none
//   fp8:        e4m3(code) * float_scales[n / scale_rows, g]
//   mxfp4:      e2m1(code) * 2^(scale_codes[n, g] - 127)
//   nvfp4:      e2m1(code) * e4m3(scale_codes[n, g]) * float_scales[n]
struct LowBitWeight {
  LowBitFormat format = LowBitFormat::kInt4;
  int64_t rows = 0;                      // N, or 2N with an activation
  int64_t columns = 0;                   // K
  int64_t group_size = 0;                // of columns, divides K; never 0
  int64_t scale_rows = 1;                // fp8: rows that share a float scale
  const uint8_t* codes = nullptr;        // [rows, K * bits / 8]; of 4 bits, the first in the low half
  const void* scales = nullptr;          // int4, int8: [rows, groups] of the element type
  const uint8_t* zero_points = nullptr;  // int4: [rows, ceil(groups / 2)], int8: [rows, groups], or null
  const uint8_t* scale_codes = nullptr;  // mxfp4 (e8m0), nvfp4 (e4m3): [rows, groups]
  const float* float_scales = nullptr;   // fp8: [ceil(rows / scale_rows), groups], nvfp4: [rows]

  ORTOLAN_HOST_DEVICE int64_t groups() const { return columns / group_size; }
};

// What inputs are rounded to before they are multiplied.
enum class InputFormat { kNone, kFp8 };

// As FusedLinearParams, which says what is computed.
//
// Inputs of kFp8, after the norm, become e4m3 codes with a scale for each token and group of the weight's
// columns, m the group's largest magnitude: scale = m / 448, code = e4m3(x * (448 / m)), both 0 where m is 0.
// With an input_scale, that is the scale of all: code = e4m3(x * (1 / input_scale)), saturating.
struct LowBitLinearParams {
  ElementType element = ElementType::kFloat32;
  int64_t num_tokens = 0;   // T
  int64_t num_outputs = 0;  // N
  int64_t num_inputs = 0;   // K
  LowBitWeight weight;      // no earlier kernel writes it
  GatedActivation activation = GatedActivation::kNone;
  float epsilon = 0.0f;
  InputFormat input_format = InputFormat::kNone;  // kFp8 only with a weight of fp8
  float input_scale = 0.0f;                       // 0: one for each token and group
  const void* input = nullptr;                    // [T, K]
  const void* norm_weight = nullptr;              // [K] or null; no earlier kernel writes it
  const void* bias = nullptr;                     // [rows of the weight] or null
  const void* residual = nullptr;                 // [T, N] or null; may be the output itself
  bool output_float32 = false;                    // else the element type
  void* output = nullptr;                         // [T, N]
  cuda::Cublas* cublas = nullptr;                 // for many tokens; null: own kernels
};

}  // namespace ortolan
