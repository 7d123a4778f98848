// Gated linear layers of many rows of 16-bit elements on sm_90a: act(x gate^T) * (x up^T), wgmma fed by
// tensor copies, the activation in the epilogue, so that products never leave registers.
//
// Clusters of two blocks stay and take tiles in turn: bands of rows, column after column of each, so that a
// wave of clusters shares through L2 what it reads. The blocks of a cluster have the same columns; one loads
// the gates' weights for both, the other the factors'. One thread loads, up to six steps of 64 inputs ahead
// and into the next tiles. Two warpgroups take a block's tiles alternately, all of a tile each: one is at its
// epilogue while the other feeds the tensor cores. Gate and factor of an output lie in one thread. A sum
// takes its products in the order of the inputs, by one warpgroup: the bits of a row depend neither on how
// many rows there are nor on its place. So no tile reaches beyond the last row; it begins earlier instead,
// and what two blocks compute both write alike: filling in rows that are not there is slow. Source of the
// schedule: CUTLASS's warp-specialised persistent kernels for sm_90, "pingpong".
#pragma once

#include "gates.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace ortolan::cuda {

struct GatedSm90Shape {
  static constexpr int kGroups = 2;  // warpgroups that compute
  static constexpr int kRows = 128;  // of a tile
  static constexpr int kColumns = 64;
  static constexpr int kInner = 64;  // inputs of a step: 128 bytes
  static constexpr int kStages = 6;
  static constexpr int kCluster = 2;  // blocks; of the weights each loads a half
  static constexpr int kBand = 8;     // rows of clusters' tiles whose inputs stay in L2
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kInputBytes = kRows * 128;
  static constexpr int kWeightBytes = kColumns * 128;  // of gates, then the same of factors
  static constexpr int kStageBytes = kInputBytes + 2 * kWeightBytes;
  static constexpr int kOutputBytes = kRows * kColumns * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes + kGroups * kOutputBytes + 1024;
  // Of a thread; together what the block is launched with.
  static constexpr int kLoadRegisters = 24;
  static constexpr int kComputeRegisters = 240;
};

// The tiles of clusters, in the order in which they are taken.
struct GatedTiles {
  int rows;
  int columns;

  __host__ __device__ int count() const { return rows * columns; }
  // Row and column of tile `number`.
  __device__ __forceinline__ int2 place(int number) const {
    const int first = number / (GatedSm90Shape::kBand * columns) * GatedSm90Shape::kBand;
    const int band_rows = min(GatedSm90Shape::kBand, rows - first), within = number - first * columns;
    return make_int2(first + within % band_rows, within / band_rows);
  }
};

struct GatedSm90Params {
  CUtensorMap input;   // [T, K], boxes of a tile's rows and a step's inputs
  CUtensorMap weight;  // [2, N, K], boxes of a tile's columns and a step's inputs
  CUtensorMap output;  // [T, N], boxes of 64 rows and columns
  GatedTiles tiles;
  int last_row;  // where the last tile begins
  int steps;
  GatedActivation activation;
};

// What all warps of a block know.
struct GatedSm90Block {
  using Shape = GatedSm90Shape;
  using Stage = Ring<Shape::kStages>;

  const GatedSm90Params& p;
  Handover<Shape::kStages>& buffers;
  uint32_t stages;  // address of the ring
  int rank;         // in the cluster

  // Calls visit(turn, row, column) for each tile of the block: its number among them, and where it begins.
  template <typename Visit>
  __device__ __forceinline__ void each_tile(Visit&& visit) const {
    const int clusters = static_cast<int>(gridDim.x) / Shape::kCluster;
    const int cluster = static_cast<int>(blockIdx.x) / Shape::kCluster;
    for (int turn = 0, number = cluster; number < p.tiles.count(); ++turn, number += clusters) {
      const int2 place = p.tiles.place(number);
      const int row = (place.x * Shape::kCluster + rank) * Shape::kRows;
      visit(turn, min(row, p.last_row), place.y * Shape::kColumns);
    }
  }
  __device__ __forceinline__ uint32_t address(const Stage& at) const {
    return stages + at.place * Shape::kStageBytes;
  }

  // For one thread. A stage is filled by both blocks, once both have read what it held.
  __device__ __forceinline__ void load() const {
    constexpr uint16_t kBoth = (1 << Shape::kCluster) - 1;
    Stage at;
    each_tile([&](int, int row, int column) {
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step, at.advance()) {
        buffers.wait_empty(at);
        Barrier& full = buffers.full[at.place];
        const uint32_t weights = address(at) + Shape::kInputBytes;
        full.arrive_expecting(Shape::kStageBytes);
        copy_box(address(at), p.input, step * Shape::kInner, row, 0, full);
        copy_box(weights + rank * Shape::kWeightBytes, p.weight, step * Shape::kInner, column, rank, full,
                 kBoth);
      }
    });
  }

  // For whole warps that have read a stage.
  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    if (threadIdx.x % 32 < Shape::kCluster) buffers.empty[place].arrive_at(threadIdx.x % 32);
  }
};

