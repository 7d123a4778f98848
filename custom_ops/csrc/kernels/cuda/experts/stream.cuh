// Experts of low-bit weights and few pairs of token and choice: the weights of the chosen experts stream
// through shared memory once for up to eight pairs, as those of a linear layer do (low_bit/stream.cuh, which
// says how).
//
// The rows of all chosen experts are one list, of which each block has an equal share. Where it begins
// another expert, it brings that one's inputs. A pair's sums have the order that the layer gives them,
// whatever the number of pairs.
#pragma once

#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/low_bit/stream.cuh"

namespace ortolan::cuda {

constexpr int kStreamPairs = 8;  // that share a pass over the weights

struct ExpertStreamParams {
  LowBitStreamParams first;  // the product of expert 0
  StackedWeight weights;
  ExpertStep step;
  ExpertScratch scratch;
  bool gated;      // gate_up, else down
  bool is_shared;  // pairs lie grouped by expert; else each has its own rows of the list
  int pass_pairs;  // up to kStreamPairs
};

// The pairs of a block's rows.
struct StreamPairs {
  int expert;
  int first;  // place of the first in the order of experts, or the pair itself
  int count;

  // Those of the expert at place `slot` of the chosen ones; for whole warps.
  static __device__ __forceinline__ StreamPairs shared(const int32_t* offsets, int experts, int slot) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < experts; base += 32) {
      const int own = min(base + lane, experts - 1), begin = offsets[own];
      const int pairs = base + lane < experts ? offsets[own + 1] - begin : 0;
      const unsigned chosen = __ballot_sync(~0u, pairs > 0);
      if (slot < __popc(chosen)) {
        const auto owner = static_cast<int>(__fns(chosen, 0, slot + 1));
        return {base + owner, __shfl_sync(~0u, begin, owner), __shfl_sync(~0u, pairs, owner)};
      }
      slot -= __popc(chosen);
    }
    return {0, 0, 0};
  }
  static __device__ __forceinline__ StreamPairs of(const ExpertStreamParams& p, int slot) {
    if (p.is_shared) return shared(p.scratch.offsets, static_cast<int>(p.step.num_experts), slot);
    const int32_t expert = p.step.experts[slot];
    return {expert, slot, exists(p.step, expert) ? 1 : 0};
  }
  // Experts or pairs that have rows in the list; for whole warps.
  static __device__ __forceinline__ int slots(const ExpertStreamParams& p) {
    const auto experts = static_cast<int>(p.step.num_experts);
    if (!p.is_shared) return static_cast<int>(p.step.num_tokens * p.step.top_k);
    int chosen = 0;
    for (int expert = threadIdx.x % 32; expert < experts; expert += 32)
      chosen += p.scratch.offsets[expert + 1] > p.scratch.offsets[expert];
    return __reduce_add_sync(~0u, chosen);
  }
};

// What a block does with some rows of an expert and up to kStreamPairs of its pairs.
template <typename Kind>
struct ExpertStream {
  using Element = typename Kind::Element;
  static constexpr int kDepth = 5;  // steps of a warp on their way
  static constexpr int kTileSums = LowBitPlan::sums_bytes<1>() / 4;

  const ExpertStreamParams& p;
  uint32_t ring;             // of the warp
  float* sums;               // [2, kTileSums]
  uint32_t inputs;           // [pairs, inputs]
  int first_step, end_step;  // of the warp
  bool has_waited;           // for the kernel in front
  int turn = 0;

