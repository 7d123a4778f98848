// Which low-bit layers bytes.cuh takes.
#pragma once

#include "stream_layers.h"

namespace ortolan::cuda {

// Columns whose codes are 128 bytes.
inline int64_t low_bit_slice_columns(const LowBitWeight& w) { return 1024 / code_bits(w.format); }

// Whether int4 codes of 128 bytes have two groups.
inline bool has_paired_groups(const LowBitWeight& w) {
  return w.format == LowBitFormat::kInt4 && w.group_size == 128 && w.groups() % 2 == 0;
}

// 16-bit elements; int4 and int8 in groups of 128 columns and more, of which there are 2^n in 128 bytes or
// 128 bytes in each.
inline bool takes_low_bit_bytes(const LowBitLinearParams& p) {
  constexpr int64_t kMaxInputs = 32768;
  const LowBitWeight& w = p.weight;
  if (p.element == ElementType::kFloat32 || w.columns % 32 != 0 || w.columns > kMaxInputs ||
      (w.format != LowBitFormat::kInt4 && w.format != LowBitFormat::kInt8) || p.num_outputs > (1 << 28))
    return false;
  const int64_t slice = low_bit_slice_columns(w), groups = w.groups(), bits = code_bits(w.format);
  if (groups > 1 && !has_paired_groups(w) &&
      (w.group_size % slice != 0 || !is_power_of_two(w.group_size / slice)))
    return false;
  if (!has_whole_pieces(w.columns * bits / 8, {w.codes, p.input, p.norm_weight})) return false;
  const int64_t slice_groups = has_paired_groups(w) ? 2 : 1, zero_row_bytes = (groups * bits + 7) / 8;
  if (!has_words(w.scales, w.rows, groups * 2) || !begins_with_words(groups * 2, slice_groups * 2))
    return false;
  return !w.zero_points || has_words(w.zero_points, w.rows, zero_row_bytes);
}

}  // namespace ortolan::cuda