// A computing warpgroup. Each has two barriers: its own threads', and that of its turns to multiply.
template <typename Element>
struct GatedSm90Group {
  using Shape = GatedSm90Shape;
  static constexpr int kRowTiles = Shape::kRows / 64;

  const GatedSm90Block& block;
  int group;
  uint32_t output;  // address of a tile, 128 swizzled bytes a row
  GatedSm90Block::Stage at;
  float sums[kRowTiles][Shape::kColumns];  // of 64 rows: a thread's 32 gates, then their factors

  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  __device__ __forceinline__ void take_turn() const { sync_warps<256>(3 + group); }
  __device__ __forceinline__ void pass_turn() const { arrive_warps<256>(4 - group); }

  // The stages of a tile of the other group.
  __device__ __forceinline__ void pass_stages() {
    const int end = at.place + block.p.steps;
    at.place = end % Shape::kStages;
    at.parity ^= end / Shape::kStages & 1;
  }

  __device__ __forceinline__ void start_step(int step) {
    const uint64_t input = wgmma_tile(block.address(at), 0);
    const uint64_t weight = wgmma_tile(block.address(at) + Shape::kInputBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kInner; k += 16)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        Wgmma<Element, 2 * Shape::kColumns>::products(sums[n], moved_tile(input, n * 64 * 128 + k * 2),
                                                      moved_tile(weight, k * 2), step + k > 0);
    wgmma_commit();
  }

  // All products of a tile; while a step's run, the next one's are started.
  __device__ __forceinline__ void multiply() {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < block.p.steps; ++step) {
      block.buffers.wait_full(at);
      start_step(step);
      if (step > 0) {
        wgmma_wait<1>();
        block.release(previous);
      }
      previous = at.place;
      at.advance();
    }
    pass_turn();
    wgmma_wait<0>();
    block.release(previous);
  }

  // The outputs, to shared memory.
  template <GatedActivation kActivation>
  __device__ __forceinline__ void finish() const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const auto gated = [&](int tile, int n) {
      return activate_nearly(kActivation, sums[tile][n]) * sums[tile][Shape::kColumns / 2 + n];
    };
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int piece = 0; piece < Shape::kColumns / 8; piece += 2) {
        uint32_t parts[4];  // rows 0 .. 8 and 8 .. 16 of a piece's columns, then of the next's
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int n = piece * 4 + part * 2;
          parts[part] = Half<Element>::pack(gated(tile, n), gated(tile, n + 1));
        }
        store_matrix_x4(swizzled_place(output, Shape::kRows, tile * 64 + row, piece + lane / 16), parts);
      }
  }

  __device__ __forceinline__ void store(int row, int column) const {
    const bool is_first = threadIdx.x % 128 == 0;
    if (is_first) bulk_wait_read();  // the tile before
    sync();
    if (block.p.activation == GatedActivation::kSiluMul) finish<GatedActivation::kSiluMul>();
    if (block.p.activation == GatedActivation::kGeluMul) finish<GatedActivation::kGeluMul>();
    if (block.p.activation == GatedActivation::kGeluTanhMul) finish<GatedActivation::kGeluTanhMul>();
    fence_async_shared();
    sync();
    if (!is_first) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
      store_box(block.p.output, column, row + tile * 64, 0, output + tile * 64 * 128);
    bulk_commit();
  }

  __device__ __forceinline__ void compute() {
    int turns = 0;
    if (group == 1) pass_turn();
    block.each_tile([&](int turn, int row, int column) {
      turns = turn + 1;
      if (turn % Shape::kGroups != group) return pass_stages();
      take_turn();
      multiply();
      store(row, column);
    });
    if (turns % Shape::kGroups == group) take_turn();  // leaves no barrier half full
    if (threadIdx.x % 128 == 0) bulk_wait_written();
  }
};

template <typename Element>
__global__ void __launch_bounds__(GatedSm90Shape::kThreads, 1)
    gated_sm90_kernel(const __grid_constant__ GatedSm90Params p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = GatedSm90Shape;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> buffers;
  const uint32_t stages = (shared_address(shared_memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    buffers.init(Shape::kCluster * 4);
    fence_barriers();
  }
  cluster_sync();
  wait_for_previous_kernel();
  launch_dependents();

  const GatedSm90Block block{p, buffers, stages, cluster_rank()};
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    if (threadIdx.x % 128 == 0) block.load();
  } else {
    raise_registers<Shape::kComputeRegisters>();
    const uint32_t output = stages + Shape::kStages * Shape::kStageBytes + group * Shape::kOutputBytes;
    GatedSm90Group<Element> computing{block, group, output, {}, {}};
    computing.compute();
  }
  cluster_sync();  // until then the other block loads and arrives here
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
