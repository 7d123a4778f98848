// What a layer asks of stream.cuh: the plan, the kind of its weight, and the place of its blocks.
#pragma once

#include <algorithm>

#include "dense_params.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "stream.cuh"
#include "stream_layers.h"

namespace ortolan::cuda {

inline int log2_of(int64_t power) {
  int log = 0;
  while (power >> log > 1) ++log;
  return log;
}

inline LowBitPlan plan_low_bit(const LowBitLinearParams& p) {
  const LowBitWeight& w = p.weight;
  const int64_t bits = code_bits(w.format), step = low_bit_step_columns(w), groups = w.groups();
  LowBitPlan plan{};
  plan.tiles = static_cast<int>(divide_up(p.num_outputs, p.activation == GatedActivation::kNone ? 16 : 8));
  plan.steps = static_cast<int>(divide_up(w.columns, step));
  plan.row_bytes = static_cast<int>(w.columns * bits / 8);
  plan.scale_row_bytes = static_cast<int>(groups * low_bit_scale_bytes(w.format));
  plan.zero_row_bytes = static_cast<int>(w.format == LowBitFormat::kInt4 ? divide_up(groups, 2) : groups);
  plan.scale_rows_shift = w.format == LowBitFormat::kFp8 ? log2_of(w.scale_rows) : 0;
  plan.step_groups = has_short_groups(w) ? static_cast<int>(step / w.group_size) : 1;
  plan.group_steps_shift = groups == 1 ? 31 : has_short_groups(w) ? 0 : log2_of(w.group_size / step);
  const int64_t step_scales = plan.step_groups * low_bit_scale_bytes(w.format);
  plan.scale_words = step_scales <= 4 && begins_with_words(plan.scale_row_bytes, step_scales) ? 1 : 2;
  plan.token_stride = static_cast<int>(plan.steps * step * 2 + 64);
  return plan;
}

// Blocks of so many bytes of shared memory that a multiprocessor holds, up to two.
inline int resident_low_bit_blocks(int bytes, const Device& device) {
  constexpr int kReservedBytes = 1024, kStaticBytes = 1024;  // of a block
  if (bytes + kStaticBytes > device.shared_bytes_per_block) return 0;
  return 2 * (bytes + kStaticBytes + kReservedBytes) <= device.shared_bytes_per_block + kReservedBytes ? 2
                                                                                                       : 1;
}

template <typename Element, LowBitFormat kFormat, typename Function>
cudaError_t with_integer_kind(const LowBitWeight& w, Function&& f) {
  const bool is_short = has_short_groups(w);
  if (w.zero_points)
    return is_short ? f.template operator()<LowBitKind<Element, kFormat, true, true>>()
                    : f.template operator()<LowBitKind<Element, kFormat, true, false>>();
  return is_short ? f.template operator()<LowBitKind<Element, kFormat, false, true>>()
                  : f.template operator()<LowBitKind<Element, kFormat, false, false>>();
}

// Calls f.operator()<LowBitKind<...>>() for the kind of a weight.
template <typename Element, typename Function>
cudaError_t with_low_bit_kind(const LowBitWeight& w, Function&& f) {
  switch (w.format) {
    case LowBitFormat::kInt4:
      return with_integer_kind<Element, LowBitFormat::kInt4>(w, f);
    case LowBitFormat::kInt8:
      return with_integer_kind<Element, LowBitFormat::kInt8>(w, f);
    case LowBitFormat::kFp8:
      return f.template operator()<LowBitKind<Element, LowBitFormat::kFp8, false, false>>();
    case LowBitFormat::kMxfp4:
      return f.template operator()<LowBitKind<Element, LowBitFormat::kMxfp4, false, true>>();
    case LowBitFormat::kNvfp4:
      return f.template operator()<LowBitKind<Element, LowBitFormat::kNvfp4, false, true>>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace ortolan::cuda
