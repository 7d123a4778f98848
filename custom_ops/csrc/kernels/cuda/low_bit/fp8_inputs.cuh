// Rounds inputs of linear layers to e4m3, after their norm if there is one.
//
// A block takes a row. Where the row is whole pieces of 16 bytes and its groups too, its threads hold it in
// registers: read once, written once. A group is the block's, or some lanes'. Other rows are read for the
// norm's factor, for the largest magnitude of each group and for the codes, an element at a time. A row's
// result depends on that row alone.
#pragma once

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/low_bit_params.h"
#include "kernels/low_bit_rows.h"
#include "kernels/row_scale.h"

namespace ortolan::cuda {

constexpr int kRoundingThreads = 256, kManyRoundingThreads = 512;
constexpr int kLaneColumns = 128;  // of a group that lanes share

// Rows [T, K] as they are, and what they become.
struct RoundedRows {
  int64_t rows;
  const void* input;        // [T, K]
  const void* norm_weight;  // [K] or null
  float epsilon;
  int row_size;
  int group_size;
  float given_scale;  // of all; 0: each group has its own
  uint8_t* codes;     // [T, K]; or null:
  void* values;       // [T, K] elements, codes times scales
  float* scales;      // [T, groups], beside codes

  __device__ __forceinline__ int groups() const { return row_size / group_size; }
  __device__ __forceinline__ float norm_factor(float squares) const {
    return rsqrtf(squares / static_cast<float>(row_size) + epsilon);
  }
};

// The codes of two numbers, the first in the low byte: to nearest even, saturating; NaN stays NaN.
__device__ __forceinline__ uint16_t fp8_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  const auto code = [](float x) -> uint32_t { return x == x ? float8_code(x) : 0x7f; };
  return static_cast<uint16_t>(code(first) | code(second) << 8);
#endif
}
__device__ __forceinline__ float fp8_value(uint8_t code) {
  return (code & 0x7f) == 0x7f ? NAN : float8_value(code);
}

// The largest of a value over the block, in each thread.
template <int kThreads>
__device__ __forceinline__ float block_max(float value) {
  __shared__ float found[kThreads / 32];
  value = fold_lanes<16, 1>(value, Max());
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) value = fmaxf(value, found[i]);
  return value;
}

// A piece of 16 bytes that a thread holds.
template <typename Element>
struct HeldPiece {
  static constexpr int kSize = kPieceSize<Element>;
  Element elements[kSize];

  __device__ __forceinline__ uint4& bits() { return *reinterpret_cast<uint4*>(elements); }
  __device__ __forceinline__ float largest() const {
    float found = 0;  // NaN does not count: it stays in its element's code
#pragma unroll
    for (const Element& x : elements) found = fmaxf(found, fabsf(to_float(x)));
    return found;
  }
  __device__ __forceinline__ void write(const RoundedRows& p, int64_t place, const Fp8Scale& scale) {
    uint16_t codes[kSize / 2];
#pragma unroll
    for (int i = 0; i < kSize; i += 2)
      codes[i / 2] =
          fp8_pair(to_float(elements[i]) * scale.inverse, to_float(elements[i + 1]) * scale.inverse);
    if (p.codes) {
      __builtin_memcpy(__builtin_assume_aligned(p.codes + place, kSize), codes, kSize);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      elements[i] = Element(fp8_value(static_cast<uint8_t>(codes[i / 2] >> i % 2 * 8)) * scale.value);
    *reinterpret_cast<uint4*>(static_cast<Element*>(p.values) + place) = bits();
  }
};

// Rows of at most kPieces pieces a thread.
template <typename Element, int kPieces, int kThreads>
__global__ void __launch_bounds__(kThreads) round_pieces_kernel(const __grid_constant__ RoundedRows p) {
  using Piece = HeldPiece<Element>;
  const int pieces = p.row_size / Piece::kSize;
  const int64_t row = blockIdx.x;
  const auto* input = static_cast<const uint4*>(p.input) + row * pieces;
  const auto* weight = static_cast<const uint4*>(p.norm_weight);
  Piece held[kPieces];
  const auto each = [&](auto visit) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int piece = static_cast<int>(threadIdx.x) + n * kThreads;
      visit(held[n], piece, piece < pieces);
    }
  };
  launch_dependents();
  wait_for_previous_kernel();
  each([&](Piece& x, int piece, bool exists) { x.bits() = exists ? input[piece] : uint4{}; });
  if (weight) {
    float squares[1] = {};
    each([&](Piece& x, int, bool) { squares[0] = add_products(x.bits(), x.bits(), squares[0], Element{}); });
    block_sums<kThreads>(squares);
    const float factor = p.norm_factor(squares[0]);
    each([&](Piece& x, int piece, bool exists) {
      if (exists) x.bits() = scale_piece(x.bits(), factor, weight[piece], Element{});
    });
  }
  const bool by_row = p.group_size == p.row_size;
  float largest = 0;
  if (by_row && p.given_scale == 0) {
    each([&](Piece& x, int, bool) { largest = fmaxf(largest, x.largest()); });
    largest = block_max<kThreads>(largest);
  }
  each([&](Piece& x, int piece, bool exists) {
    constexpr int kLanes = kLaneColumns / Piece::kSize;
    const float found = by_row ? largest : fold_lanes<kLanes / 2, 1>(x.largest(), Max());
    const Fp8Scale scale = Fp8Scale::of(found, p.given_scale);
    if (!exists) return;
    x.write(p, row * p.row_size + piece * Piece::kSize, scale);
    const int group = by_row ? 0 : piece / kLanes;
    if (p.codes && piece % (by_row ? pieces : kLanes) == 0) p.scales[row * p.groups() + group] = scale.value;
  });
}

