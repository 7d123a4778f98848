// Experts of many pairs of token and choice on sm_90a: wgmma fed by tensor copies.
//
// Pairs lie grouped by expert. A product has weights as rows and pairs as columns, so that a tile may have as
// many pairs as there are: an expert's are divided into tiles of equal size, a multiple of 16 up to 160. Two
// warpgroups share a tile: each has 64 rows of gates and the same ones of factors, whose activation is the
// epilogue, or twice 64 rows of down. One block per multiprocessor stays and takes tiles in turn, the tiles
// of one piece of a weight after each other, so that each weight comes from memory once. A warp loads, up to
// four steps of 64 inputs ahead and into the next tiles. A sum takes its products in the order of the inputs,
// by one warpgroup, whatever the tile, so it depends on its pair alone.
#pragma once

#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/common/warpgroups_sm90.cuh"
#include "kernels/cuda/common/wgmma_columns.cuh"

namespace ortolan::cuda {

struct ExpertSm90Shape {
  static constexpr int kGroups = 2;           // warpgroups that compute
  static constexpr int kHalf = 64 * kGroups;  // rows of gates of a tile, and as many of factors
  static constexpr int kInner = 64;           // inputs of a step: 128 bytes
  static constexpr int kBoxPairs = 16;        // of a tensor copy
  static constexpr int kStages = 4;
  static constexpr int kMostCluster = 2;  // blocks; of the weights each loads its share
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kWeightBytes = 2 * kHalf * 128;
  static constexpr int kStageBytes = kWeightBytes + kMostColumns * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
  // Of a thread.
  static constexpr int kLoadRegisters = 40;
  static constexpr int kComputeRegisters = 232;
};

struct ExpertSm90Params {
  CUtensorMap weight;  // gates and factors [2 E, I, H], or down [E, H, I], boxes of kHalf rows
  CUtensorMap inputs;  // [pairs, H or I], grouped by expert
  MoeExpertsParams layer;
  ExpertScratch scratch;
  int steps;
  int row_tiles;  // of an expert's weight
};

// A tile: some pairs of an expert, and some rows of its weight.
struct ExpertSm90Tile {
  int expert;
  int first;    // place of its first pair among all
  int count;    // of pairs, or less than 1
  int columns;  // a multiple of 16, at least as many
  int row;      // of gates and factors, or of down
};

// The tiles of a block, in the order in which it takes them.
struct ExpertSm90Tiles {
  const int32_t* offsets;
  int experts, row_tiles, rows;  // rows: of a tile
  int cluster, rank;             // blocks of the cluster, and this one's place
  int number;                    // of the cluster's next tiles
  int expert = 0, begin = 0;     // begin: number of the expert's first tiles

  __device__ __forceinline__ bool next(ExpertSm90Tile& tile) {
    for (; expert < experts; ++expert) {
      const int first = offsets[expert], pairs = offsets[expert + 1] - first;
      const int most = cluster * kMostColumns;
      const int parts = (pairs + most - 1) / most, local = number - begin;
      if (local >= parts * row_tiles) {
        begin += parts * row_tiles;
        continue;
      }
      const int blocks = parts * cluster, size = (pairs + blocks - 1) / blocks;
      const int skipped = (local % parts * cluster + rank) * size;
      const int count = min(pairs - skipped, size);
      tile = {expert, first + skipped, count, (max(count, 1) + 15) / 16 * 16, local / parts * rows};
      number += static_cast<int>(gridDim.x) / cluster;
      return true;
    }
    return false;
  }
};

// What all warps of a block know.
template <bool kGated>
struct ExpertSm90Block : StageRing<ExpertSm90Shape> {
  using Shape = ExpertSm90Shape;

  const ExpertSm90Params& p;
  int cluster;  // blocks of the cluster
  int rank;     // in it