  __device__ __forceinline__ int pair_of(const StreamPairs& pairs, int n) const {
    return p.is_shared ? p.scratch.order[pairs.first + n] : pairs.first;
  }
  __device__ __forceinline__ const uint4* input_of(int pair) const {
    const int64_t pieces = p.first.linear.num_inputs / 8;
    const int64_t row = p.gated ? pair / p.step.top_k : pair;
    return static_cast<const uint4*>(p.gated ? p.step.x : p.scratch.inner) + row * pieces;
  }
  __device__ __forceinline__ void load_inputs(const StreamPairs& pairs, int first, int count) const {
    const int pieces = static_cast<int>(p.first.linear.num_inputs) / 8;
    const int stride = p.first.plan.token_stride, padded = (stride - 64) / 16;
    const uint4* rows[kStreamPairs];
#pragma unroll
    for (int n = 0; n < kStreamPairs; ++n)
      if (n < count) rows[n] = input_of(pair_of(pairs, first + n));
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += kGemvThreads) {
      uint4 x[kStreamPairs];
#pragma unroll
      for (int n = 0; n < kStreamPairs; ++n)
        if (n < count) x[n] = i < pieces ? rows[n][i] : uint4{};
#pragma unroll
      for (int n = 0; n < kStreamPairs; ++n)
        if (n < count) store_inputs<Kind::Format::kBits>(inputs + n * stride, i, x[n]);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void store(const LowBitStreamParams& own, const StreamPairs& pairs, int n,
                                        int64_t output, float gate, float factor) const {
    const int64_t bias_row = pairs.expert * own.weight.rows + output;
    const int64_t place = pair_of(pairs, n) * own.linear.num_outputs + output;
    if (p.gated) {
      gate += element_at<Element>(p.step.gate_up_bias, bias_row);
      factor += element_at<Element>(p.step.gate_up_bias, bias_row + p.step.inner_size);
      static_cast<Element*>(p.scratch.inner)[place] = Element(gate_product(p.step, gate, factor));
    } else {
      static_cast<Element*>(p.scratch.products)[place] =
          Element(gate + element_at<Element>(p.step.down_bias, bias_row));
    }
  }
  // Outputs of a tile from the warps' sums [warp, row, pair]. Each turn begins with another warp.
  __device__ __forceinline__ void finish(const LowBitStreamParams& own, const StreamPairs& pairs, int first,
                                         int tile, const float* tile_sums) const {
    const int outputs = p.gated ? 8 : 16;
    const auto sum_of = [&](int row, int pair, int64_t weight_row) {
      const float* from = tile_sums + row * LowBitPlan::kTokens + pair;
      float sum = *from;
#pragma unroll
      for (int warp = 1; warp < kGemvWarps; ++warp) sum += from[warp * 16 * LowBitPlan::kTokens];
      return Kind::kFormat == LowBitFormat::kNvfp4 ? sum * own.weight.float_scales[weight_row] : sum;
    };
    const int i = (static_cast<int>(threadIdx.x) + turn * 32) % kGemvThreads;
    const int row = i % outputs, pair = i / outputs;
    const int64_t output = int64_t{tile} * outputs + row;
    if (pair >= own.pass.num_tokens || output >= own.linear.num_outputs) return;
    const float gate = sum_of(row, pair, output);
    const float factor = p.gated ? sum_of(row + 8, pair, own.linear.num_outputs + output) : 0.0f;
    store(own, pairs, first + pair, output, gate, factor);
  }
  // Tiles `tile` .. own.plan.tiles of the weight in own, for own.pass.num_tokens pairs from `first` on.
  __device__ __forceinline__ void pass(const LowBitStreamParams& own, const StreamPairs& pairs, int first,
                                       int tile) {
    const int warp = threadIdx.x / 32;
    const LowBitCursor start{first_step < end_step ? tile : own.plan.tiles, first_step, first_step, end_step,
                             1};
    LowBitFetcher<Kind> fetcher{own, ring, start};
    fetcher.start();
#pragma unroll 1
    for (int n = 0; n < kDepth; ++n) fetcher.fetch(n);
    if (!has_waited) wait_for_previous_kernel();
    has_waited = true;
    load_inputs(pairs, first, own.pass.num_tokens);
    LowBitProducts<Kind, 1> products{own};
    products.prepare(inputs);
#pragma unroll 1
    for (int place = 0; tile < own.plan.tiles; ++tile, ++turn) {
      float* tile_sums = sums + turn % 2 * kTileSums;
      products.start(tile);
#pragma unroll 1
      for (int step = first_step; step < end_step; ++step) {
        copy_async_wait<kDepth - 1>();
        __syncwarp();
        products.multiply(ring + place * LowBitPlan::kStageBytes, step);
        __syncwarp();
        fetcher.fetch(place);
        if (++place == kDepth) place = 0;
      }
      products.store(tile_sums + warp * 16 * LowBitPlan::kTokens);
      __syncthreads();
      finish(own, pairs, first, tile, tile_sums);
    }
  }
  // The block's share of the list.
  __device__ __forceinline__ void run() {
    const int tiles = p.first.plan.tiles, rows = StreamPairs::slots(p) * tiles;
    const auto edge = [&](unsigned block) { return static_cast<int>(int64_t{rows} * block / gridDim.x); };
    const int end = edge(blockIdx.x + 1);
#pragma unroll 1
    for (int row = edge(blockIdx.x); row < end;) {
      const int tile = row % tiles, last = min(tiles, tile + end - row);
      const StreamPairs pairs = StreamPairs::of(p, row / tiles);
      row += last - tile;
      LowBitStreamParams own = p.first;
      if (pairs.count > 0) own.weight = p.weights.of(pairs.expert);
      own.plan.tiles = last;
#pragma unroll 1
      for (int first = 0; first < pairs.count; first += p.pass_pairs) {
        own.pass.num_tokens = min(p.pass_pairs, pairs.count - first);
        pass(own, pairs, first, tile);
      }
    }
    if (!has_waited) wait_for_previous_kernel();  // whoever waits for this one waits for all before it
  }
};

// Which experts are chosen is known before the kernel in front of the second product has ended: the first
// product lets the second start when it has seen them.
template <typename Kind>
__global__ void __launch_bounds__(kGemvThreads, 2)
    expert_stream_kernel(const __grid_constant__ ExpertStreamParams p) {
  using Stream = ExpertStream<Kind>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  constexpr int kRingBytes = Stream::kDepth * LowBitPlan::kStageBytes;
  if (p.gated) wait_for_previous_kernel();
  launch_dependents();
  const int warp = threadIdx.x / 32, steps = p.first.plan.steps;
  auto* sums = reinterpret_cast<float*>(shared_memory + kGemvWarps * kRingBytes);
  Stream stream{p,
                shared_address(shared_memory) + warp * kRingBytes,
                sums,
                shared_address(sums) + 2 * Stream::kTileSums * 4,
                warp * steps / kGemvWarps,
                (warp + 1) * steps / kGemvWarps,
                p.gated};
  stream.run();
}

}  // namespace ortolan::cuda
