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

// Whether an array [rows, row_bytes], of which a step takes `step_bytes`, can be copied in words of 4 bytes
// such that none holds parts of two steps that both need a word more.
inline bool has_whole_words(const void* array, int64_t rows, int64_t row_bytes, int64_t step_bytes) {
  const int64_t unit = step_bytes >= 4 ? 4 : step_bytes >= 2 ? 2 : 1;
  return row_bytes % unit == 0 && rows * row_bytes % 4 == 0 && reinterpret_cast<uint64_t>(array) % 4 == 0;
}

// 16-bit elements; rows of whole blocks of 32 columns; groups of 16 bytes of codes or more that fill a step,
// are a part of one, or are a whole row; and inputs of a token that fit into shared memory.
inline bool takes_low_bit_stream(const LowBitLinearParams& p, const Device& device) {
  constexpr int64_t kMaxInputs = 65536;
  const LowBitWeight& w = p.weight;
  const int64_t bits = code_bits(w.format), step = low_bit_step_columns(w), groups = w.groups();
  if (p.element == ElementType::kFloat32 || w.columns % 32 != 0 || w.columns > kMaxInputs ||
      p.num_outputs > (1 << 28))
    return false;
  if (!has_whole_pieces(w.columns * bits / 8, {w.codes, p.input, p.norm_weight})) return false;
  if (groups != 1 && step % w.group_size != 0 && w.group_size % step != 0) return false;
  if (groups != 1 && w.format != LowBitFormat::kNvfp4 && w.group_size * bits < 128) return false;
  const int64_t step_groups = groups == 1 || w.group_size > step ? 1 : step / w.group_size;
  const int64_t scale_bytes = low_bit_scale_bytes(w.format);
  const void* scales = w.format == LowBitFormat::kFp8 ? w.float_scales
                       : scale_bytes == 2             ? w.scales
                                                      : static_cast<const void*>(w.scale_codes);
  if (step_groups * scale_bytes > 8) return false;
  const int64_t scale_rows = (w.rows + w.scale_rows - 1) / w.scale_rows;
  if (!has_whole_words(scales, scale_rows, groups * scale_bytes, step_groups * scale_bytes)) return false;
  const int64_t zero_bits = w.format == LowBitFormat::kInt4 ? 4 : 8;
  if (w.zero_points &&
      !has_whole_words(w.zero_points, w.rows, (groups * zero_bits + 7) / 8, step_groups * zero_bits / 8))
    return false;
  const int64_t token_bytes = (w.columns + step) * 2;
  return token_bytes + 102400 <= device.shared_bytes_per_block;
}

}  // namespace ortolan::cuda