  template <typename Visit>
  __device__ __forceinline__ void each_tile(Visit&& visit) const {
    ExpertSm90Tiles tiles{p.scratch.offsets,
                          static_cast<int>(p.layer.num_experts),
                          p.row_tiles,
                          Shape::kHalf * (kGated ? 1 : 2),
                          cluster,
                          rank,
                          static_cast<int>(blockIdx.x) / cluster};
    for (ExpertSm90Tile tile; tiles.next(tile);) visit(tile);
  }
  // A step's weights: this block's share, for all blocks of the cluster.
  __device__ __forceinline__ void load_weights(const ExpertSm90Tile& tile, int step, uint32_t target,
                                               Barrier& full) const {
    for (int half = rank; half < 2; half += cluster) {
      const int row = tile.row + (kGated ? 0 : half * Shape::kHalf);
      const int weight = kGated ? tile.expert * 2 + half : tile.expert;
      if (cluster == 1)
        copy_box(target + half * Shape::kHalf * 128, p.weight, step * Shape::kInner, row, weight, full);
      else
        copy_box(target + half * Shape::kHalf * 128, p.weight, step * Shape::kInner, row, weight, full,
                 static_cast<uint16_t>((1 << Shape::kMostCluster) - 1));
    }
  }
  // For one warp. A stage is filled by all blocks, once all have read what it held.
  __device__ __forceinline__ void load() const {
    const int lane = threadIdx.x % 32;
    Stage at;
    each_tile([&](const ExpertSm90Tile& tile) {
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step, at.advance()) {
        buffers.wait_empty(at);
        Barrier& full = buffers.full[at.place];
        if (lane == 0) {
          full.arrive_expecting(Shape::kWeightBytes + tile.columns * 128);
          load_weights(tile, step, address(at), full);
        }
        __syncwarp();
        if (lane < tile.columns / Shape::kBoxPairs)
          copy_box(address(at) + Shape::kWeightBytes + lane * Shape::kBoxPairs * 128, p.inputs,
                   step * Shape::kInner, tile.first + lane * Shape::kBoxPairs, 0, full);
      }
    });
  }
};

// A computing warpgroup.
template <typename Element, bool kGated>
struct ExpertSm90Group {
  using Shape = ExpertSm90Shape;

  const ExpertSm90Block<kGated>& block;
  int group;
  typename ExpertSm90Block<kGated>::Stage at;
  float sums[2][kMostColumns / 2];

