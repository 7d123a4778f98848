// Linear layers of many rows of fp8 codes with fp8 weights on sm_90a, in the frame of row_tiles_sm90.cuh.
//
// Tensor cores add products of codes with about 14 bits, and cut off what is below. So a slice of a row's
// sums, of 128 or 512 inputs, goes into totals of float32 before the next one begins, in other registers,
// whose products run meanwhile. That takes three sums an output, so each of two warpgroups takes half of the
// rows of every tile; the second begins a slice later, so that they are not at their epilogues together.
//
// kInBlocks: scales belong to 128 inputs of a row, and to 128 x 128 weights; a slice is multiplied by both as
// it joins the totals. Else they belong to rows, and join at the end.
//
// Source of the two sums: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.2, "Increasing Accumulation
// Precision".
#pragma once

#include "kernels/cuda/linear/row_tiles_sm90.cuh"

namespace ortolan::cuda {

template <typename Element, bool kGated>
using Fp8RowsBase = RowsSm90Outputs<Element, Float8, kGated, 1>;

template <typename Element, bool kGated, bool kInBlocks>
struct Fp8RowsGroup : Fp8RowsBase<Element, kGated> {
  using Base = Fp8RowsBase<Element, kGated>;
  using Shape = RowsSm90Shape;
  using Base::at, Base::block, Base::group, Base::sums;
  static constexpr int kReaders = Shape::kGroups;
  static constexpr int kParts = kGated ? 2 : 1;  // columns of gates and of factors
  static constexpr int kBlock = 128;

  float slices[2][Shape::kColumns];  // sums of this slice and of the one before

  // What slices are multiplied by: where the scales of a thread's two rows begin, and of its columns' blocks.
  struct Places {
    const float* rows[2];
    const float* columns[kParts];
  };
  struct Scales {
    float rows[2], columns[kParts];
  };
  __device__ __forceinline__ Places places(int row, int column) const {
    const RowsSm90Params& p = block.p;
    Places found;
#pragma unroll
    for (int half = 0; half < 2; ++half) found.rows[half] = row_scales(row + half * 8);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      found.columns[part] =
          p.weight_scales + (part * p.linear.num_outputs + column) / kBlock * p.scale_groups;
    return found;
  }
  __device__ __forceinline__ const float* row_scales(int row) const {
    const int64_t last = block.p.linear.num_tokens - 1;
    return block.p.input_scales + min(int64_t{row}, last) * block.p.scale_groups;
  }
  __device__ __forceinline__ Scales read_scales(const Places& from, int step) const {
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) scales.rows[half] = __ldg(from.rows[half] + step);
#pragma unroll
    for (int part = 0; part < kParts; ++part) scales.columns[part] = __ldg(from.columns[part] + step);
    return scales;
  }

  __device__ __forceinline__ void fold(const float (&slice)[Shape::kColumns], const Scales& by) {
    float factors[2][kParts];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int part = 0; part < kParts; ++part) factors[half][part] = by.rows[half] * by.columns[part];
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n)
      sums[0][n] = kInBlocks ? fmaf(slice[n], factors[n / 2 % 2][n * kParts / Shape::kColumns], sums[0][n])
                             : sums[0][n] + slice[n];
  }

  template <int kSlice>
  __device__ __forceinline__ void start_step(bool adds) {
    block.buffers.wait_full(at);
    wgmma_fence();
    this->start_products(0, slices[kSlice], adds);
    wgmma_commit();
  }
  // Waits for the step before the one that has just been started.
  __device__ __forceinline__ void end_previous(int& previous) {
    wgmma_wait<1>();
    block.release(previous);
    previous = at.place;
    at.advance();
  }
  // The rest of the slice that begins with step `first`.
  template <int kSlice>
  __device__ __forceinline__ void multiply_rest(int& previous, int first) {
    if constexpr (kInBlocks) return;  // its slices are single steps
    const int end = min(first + block.p.slice_steps, block.p.steps);
#pragma unroll 1
    for (int step = first + 1; step < end; ++step) {
      start_step<kSlice>(true);
      end_previous(previous);
    }
  }
  // A slice; its first step runs while the one before is folded.
  template <int kSlice>
  __device__ __forceinline__ void multiply_slice(const Places& from, Scales& scales, int& previous,
                                                 int first) {
    start_step<kSlice>(false);
    const Scales own = kInBlocks ? read_scales(from, first) : Scales{};
    end_previous(previous);
    fold(slices[1 - kSlice], scales);
    scales = own;
    multiply_rest<kSlice>(previous, first);
  }

  // All products of a tile. In a block's first one, the other group may begin after a slice.
  __device__ __forceinline__ void multiply(int row, int column, bool is_first_tile) {
    const int slice = kInBlocks ? 1 : block.p.slice_steps, steps = block.p.steps;
    const Places from = places(row, column);
#pragma unroll
    for (float& sum : sums[0]) sum = 0;
    Scales scales = kInBlocks ? read_scales(from, 0) : Scales{};
    start_step<0>(false);
    int previous = at.place, first = slice;
    at.advance();
    multiply_rest<0>(previous, 0);
    if (is_first_tile && group == 0) this->pass_turn();
#pragma unroll 1
    for (; first + slice < steps; first += 2 * slice) {
      multiply_slice<1>(from, scales, previous, first);
      multiply_slice<0>(from, scales, previous, first + slice);
    }
    if (first < steps) {
      multiply_slice<1>(from, scales, previous, first);
      wgmma_wait<0>();
      fold(slices[1], scales);
    } else {
      wgmma_wait<0>();
      fold(slices[0], scales);
    }
    block.release(previous);
  }

  // Multiplies the sums by the scales of their rows and columns. kWhole: all columns are there.
  template <bool kWhole>
  __device__ __forceinline__ void scale_sums(int row, int column) {
    constexpr int kPieces = Shape::kColumns / 4 / kParts;
    const int64_t outputs = block.p.linear.num_outputs;
    const float rows[] = {__ldg(row_scales(row)), __ldg(row_scales(row + 8))};
    float2 scales[kParts][kPieces];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = column + threadIdx.x % 4 * 2;
      const auto* from = reinterpret_cast<const float2*>(block.p.weight_scales + part * outputs + first);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        scales[part][piece] = kWhole || first + piece * 8 < outputs ? __ldg(from + piece * 4) : float2{};
    }
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) {
      const float2 by = scales[n / 4 / kPieces][n / 4 % kPieces];
      sums[0][n] *= rows[n / 2 % 2] * (n % 2 ? by.y : by.x);
    }
  }

  __device__ __forceinline__ void compute() {
    if (group == 1) this->take_turn();
    block.each_tile([&](int turn, int row, int column) {
      const int own = this->own_row(row + this->first_row());
      multiply(own, column, turn == 0);
      if constexpr (!kInBlocks) {
        if (column + Base::Block::kOutputs <= block.p.linear.num_outputs)
          scale_sums<true>(own, column);
        else
          scale_sums<false>(own, column);
      }
      this->store(row, column);
    });
    this->finish_stores();
  }
};

}  // namespace ortolan::cuda
