// Which low-bit layers stream.cuh takes.
#pragma once

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// Columns whose codes are 64 bytes.
inline int64_t low_bit_step_columns(const LowBitWeight& w) { return 512 / code_bits(w.format); }

inline int low_bit_scale_bytes(LowBitFormat format) {
  if (format == LowBitFormat::kFp8) return 4;
  return format == LowBitFormat::kInt4 || format == LowBitFormat::kInt8 ? 2 : 1;
}

// Whether an array [rows, row_bytes] can be copied in words of 4 bytes.
inline bool has_words(const void* array, int64_t rows, int64_t row_bytes) {
  return rows * row_bytes % 4 == 0 && reinterpret_cast<uint64_t>(array) % 4 == 0;
}
// Whether the `step_bytes` of it that a step takes begin with a word, or lie in one.
inline bool begins_with_words(int64_t row_bytes, int64_t step_bytes) {
  const int64_t unit = step_bytes >= 4 ? 4 : step_bytes >= 2 ? 2 : 1;
  return row_bytes % unit == 0;
}

inline bool is_power_of_two(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

// Whether groups are shorter than a step. fp4's are short by definition, were a row of them no longer.
inline bool has_short_groups(const LowBitWeight& w) {
  if (w.format == LowBitFormat::kMxfp4 || w.format == LowBitFormat::kNvfp4) return true;
  return w.groups() > 1 && w.group_size < low_bit_step_columns(w);
}

// Whether steps and groups divide each other as the kernel counts them: at least 16 bytes of codes share a
// scale, except in nvfp4.
inline bool has_regular_groups(const LowBitWeight& w) {
  const int64_t step = low_bit_step_columns(w), bits = code_bits(w.format);
  if (!has_short_groups(w))
    return w.groups() == 1 || (w.group_size % step == 0 && is_power_of_two(w.group_size / step));
  if (w.format == LowBitFormat::kNvfp4) return true;
  return w.format != LowBitFormat::kFp8 && step % w.group_size == 0 && w.group_size * bits >= 128;
}

// 16-bit elements; rows of whole blocks of 32 columns; and inputs of a token that fit into shared memory.
inline bool takes_low_bit_stream(const LowBitLinearParams& p, const Device& device) {
  constexpr int64_t kMaxInputs = 65536, kMostSharedBytes = 102400;  // beside the inputs
  const LowBitWeight& w = p.weight;
  const int64_t bits = code_bits(w.format), step = low_bit_step_columns(w), groups = w.groups();
  if (p.element == ElementType::kFloat32 || w.columns % 32 != 0 || w.columns > kMaxInputs ||
      p.num_outputs > (1 << 28) || !is_power_of_two(w.scale_rows) || !has_regular_groups(w))
    return false;
  if (!has_whole_pieces(w.columns * bits / 8, {w.codes, p.input, p.norm_weight})) return false;
  const int64_t step_groups = has_short_groups(w) ? step / w.group_size : 1;
  const int64_t scale_bytes = low_bit_scale_bytes(w.format);
  const void* scales = scale_bytes == 4   ? w.float_scales
                       : scale_bytes == 2 ? w.scales
                                          : static_cast<const void*>(w.scale_codes);
  const int64_t scale_rows = (w.rows + w.scale_rows - 1) / w.scale_rows;
  if (!has_words(scales, scale_rows, groups * scale_bytes)) return false;
  // Those of a step lie in two words at most.
  if (step_groups * scale_bytes > 4 && !begins_with_words(groups * scale_bytes, step_groups * scale_bytes))
    return false;
  const int64_t zero_bits = w.format == LowBitFormat::kInt4 ? 4 : 8;
  const int64_t zero_row_bytes = (groups * zero_bits + 7) / 8;
  if (w.zero_points && !(has_words(w.zero_points, w.rows, zero_row_bytes) &&
                         begins_with_words(zero_row_bytes, step_groups * zero_bits / 8)))
    return false;
  return (w.columns + step) * 2 + kMostSharedBytes <= device.shared_bytes_per_block;
}

}  // namespace ortolan::cuda