  template <int kColumns>
  __device__ __forceinline__ void start_step(int step) {
    const uint64_t weight = wgmma_tile(block.address(at) + group * 64 * 128, 0);
    const uint64_t inputs = wgmma_tile(block.address(at) + Shape::kWeightBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kInner; k += 16)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ColumnsProduct<Element, kColumns>::add(sums[half],
                                               moved_tile(weight, half * Shape::kHalf * 128 + k * 2),
                                               moved_tile(inputs, k * 2), step + k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (block.cluster > 1 && lane < block.cluster) block.buffers.empty[place].arrive_at(lane);
    if (block.cluster == 1 && lane == 0) block.buffers.empty[place].arrive();
  }
  // All products of a tile; while a step's run, the next one's are started.
  template <int kColumns>
  __device__ __forceinline__ void multiply() {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < block.p.steps; ++step) {
      block.buffers.wait_full(at);
      start_step<kColumns>(step);
      if (step > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = at.place;
      at.advance();
    }
    wgmma_wait<0>();
    release(previous);
  }
  template <int kColumns = kMostColumns>
  __device__ __forceinline__ void multiply(int columns) {
    if constexpr (kColumns > 16) {
      if (columns < kColumns) return multiply<kColumns - 16>(columns);
    }
    multiply<kColumns>();
  }

  // Calls store(n, pair) for eight pairs at a time: the first one's number, and its place in the tile.
  template <typename Store>
  __device__ __forceinline__ void each_eight(const ExpertSm90Tile& tile, Store store) const {
#pragma unroll
    for (int n = 0; n < kMostColumns / 8; ++n)
      if (n * 8 < tile.count) store(n);
  }
  // The activations, each pair's eight features in four lanes.
  template <GatedActivation kActivation>
  __device__ __forceinline__ void store_inner(const ExpertSm90Tile& tile) const {
    const MoeExpertsParams& p = block.p.layer;
    const int lane = threadIdx.x % 32, own = tile.row + group * 64 + threadIdx.x / 32 % 4 * 16;
    const int64_t first_gate = int64_t{tile.expert} * 2 * p.inner_size + own;
    float bias[2][2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int row = i / 2 * 8 + lane / 4; own + row < p.inner_size)
        bias[i / 2][i % 2] = element_at<Element>(p.gate_up_bias, first_gate + row + i % 2 * p.inner_size);
    auto* inner = static_cast<Element*>(block.p.scratch.inner) + own + lane % 4 * 2;
    each_eight(tile, [&](int n) {
      const int pair = n * 8 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          values[i] = gate_product_nearly<kActivation>(p, sums[0][n * 4 + half * 2 + i] + bias[half][0],
                                                       sums[1][n * 4 + half * 2 + i] + bias[half][1]);
        const uint32_t features = transpose_matrix(Half<Element>::pack(values[0], values[1]));
        if (pair < tile.count && own + half * 8 < p.inner_size)
          *reinterpret_cast<uint32_t*>(inner + (tile.first + pair) * p.inner_size + half * 8) = features;
      }
    });
  }
  __device__ __forceinline__ void store_inner(const ExpertSm90Tile& tile) const {
    const GatedActivation activation = block.p.layer.activation;
    if (activation == GatedActivation::kSiluMul) return store_inner<GatedActivation::kSiluMul>(tile);
    if (activation == GatedActivation::kGeluTanhMul) return store_inner<GatedActivation::kGeluTanhMul>(tile);
    if (activation == GatedActivation::kClampedSiluMul)
      return store_inner<GatedActivation::kClampedSiluMul>(tile);
    store_inner<GatedActivation::kGeluMul>(tile);
  }
  // `pairs`: the tile's pairs, 32 after 32, one in each lane.
  __device__ __forceinline__ void store_products(const ExpertSm90Tile& tile,
                                                 const int (&pairs)[kMostColumns / 32]) const {
    const MoeExpertsParams& p = block.p.layer;
    const int lane = threadIdx.x % 32, own = tile.row + group * 64 + threadIdx.x / 32 % 4 * 16;
    const auto row = [&](int part) { return own + part / 2 * Shape::kHalf + part % 2 * 8; };
    float bias[4] = {};
#pragma unroll
    for (int part = 0; part < 4; ++part)
      if (row(part) < p.hidden_size)
        bias[part] =
            element_at<Element>(p.down_bias, int64_t{tile.expert} * p.hidden_size + row(part) + lane / 4);
    auto* products = static_cast<Element*>(block.p.scratch.products) + lane % 4 * 2;
    each_eight(tile, [&](int n) {
      Element* target = products + __shfl_sync(~0u, pairs[n / 4], n % 4 * 8 + lane / 4) * p.hidden_size;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int sum = n * 4 + part % 2 * 2;
        const uint32_t features = transpose_matrix(
            Half<Element>::pack(sums[part / 2][sum] + bias[part], sums[part / 2][sum + 1] + bias[part]));
        if (n * 8 + lane / 4 < tile.count && row(part) < p.hidden_size)
          *reinterpret_cast<uint32_t*>(target + row(part)) = features;
      }
    });
  }
  __device__ __forceinline__ void load_pairs(const ExpertSm90Tile& tile,
                                             int (&pairs)[kMostColumns / 32]) const {
#pragma unroll
    for (int n = 0; n < kMostColumns / 32; ++n)
      if (const int place = n * 32 + static_cast<int>(threadIdx.x) % 32; place < tile.count)
        pairs[n] = block.p.scratch.order[tile.first + place];
  }
  __device__ __forceinline__ void compute() {
    block.each_tile([&](const ExpertSm90Tile& tile) {
      int pairs[kMostColumns / 32] = {};
      if constexpr (!kGated) load_pairs(tile, pairs);
      multiply(tile.columns);
      if constexpr (kGated)
        store_inner(tile);
      else
        store_products(tile, pairs);
    });
  }
};

template <typename Element, bool kGated>
__global__ void __launch_bounds__(ExpertSm90Shape::kThreads, 1)
    expert_sm90_kernel(const __grid_constant__ ExpertSm90Params p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = ExpertSm90Shape;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> buffers;
  if (threadIdx.x == 0) {
    buffers.init(cluster_size() * Shape::kGroups * 4);
    fence_barriers();
  }
  cluster_sync();
  launch_dependents();
  wait_for_previous_kernel();

  const ExpertSm90Block<kGated> block{{buffers, shared_memory}, p, cluster_size(), cluster_rank()};
  const auto load = [&] {
    if (threadIdx.x % 128 < 32) block.load();
  };
  run_warpgroups<Shape>(load, [&](int group) {
    ExpertSm90Group<Element, kGated> computing{block, group, {}, {}};
    computing.compute();
  });
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
