// Linear layers of fp8 whose inputs are rounded to fp8, too. Many tokens: codes times codes, by wgmma. Few,
// or where that is not: inputs become the values of their codes, for the kernels of other inputs.
#include <algorithm>

#include "dense_params.h"
#include "fp8_inputs.cuh"
#include "fp8_layers.h"
#include "fp8_rows_sm90.cuh"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/linear/rows_sm90_launch.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int64_t kSliceBytes = int64_t{96} << 20;  // of rounded rows, which wait in scratch memory
constexpr int64_t kRowTile = 256;
constexpr int64_t kFewTokens = 16;
constexpr int64_t kBlock = 128;  // rows and columns of the weight that share a scale

// Whether fp8_rows_sm90.cuh multiplies the codes.
bool multiplies_codes(const LowBitLinearParams& p, const Device& device) {
  const LowBitWeight& w = p.weight;
  const bool by_row = w.groups() == 1 && w.scale_rows == 1;
  const bool by_block = w.group_size == kBlock && w.scale_rows == kBlock;
  if (device.compute_capability != 90 || p.element == ElementType::kFloat32 || p.num_tokens <= kFewTokens ||
      !(by_row || by_block) || !has_whole_pieces(p.num_inputs, {w.codes}))
    return false;
  if (by_row && vector_bytes(8, {w.float_scales}) < 8) return false;
  if (p.activation == GatedActivation::kNone)
    return p.num_outputs % 2 == 0 && vector_bytes(8, {p.output, p.bias, p.residual}) == 8;
  return !p.bias && !p.residual && !p.output_float32 && has_whole_pieces(p.num_outputs * 2, {p.output}) &&
         (by_row || p.num_outputs % 64 == 0);
}

// Rows that are rounded and multiplied together, and where they lie in the workspace.
struct Slices {
  bool codes;
  int64_t rows;
  int64_t row_bytes;  // of codes, or of values
  int64_t scales;     // floats of a row

  static Slices of(const LowBitLinearParams& p, const Device& device) {
    const bool codes = multiplies_codes(p, device);
    const int64_t row_bytes = p.num_inputs * (codes ? 1 : element_bytes(p.element));
    const int64_t most = std::max<int64_t>(kSliceBytes / row_bytes / kRowTile, 1) * kRowTile;
    return {codes, std::min(p.num_tokens, most), row_bytes, codes ? p.weight.groups() : 0};
  }
  int64_t rounded_bytes() const { return aligned_bytes(rows * row_bytes); }
  int64_t bytes() const { return rounded_bytes() + aligned_bytes(rows * scales * int64_t{sizeof(float)}); }
};

// The layer of some of the call's rows.
LowBitLinearParams slice_of(const LowBitLinearParams& p, int64_t first, int64_t rows) {
  LowBitLinearParams slice = p;
  const int64_t size = element_bytes(p.element), offset = first * p.num_outputs;
  slice.num_tokens = rows;
  slice.input = static_cast<const unsigned char*>(p.input) + first * p.num_inputs * size;
  slice.output = static_cast<unsigned char*>(p.output) + offset * (p.output_float32 ? 4 : size);
  if (p.residual) slice.residual = static_cast<const unsigned char*>(p.residual) + offset * size;
  return slice;
}

RoundedRows rounded_rows(const LowBitLinearParams& p) {
  RoundedRows rows{};
  rows.rows = p.num_tokens;
  rows.input = p.input;
  rows.norm_weight = p.norm_weight;
  rows.epsilon = p.epsilon;
  rows.row_size = static_cast<int>(p.num_inputs);
  rows.group_size = static_cast<int>(p.weight.group_size);
  rows.given_scale = p.input_scale;
  return rows;
}

template <typename Element, bool kInBlocks>
cudaError_t multiply_codes(const LowBitLinearParams& p, const RoundedRows& rows, const Launch& launch) {
  constexpr int kSliceSteps = 4;  // fewer than the frame's stages: one group begins so much later
  RowOperands operands{ElementType::kFloat8E4M3, rows.codes, p.weight.codes, kSliceSteps};
  operands.input_scales = rows.scales;
  operands.weight_scales = p.weight.float_scales;
  operands.scale_groups = static_cast<int>(p.weight.groups());
  const FusedLinearParams dense = dense_params(p);
  return p.activation == GatedActivation::kNone
             ? launch_row_tiles<Fp8RowsGroup<Element, false, kInBlocks>>(dense, operands, launch)
             : launch_row_tiles<Fp8RowsGroup<Element, true, kInBlocks>>(dense, operands, launch);
}

// Multiplies the values of codes as if they were inputs that nobody rounds.
LowBitLinearParams unrounded(const LowBitLinearParams& p, const void* values) {
  LowBitLinearParams layer = p;
  layer.input_format = InputFormat::kNone;
  layer.norm_weight = nullptr;
  layer.input = values;
  return layer;
}

template <typename Element>
cudaError_t multiply_slice(const LowBitLinearParams& p, const Slices& slices, const Launch& launch) {
  auto* workspace = static_cast<unsigned char*>(launch.workspace);
  RoundedRows rows = rounded_rows(p);
  if (slices.codes) {
    rows.codes = workspace;
    rows.scales = reinterpret_cast<float*>(workspace + slices.rounded_bytes());
  } else {
    rows.values = workspace;
  }
  if (const cudaError_t error = launch_round_inputs<Element>(rows, launch); error != cudaSuccess)
    return error;
  if constexpr (sizeof(Element) == 2)
    if (slices.codes)
      return p.weight.scale_rows == 1 ? multiply_codes<Element, false>(p, rows, launch)
                                      : multiply_codes<Element, true>(p, rows, launch);
  Launch rest = launch;
  rest.workspace = workspace + slices.bytes();
  rest.workspace_bytes = launch.workspace_bytes - slices.bytes();
  return low_bit_linear(unrounded(p, rows.values), rest);
}

}  // namespace

size_t fp8_linear_workspace(const LowBitLinearParams& p, const Device& device) {
  const Slices slices = Slices::of(p, device);
  const size_t rest =
      slices.codes ? 0 : low_bit_linear_workspace(unrounded(slice_of(p, 0, slices.rows), nullptr), device);
  return slices.bytes() + rest;
}

cudaError_t fp8_linear(const LowBitLinearParams& p, const Launch& launch) {
  const Slices slices = Slices::of(p, launch.device);
  for (int64_t first = 0; first < p.num_tokens; first += slices.rows) {
    const LowBitLinearParams slice = slice_of(p, first, std::min(slices.rows, p.num_tokens - first));
    const cudaError_t error = with_element(
        p.element, [&]<typename Element>() { return multiply_slice<Element>(slice, slices, launch); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
