// Linear layers of many rows of 16-bit elements on sm_90a, in the frame of row_tiles_sm90.cuh.
//
// Two warpgroups take a block's tiles alternately, all of a tile each: one is at its epilogue while the other
// feeds the tensor cores. A sum takes its products in the order of the inputs, by one warpgroup: the bits of
// a row depend neither on how many rows there are nor on its place.
//
// kSliced: a sum is that of few_sm90.cuh's chains, the slices of a row apart, then one added to another. That
// takes twice the registers, so each warpgroup takes half of the rows of every tile.
#pragma once

#include "row_tiles_sm90.cuh"

namespace ortolan::cuda {

template <typename Element, bool kGated, bool kSliced>
using RowsSm90Base = RowsSm90Outputs<Element, Element, kGated, kSliced ? 1 : 2>;

template <typename Element, bool kGated, bool kSliced>
struct RowsSm90Group : RowsSm90Base<Element, kGated, kSliced> {
  using Base = RowsSm90Base<Element, kGated, kSliced>;
  using Shape = RowsSm90Shape;
  using Base::at, Base::block, Base::group, Base::sums;
  static constexpr int kReaders = kSliced ? Shape::kGroups : 1;

  float totals[kSliced ? Shape::kColumns : 1];  // of the slices before

  // The stages of a tile of the other group.
  __device__ __forceinline__ void pass_stages() {
    const int end = at.place + block.p.steps;
    at.place = end % Shape::kStages;
    at.parity ^= end / Shape::kStages & 1;
  }

  __device__ __forceinline__ void start_step(bool adds) {
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Base::kRowTiles; ++tile) this->start_products(tile, sums[tile], adds);
    wgmma_commit();
  }

  // Adds a slice's sums to those of the slices before, or ends with the sums of all. Sums that begin with
  // wgmma may be -0 where those of mma.sync are 0.
  __device__ __forceinline__ void fold_slice(bool is_first, bool is_last) {
    if constexpr (kSliced) {
#pragma unroll
      for (int n = 0; n < Shape::kColumns; ++n) {
        totals[n] = (is_first ? 0.0f : totals[n]) + sums[0][n];
        if (is_last) sums[0][n] = totals[n];
      }
    }
  }

  // All products of a tile; while a step's run, the next one's are started, in the same slice.
  __device__ __forceinline__ void multiply() {
    const int slice_steps = kSliced ? block.p.slice_steps : block.p.steps;
    int previous = 0, left = 0;  // steps of the slice
    bool is_first = true;
#pragma unroll 1
    for (int step = 0; step < block.p.steps; ++step) {
      const bool begins = left == 0;
      if (begins && step > 0) {
        wgmma_wait<0>();
        block.release(previous);
        fold_slice(is_first, false);
        is_first = false;
      }
      if (begins) left = slice_steps;
      --left;
      block.buffers.wait_full(at);
      start_step(!begins);
      if (!begins) {
        wgmma_wait<1>();
        block.release(previous);
      }
      previous = at.place;
      at.advance();
    }
    if constexpr (!kSliced) this->pass_turn();
    wgmma_wait<0>();
    block.release(previous);
    fold_slice(is_first, true);
  }

  __device__ __forceinline__ void compute() {
    if constexpr (kSliced)
      compute_all();
    else
      compute_alternately();
    this->finish_stores();
  }
  __device__ __forceinline__ void compute_all() {
    block.each_tile([&](int, int row, int column) {
      multiply();
      this->store(row, column);
    });
  }
  __device__ __forceinline__ void compute_alternately() {
    int turns = 0;
    if (group == 1) this->pass_turn();
    block.each_tile([&](int turn, int row, int column) {
      turns = turn + 1;
      if (turn % Shape::kGroups != group) return pass_stages();
      this->take_turn();
      multiply();
      this->store(row, column);
    });
    if (turns % Shape::kGroups == group) this->take_turn();  // leaves no barrier half full
  }
};

}  // namespace ortolan::cuda
