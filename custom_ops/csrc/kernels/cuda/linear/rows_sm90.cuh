// Linear layers of many rows of 16-bit elements on sm_90a, gated ones too: act(x gate^T) * (x up^T). wgmma
// fed by tensor copies, bias, residual or activation in the epilogue, so that products never leave registers.
//
// Clusters of two blocks stay and take tiles in turn: bands of rows, column after column of each, so that a
// wave of clusters shares through L2 what it reads. The blocks of a cluster have the same columns; each loads
// half of their weights for both, in a gated layer one the gates' and the other the factors'. One thread
// loads, up to six steps of 64 inputs ahead and into the next tiles. Two warpgroups take a block's tiles
// alternately, all of a tile each: one is at its epilogue while the other feeds the tensor cores. Gate and
// factor of an output lie in one thread. A sum takes its products in the order of the inputs, by one
// warpgroup: the bits of a row depend neither on how many rows there are nor on its place. A gated layer's
// last tile begins earlier, so that it does not reach beyond the last row, and what two blocks compute both
// write alike: filling in rows that are not there is slow. Where a residual may lie in the output's buffer,
// they are filled in.
//
// kSliced: a sum is that of few_sm90.cuh's chains, the slices of a row apart, then one added to another. That
// takes twice the registers, so each warpgroup takes half of the rows of every tile.
//
// Source of the schedules: CUTLASS's warp-specialised persistent kernels for sm_90, "pingpong" and
// "cooperative".
#pragma once

#include "gates.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace ortolan::cuda {

struct RowsSm90Shape {
  static constexpr int kGroups = 2;    // warpgroups that compute
  static constexpr int kRows = 128;    // of a tile
  static constexpr int kColumns = 64;  // of a box of weights; a tile has two
  static constexpr int kInner = 64;    // inputs of a step: 128 bytes
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
struct RowTiles {
  int rows;
  int columns;

  __host__ __device__ int count() const { return rows * columns; }
  // Row and column of tile `number`.
  __device__ __forceinline__ int2 place(int number) const {
    const int first = number / (RowsSm90Shape::kBand * columns) * RowsSm90Shape::kBand;
    const int band_rows = min(RowsSm90Shape::kBand, rows - first), within = number - first * columns;
    return make_int2(first + within % band_rows, within / band_rows);
  }
};

struct RowsSm90Params {
  CUtensorMap input;   // [T, K], boxes of a tile's rows and a step's inputs
  CUtensorMap weight;  // [1 or 2, N, K], boxes of half a tile's columns and a step's inputs
  CUtensorMap output;  // [T, N] of a gated layer, boxes of 64 rows and columns
  RowTiles tiles;
  int last_row;  // where the last tile begins
  int steps;
  int slice_steps;  // of each slice of a row but the last
  FusedLinearParams linear;
};

// What all warps of a block know.
template <bool kGated>
struct RowsSm90Block {
  using Shape = RowsSm90Shape;
  using Stage = Ring<Shape::kStages>;
  static constexpr int kOutputs = kGated ? Shape::kColumns : 2 * Shape::kColumns;  // columns of a tile

  const RowsSm90Params& p;
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
      visit(turn, kGated ? min(row, p.last_row) : row, place.y * kOutputs);
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
        copy_box(weights + rank * Shape::kWeightBytes, p.weight, step * Shape::kInner,
                 kGated ? column : column + rank * Shape::kColumns, kGated ? rank : 0, full, kBoth);
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
template <typename Element, bool kGated, bool kSliced>
struct RowsSm90Group {
  using Shape = RowsSm90Shape;
  static constexpr int kRowTiles = Shape::kRows / 64 / (kSliced ? Shape::kGroups : 1);

  const RowsSm90Block<kGated>& block;
  int group;
  uint32_t output;  // address of a tile, 128 swizzled bytes a row
  typename RowsSm90Block<kGated>::Stage at;
  float sums[kRowTiles][Shape::kColumns];  // of 64 rows: a thread's outputs, or 32 gates, then their factors
  float totals[kSliced ? Shape::kColumns : 1];  // of the slices before

  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  __device__ __forceinline__ void take_turn() const { sync_warps<256>(3 + group); }
  __device__ __forceinline__ void pass_turn() const { arrive_warps<256>(4 - group); }

  // The stages of a tile of the other group.
  __device__ __forceinline__ void pass_stages() {
    const int end = at.place + block.p.steps;
    at.place = end % Shape::kStages;
    at.parity ^= end / Shape::kStages & 1;
  }

  // Its first row in a tile.
  __device__ __forceinline__ int first_row() const { return kSliced ? group * 64 : 0; }

