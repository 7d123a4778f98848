// Experts of many pairs of token and choice on tensor cores by mma.sync, for sm_80 and later.
//
// Pairs lie grouped by expert. A block multiplies a tile of one expert's pairs with two times 64 rows of its
// weight: rows of the gate and the same ones of the factor, whose activation is the epilogue, or neighbouring
// rows of down. 8 warps share a tile, each with 32 pairs; tiles of inputs and weights pass through a ring of
// stages in shared memory, whose rows are padded so that the eight rows of a matrix load lie in different
// banks. The grid has a block for every tile that there may be; those without pairs end at once. An output's
// sum has one order, whatever the tile, so it depends on its pair alone.
#pragma once

#include "gate_product.cuh"
#include "instances.h"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/common/warp.cuh"

namespace ortolan::cuda {

constexpr int kGroupedThreads = 256;
constexpr int kHalfColumns = 64;  // rows of weights of one half

// kRows: pairs of a tile.
template <int kRows>
struct GroupedShape {
  static constexpr int kRowTiles = 2;  // of 16 pairs, per warp
  static constexpr int kRowWarps = kRows / (16 * kRowTiles);
  static constexpr int kColumnWarps = kGroupedThreads / 32 / kRowWarps;
  static constexpr int kColumns = kHalfColumns / kColumnWarps;  // of each half, per warp
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kDepth = 32;           // elements of a row per stage
  static constexpr int kStride = kDepth + 8;  // elements
  static constexpr int kStages = 4;
  static constexpr int kStageRows = kRows + 2 * kHalfColumns;
  static constexpr int kSharedBytes = kStages * kStageRows * kStride * 2;
};

// A block's share of an expert's pairs.
struct ExpertTile {
  int expert;
  int first;  // place of its first pair among all
  int count;  // of pairs, up to the tile's size; 0: there is no such tile

  // For whole warps: each lane looks at one expert at a time.
  static __device__ __forceinline__ ExpertTile find(const int32_t* offsets, int num_experts, int rows,
                                                    int tile) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < num_experts; base += 32) {
      const int own = min(base + lane, num_experts - 1);
      const int begin = offsets[own];
      const int pairs = base + lane < num_experts ? offsets[own + 1] - begin : 0;
      const int tiles = (pairs + rows - 1) / rows;
      const int end = inclusive_sum(tiles, lane);
      const unsigned holds = __ballot_sync(~0u, tile < end);
      if (holds) {
        const int owner = __ffs(static_cast<int>(holds)) - 1;
        const int skipped = (tile - __shfl_sync(~0u, end - tiles, owner)) * rows;
        return {base + owner, __shfl_sync(~0u, begin, owner) + skipped,
                min(__shfl_sync(~0u, pairs, owner) - skipped, rows)};
      }
      tile -= __shfl_sync(~0u, end, 31);
    }
    return {0, 0, 0};
  }
};

template <typename Element, int kRows, bool kGated>
struct GroupedProduct {
  using Shape = GroupedShape<kRows>;
  static constexpr int kChunks = Shape::kDepth / 8;  // 16-byte pieces of a stage's row
  static constexpr int kRowCopies = (kRows * kChunks + kGroupedThreads - 1) / kGroupedThreads;
  static constexpr int kWeightCopies = 2 * kHalfColumns * kChunks / kGroupedThreads;

  const MoeExpertsParams& p;
  const ExpertScratch& scratch;
  ExpertTile tile;
  int first_column;
  Element* shared;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int depth = static_cast<int>(kGated ? p.hidden_size : p.inner_size);  // elements of a row
  const Element* rows[kRowCopies];        // where the thread's pieces of inputs lie; null: zeros
  const Element* weights[kWeightCopies];  // and those of weights
  float sums[Shape::kRowTiles][Shape::kColumnTiles][2][4] = {};

  __device__ __forceinline__ int warp_row() const {
    return warp / Shape::kColumnWarps * 16 * Shape::kRowTiles;
  }
  __device__ __forceinline__ int warp_column() const { return warp % Shape::kColumnWarps * Shape::kColumns; }
  // The thread's column in a tile of 8, the first of two.
  __device__ __forceinline__ int column(int n) const {
    return first_column + warp_column() + n * 8 + lane % 4 * 2;
  }