// Any rows and groups.
template <typename Element>
__global__ void __launch_bounds__(kRoundingThreads)
    round_elements_kernel(const __grid_constant__ RoundedRows p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x;
  const auto* input = static_cast<const Element*>(p.input) + row * p.row_size;
  const auto* weight = static_cast<const Element*>(p.norm_weight);
  float factor = 1;
  if (weight) {
    float squares[1] = {};
    for (int i = thread; i < p.row_size; i += kRoundingThreads)
      squares[0] = fmaf(to_float(input[i]), to_float(input[i]), squares[0]);
    block_sums<kRoundingThreads>(squares);
    factor = p.norm_factor(squares[0]);
  }
  const auto value = [&](int i) {
    const float x = to_float(input[i]);
    return weight ? to_float(Element(x * factor * to_float(weight[i]))) : x;
  };
  // Of a group, this thread has every `step`th element.
  const auto round = [&](int group, int first, int step, auto&& of_all) {
    const int end = (group + 1) * p.group_size;
    float largest = 0;
    for (int i = first; i < end; i += step) largest = fmaxf(largest, fabsf(value(i)));
    const Fp8Scale scale = Fp8Scale::of(of_all(largest), p.given_scale);
    for (int i = first; i < end; i += step) {
      const auto code = static_cast<uint8_t>(fp8_pair(value(i) * scale.inverse, 0));
      if (p.codes)
        p.codes[row * p.row_size + i] = code;
      else
        static_cast<Element*>(p.values)[row * p.row_size + i] = Element(fp8_value(code) * scale.value);
    }
    if (p.codes) p.scales[row * p.groups() + group] = scale.value;  // all threads of the group the same
  };
  if (p.groups() == 1) {
    round(0, thread, kRoundingThreads, block_max<kRoundingThreads>);
    return;
  }
  for (int group = thread / 32; group < p.groups(); group += kRoundingThreads / 32)
    round(group, group * p.group_size + thread % 32, 32,
          [](float largest) { return fold_lanes<16, 1>(largest, Max()); });
}

template <typename Element>
cudaError_t launch_round_inputs(const RoundedRows& p, const Launch& launch) {
  const auto row_bytes = static_cast<int64_t>(p.row_size * sizeof(Element));
  const int64_t pieces = row_bytes / 16;
  const bool whole = has_whole_pieces(row_bytes, {p.input, p.norm_weight, p.values}) &&
                     (p.group_size == p.row_size || p.group_size == kLaneColumns);
  const auto launch_one = [&](void (*kernel)(RoundedRows), int threads) {
    return launch_overlapped(kernel, dim3(static_cast<unsigned>(p.rows)), dim3(threads), 0, launch, p);
  };
  if (!whole || pieces > 4 * kManyRoundingThreads)
    return launch_one(round_elements_kernel<Element>, kRoundingThreads);
  if (pieces <= kRoundingThreads)
    return launch_one(round_pieces_kernel<Element, 1, kRoundingThreads>, kRoundingThreads);
  if (pieces <= 2 * kRoundingThreads)
    return launch_one(round_pieces_kernel<Element, 2, kRoundingThreads>, kRoundingThreads);
  if (pieces <= 2 * kManyRoundingThreads)
    return launch_one(round_pieces_kernel<Element, 2, kManyRoundingThreads>, kManyRoundingThreads);
  return launch_one(round_pieces_kernel<Element, 4, kManyRoundingThreads>, kManyRoundingThreads);
}

}  // namespace ortolan::cuda