  __device__ __forceinline__ void start_step(bool adds) {
    const uint64_t input = wgmma_tile(block.address(at) + first_row() * 128, 0);
    const uint64_t weight = wgmma_tile(block.address(at) + Shape::kInputBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kInner; k += 16)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        Wgmma<Element, 2 * Shape::kColumns>::products(sums[n], moved_tile(input, n * 64 * 128 + k * 2),
                                                      moved_tile(weight, k * 2), adds || k > 0);
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
    if constexpr (!kSliced) pass_turn();
    wgmma_wait<0>();
    block.release(previous);
    fold_slice(is_first, true);
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

  // Two outputs of a row, at column `n` and the next.
  __device__ __forceinline__ void store_pair_of(int64_t row, int64_t n, float y0, float y1) const {
    const FusedLinearParams& p = block.p.linear;
    const int64_t index = row * p.num_outputs + n;
    const auto add = [&](const void* from, int64_t place) {
      const float2 more = Half<Element>::unpack(
          *reinterpret_cast<const uint32_t*>(static_cast<const Element*>(from) + place));
      y0 += more.x;
      y1 += more.y;
    };
    if (p.bias) add(p.bias, n);
    if (p.residual) add(p.residual, index);
    if (p.output_float32)
      *reinterpret_cast<float2*>(static_cast<float*>(p.output) + index) = make_float2(y0, y1);
    else
      *reinterpret_cast<uint32_t*>(static_cast<Element*>(p.output) + index) = Half<Element>::pack(y0, y1);
  }

  // The outputs of a layer without gates, from registers to memory.
  __device__ __forceinline__ void store_rows(int row, int column) const {
    const int lane = threadIdx.x % 32, first = row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const FusedLinearParams& p = block.p.linear;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at_row = first + tile * 64 + half * 8;
        if (at_row >= p.num_tokens) continue;
#pragma unroll
        for (int piece = 0; piece < Shape::kColumns / 4; ++piece)
          if (const int n = column + piece * 8 + lane % 4 * 2; n < p.num_outputs)
            store_pair_of(at_row, n, sums[tile][piece * 4 + half * 2], sums[tile][piece * 4 + half * 2 + 1]);
      }
  }

  __device__ __forceinline__ void store_gated(int row, int column) const {
    const bool is_first = threadIdx.x % 128 == 0;
    if (is_first) bulk_wait_read();  // the tile before
    sync();
    if (block.p.linear.activation == GatedActivation::kSiluMul) finish<GatedActivation::kSiluMul>();
    if (block.p.linear.activation == GatedActivation::kGeluMul) finish<GatedActivation::kGeluMul>();
    if (block.p.linear.activation == GatedActivation::kGeluTanhMul) finish<GatedActivation::kGeluTanhMul>();
    fence_async_shared();
    sync();
    if (!is_first) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
      store_box(block.p.output, column, row + tile * 64, 0, output + tile * 64 * 128);
    bulk_commit();
  }

  __device__ __forceinline__ void store(int row, int column) const {
    if constexpr (kGated)
      store_gated(row + first_row(), column);
    else
      store_rows(row + first_row(), column);
  }

  __device__ __forceinline__ void compute() {
    if constexpr (kSliced)
      compute_all();
    else
      compute_alternately();
    if (kGated && threadIdx.x % 128 == 0) bulk_wait_written();
  }
  __device__ __forceinline__ void compute_all() {
    block.each_tile([&](int, int row, int column) {
      multiply();
      store(row, column);
    });
  }
  __device__ __forceinline__ void compute_alternately() {
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
  }
};

template <typename Element, bool kGated, bool kSliced>
__global__ void __launch_bounds__(RowsSm90Shape::kThreads, 1)
    rows_sm90_kernel(const __grid_constant__ RowsSm90Params p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = RowsSm90Shape;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> buffers;
  const uint32_t stages = (shared_address(shared_memory) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    buffers.init(Shape::kCluster * 4 * (kSliced ? Shape::kGroups : 1));
    fence_barriers();
  }
  cluster_sync();
  wait_for_previous_kernel();
  launch_dependents();

  const RowsSm90Block<kGated> block{p, buffers, stages, cluster_rank()};
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (group == Shape::kGroups) {
    lower_registers<Shape::kLoadRegisters>();
    if (threadIdx.x % 128 == 0) block.load();
  } else {
    raise_registers<Shape::kComputeRegisters>();
    const uint32_t output = stages + Shape::kStages * Shape::kStageBytes + group * Shape::kOutputBytes;
    RowsSm90Group<Element, kGated, kSliced> computing{block, group, output, {}, {}, {}};
    computing.compute();
  }
  cluster_sync();  // until then the other block loads and arrives here
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