  __device__ __forceinline__ void aim() {
    const int chunk = threadIdx.x % kChunks * 8;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int row = (threadIdx.x + i * kGroupedThreads) / kChunks;
      rows[i] = nullptr;
      if (row >= tile.count) continue;
      const int64_t source = kGated ? scratch.order[tile.first + row] / p.top_k : tile.first + row;
      rows[i] = static_cast<const Element*>(kGated ? p.x : scratch.inner) + source * depth + chunk;
    }
    const int outputs = static_cast<int>(kGated ? p.inner_size : p.hidden_size);
    const int64_t expert_rows = kGated ? 2 * p.inner_size : p.hidden_size;
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int row = (threadIdx.x + i * kGroupedThreads) / kChunks;
      const int half = row / kHalfColumns, column = first_column + row % kHalfColumns;
      const int output = kGated ? column : column + half * kHalfColumns;
      const int64_t source = tile.expert * expert_rows + output + (kGated ? half * p.inner_size : 0);
      weights[i] = nullptr;
      if (output < outputs)
        weights[i] = static_cast<const Element*>(kGated ? p.gate_up : p.down) + source * depth + chunk;
    }
  }

  __device__ __forceinline__ Element* stage(int index) const {
    return shared + index % Shape::kStages * Shape::kStageRows * Shape::kStride;
  }

  // Starts to copy elements index * kDepth .. of all rows to a stage.
  __device__ __forceinline__ void load(int index) const {
    const int chunk = threadIdx.x % kChunks * 8, first = index * Shape::kDepth;
    const bool inside = first + chunk < depth;
    const auto copy = [&](int row, const Element* source) {
      const bool valid = inside && source;
      copy_async_16(stage(index) + row * Shape::kStride + chunk,
                    valid ? static_cast<const void*>(source + first) : p.x, valid);
    };
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      if (const int row = (threadIdx.x + i * kGroupedThreads) / kChunks; row < kRows) copy(row, rows[i]);
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i)
      copy(kRows + (threadIdx.x + i * kGroupedThreads) / kChunks, weights[i]);
  }

  __device__ __forceinline__ void multiply(int index) {
    const uint32_t row_address =
        shared_address(stage(index) + (warp_row() + lane % 16) * Shape::kStride + lane / 16 * 8);
    const uint32_t weight_address = shared_address(
        stage(index) + (kRows + lane / 16 * kHalfColumns + warp_column() + lane % 8) * Shape::kStride +
        lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < Shape::kDepth / 16; ++k) {
      uint32_t inputs[Shape::kRowTiles][4];
#pragma unroll
      for (int r = 0; r < Shape::kRowTiles; ++r)
        load_matrix_x4(inputs[r], row_address + (r * 16 * Shape::kStride + k * 16) * 2);
#pragma unroll
      for (int n = 0; n < Shape::kColumnTiles; ++n) {
        uint32_t weight[4];
        load_matrix_x4(weight, weight_address + (n * 8 * Shape::kStride + k * 16) * 2);
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
          Half<Element>::multiply_add(sums[r][n][0], inputs[r], weight[0], weight[1]);
          Half<Element>::multiply_add(sums[r][n][1], inputs[r], weight[2], weight[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int steps = (depth + Shape::kDepth - 1) / Shape::kDepth;
#pragma unroll
    for (int index = 0; index < Shape::kStages - 1; ++index) {
      if (index < steps) load(index);
      copy_async_commit();
    }
    for (int index = 0; index < steps; ++index) {
      copy_async_wait<Shape::kStages - 2>();
      __syncthreads();  // this stage is there, and nobody reads the one before it any more
      if (index + Shape::kStages - 1 < steps) load(index + Shape::kStages - 1);
      copy_async_commit();
      multiply(index);
    }
  }

  // Calls store(place of the pair in the tile, r, which two of the four sums) for each pair of the thread.
  template <typename Store>
  __device__ __forceinline__ void each_row(Store store) const {
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (const int row = warp_row() + r * 16 + half * 8 + lane / 4; row < tile.count)
          store(row, r, 2 * half);
  }

  __device__ __forceinline__ void store_inner() const {
    const int64_t gate_row = tile.expert * 2 * p.inner_size, factor_row = gate_row + p.inner_size;
    each_row([&](int row, int r, int e) {
      auto* target = static_cast<Element*>(scratch.inner) + (tile.first + row) * p.inner_size;
#pragma unroll
      for (int n = 0; n < Shape::kColumnTiles; ++n) {
        if (column(n) >= p.inner_size) continue;
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float gate =
              sums[r][n][0][e + i] + element_at<Element>(p.gate_up_bias, gate_row + column(n) + i);
          const float factor =
              sums[r][n][1][e + i] + element_at<Element>(p.gate_up_bias, factor_row + column(n) + i);
          values[i] = gate_product(p, gate, factor);
        }
        *reinterpret_cast<uint32_t*>(target + column(n)) = Half<Element>::pack(values[0], values[1]);
      }
    });
  }

  __device__ __forceinline__ void store_products() const {
    each_row([&](int row, int r, int e) {
      auto* target =
          static_cast<Element*>(scratch.products) + scratch.order[tile.first + row] * p.hidden_size;
#pragma unroll
      for (int n = 0; n < 2 * Shape::kColumnTiles; ++n) {
        const int place = column(n / 2) + n % 2 * kHalfColumns;
        if (place >= p.hidden_size) continue;
        const int64_t bias = tile.expert * p.hidden_size + place;
        *reinterpret_cast<uint32_t*>(target + place) =
            Half<Element>::pack(sums[r][n / 2][n % 2][e] + element_at<Element>(p.down_bias, bias),
                                sums[r][n / 2][n % 2][e + 1] + element_at<Element>(p.down_bias, bias + 1));
      }
    });
  }
};

template <typename Element, int kRows, bool kGated>
__global__ void __launch_bounds__(kGroupedThreads, 2)
    grouped_kernel(const __grid_constant__ MoeExpertsParams p,
                   const __grid_constant__ ExpertScratch scratch) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  refuse_architecture();  // sm90.cuh takes all of it
#else
  using Product = GroupedProduct<Element, kRows, kGated>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  launch_dependents();
  wait_for_previous_kernel();
  const ExpertTile tile =
      ExpertTile::find(scratch.offsets, static_cast<int>(p.num_experts), kRows, static_cast<int>(blockIdx.x));
  if (tile.count == 0) return;
  Product product{.p = p,
                  .scratch = scratch,
                  .tile = tile,
                  .first_column = static_cast<int>(blockIdx.y) * kHalfColumns * (kGated ? 1 : 2),
                  .shared = reinterpret_cast<Element*>(shared_memory)};
  product.aim();
  product.run();
  if constexpr (kGated)
    product.store_inner();
  else
    product.store_products();
#endif
}

template <typename Element, int kRows, bool kGated>
cudaError_t launch_grouped_tiles(const MoeExpertsParams& p, const ExpertScratch& scratch,
                                 const Launch& launch) {
  constexpr auto kKernel = grouped_kernel<Element, kRows, kGated>;
  if (const cudaError_t error = allow_shared_memory<kKernel>(launch.device); error != cudaSuccess)
    return error;
  // Each expert's last tile may hold a single pair.
  const int64_t pairs = p.num_tokens * p.top_k;
  const int64_t tiles = pairs < p.num_experts ? pairs : pairs / kRows + p.num_experts;
  const int64_t columns =
      kGated ? divide_up(p.inner_size, kHalfColumns) : divide_up(p.hidden_size, 2 * kHalfColumns);
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(columns)),
                           dim3(kGroupedThreads), GroupedShape<kRows>::kSharedBytes, launch, p, scratch);
}

template <typename Element, int kRows>
cudaError_t launch_grouped_rows(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                const Launch& launch) {
  return gated ? launch_grouped_tiles<Element, kRows, true>(p, scratch, launch)
               : launch_grouped_tiles<Element, kRows, false>(p, scratch, launch);
}

template <typename Element>
cudaError_t launch_grouped_product(const MoeExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                   const Launch& launch) {
  const int64_t pairs_per_expert = p.num_tokens * p.top_k / p.num_experts;
  if (pairs_per_expert <= 32) return launch_grouped_rows<Element, 32>(p, scratch, gated, launch);
  return pairs_per_expert <= 96 ? launch_grouped_rows<Element, 64>(p, scratch, gated, launch)
                                : launch_grouped_rows<Element, 128>(p, scratch, gated, launch);
}

}  // namespace ortolan::cuda
