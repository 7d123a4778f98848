// What the kernels of mixtures of experts of few bits take: raw pointers, sizes and attributes. No tensor
// type, no runtime.
#pragma once

#include "expert_params.h"
#include "low_bit_params.h"

namespace ortolan {

// A weight of each expert, one behind the other.
struct StackedWeight {
  LowBitWeight first;            // of expert 0: rows and columns are those of one expert
  int64_t code_bytes = 0;        // from an expert to the next
  int64_t scale_bytes = 0;       // of `scales`
  int64_t zero_point_bytes = 0;  // of `zero_points`
  int64_t scale_code_bytes = 0;  // of `scale_codes`
  int64_t num_float_scales = 0;  // elements of `float_scales`

  static StackedWeight of_first(const LowBitWeight& first, ElementType element) {
    const int64_t bits = code_bits(first.format), groups = first.groups();
    const int64_t blocks = (first.rows + first.scale_rows - 1) / first.scale_rows;
    StackedWeight stack;
    stack.first = first;
    stack.code_bytes = first.rows * (first.columns * bits / 8);
    stack.scale_bytes = first.rows * groups * element_bytes(element);
    stack.zero_point_bytes = first.rows * ((groups * bits + 7) / 8);
    stack.scale_code_bytes = first.rows * groups;
    stack.num_float_scales = first.format == LowBitFormat::kNvfp4 ? first.rows : blocks * groups;
    return stack;
  }

  ORTOLAN_HOST_DEVICE LowBitWeight of(int64_t expert) const {
    LowBitWeight weight = first;
    weight.codes += expert * code_bytes;
    if (first.scales) weight.scales = static_cast<const char*>(first.scales) + expert * scale_bytes;
    if (first.zero_points) weight.zero_points += expert * zero_point_bytes;
    if (first.scale_codes) weight.scale_codes += expert * scale_code_bytes;
    if (first.float_scales) weight.float_scales += expert * num_float_scales;
    return weight;
  }
};

// As MoeExpertsParams, which says what is computed.
struct LowBitExpertsParams : ExpertStep {
  StackedWeight gate_up;  // E of [2 I, H]; no earlier kernel writes it
  StackedWeight down;     // E of [H, I]; no earlier kernel writes it

  // The same call for the tokens from `first` on.
  LowBitExpertsParams slice(int64_t first, int64_t count) const {
    LowBitExpertsParams part = *this;
    part.narrow(first, count);
    return part;
  }
};

}  // namespace ortolan
