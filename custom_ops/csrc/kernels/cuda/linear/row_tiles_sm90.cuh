// Linear layers of many rows on sm_90a, gated ones too: act(x gate^T) * (x up^T). wgmma fed by tensor copies,
// bias, residual or activation in the epilogue, so that products never leave registers. This is the frame;
// rows_sm90.cuh and low_bit/fp8_rows_sm90.cuh sum in it, 16-bit elements and fp8 codes.
//
// Clusters of two blocks stay and take tiles in turn: bands of rows, column after column of each, so that a
// wave of clusters shares through L2 what it reads. The blocks of a cluster have the same columns; each loads
// half of their weights for both, in a gated layer one the gates' and the other the factors'. One thread
// loads, up to six steps of 128 bytes of a row ahead and into the next tiles; two warpgroups multiply. Gate
// and factor of an output lie in one thread. A gated layer's last tile begins earlier, so that it does not
// reach beyond the last row, and what two blocks compute both write alike: filling in rows that are not there
// is slow. Where a residual may lie in the output's buffer, they are filled in.
//
// Source of the schedules: CUTLASS's warp-specialised persistent kernels for sm_90, "pingpong" and
// "cooperative".
#pragma once

#include "gates.cuh"
#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/warpgroups_sm90.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace ortolan::cuda {

struct RowsSm90Shape {
  static constexpr int kGroups = 2;       // warpgroups that compute
  static constexpr int kRows = 128;       // of a tile
  static constexpr int kColumns = 64;     // of a box of weights; a tile has two
  static constexpr int kStepBytes = 128;  // of a row's inputs
  static constexpr int kStages = 6;
  static constexpr int kCluster = 2;  // blocks; of the weights each loads a half
  static constexpr int kBand = 8;     // rows of clusters' tiles whose inputs stay in L2
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kInputBytes = kRows * kStepBytes;
  static constexpr int kWeightBytes = kColumns * kStepBytes;  // of gates, then the same of factors
  static constexpr int kStageBytes = kInputBytes + 2 * kWeightBytes;
  static constexpr int kOutputBytes = kRows * kColumns * 2;
  static constexpr int kSharedBytes = kStages * kStageBytes + kGroups * kOutputBytes + 1024;
  // Of a thread.
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
  CUtensorMap output;  // [T, N], boxes of 64 rows and columns
  RowTiles tiles;
  int last_row;  // where the last tile begins
  int steps;
  int slice_steps;    // of each slice of a row but the last
  bool stores_boxes;  // always of a gated layer
  FusedLinearParams linear;
  // Of codes.
  const float* input_scales;   // [T, groups]
  const float* weight_scales;  // of each row, or of blocks, [rows / 128, groups]
  int scale_groups;
};

// What all warps of a block know.
template <typename Operand, bool kGated>
struct RowsSm90Block : StageRing<RowsSm90Shape> {
  using Shape = RowsSm90Shape;
  static constexpr int kInner = Shape::kStepBytes / sizeof(Operand);               // inputs of a step
  static constexpr int kOutputs = kGated ? Shape::kColumns : 2 * Shape::kColumns;  // columns of a tile

  const RowsSm90Params& p;
  int rank;  // in the cluster

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
        copy_box(address(at), p.input, step * kInner, row, 0, full);
        copy_box(weights + rank * Shape::kWeightBytes, p.weight, step * kInner,
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

// What a computing warpgroup does with its sums. Each has two barriers: its own threads', and one that it
// shares with the other group.
template <typename Element, typename OperandType, bool kGatedLayer, int kTiles>
struct RowsSm90Outputs {
  using Shape = RowsSm90Shape;
  using Operand = OperandType;
  using Block = RowsSm90Block<Operand, kGatedLayer>;
  static constexpr bool kGated = kGatedLayer;
  static constexpr int kRowTiles = kTiles;

  const Block& block;
  int group;
  uint32_t output;  // address of a tile, 128 swizzled bytes a row
  typename Block::Stage at;
  float sums[kRowTiles][Shape::kColumns];  // of 64 rows: a thread's outputs, or 32 gates, then their factors

  __device__ __forceinline__ void sync() const { sync_warps<128>(1 + group); }
  __device__ __forceinline__ void take_turn() const { sync_warps<256>(3 + group); }
  __device__ __forceinline__ void pass_turn() const { arrive_warps<256>(4 - group); }

  // Its first row in a tile.
  __device__ __forceinline__ int first_row() const {
    return kRowTiles * 64 < Shape::kRows ? group * kRowTiles * 64 : 0;
  }
  // This thread's first row of those that begin at `row`; it has another one 8 rows on.
  __device__ __forceinline__ int own_row(int row) const {
    return row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // Starts the products of the stage at hand, of rows `tile` * 64 .. of its own.
  __device__ __forceinline__ void start_products(int tile, float (&into)[Shape::kColumns], bool adds) const {
    const uint64_t input = wgmma_tile(block.address(at) + (first_row() + tile * 64) * Shape::kStepBytes, 0);
    const uint64_t weight = wgmma_tile(block.address(at) + Shape::kInputBytes, 0);
#pragma unroll
    for (int byte = 0; byte < Shape::kStepBytes; byte += 32)
      Wgmma<Operand, 2 * Shape::kColumns>::products(into, moved_tile(input, byte), moved_tile(weight, byte),
                                                    adds || byte > 0);
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

  // Calls visit(sums, places from the thread's first one) for the pairs of outputs that a layer without gates
  // has in the tile. kWhole: all of them.
  template <bool kWhole, typename Visit>
  __device__ __forceinline__ void each_pair(int row, int column, int half, Visit&& visit) {
    static_assert(kGated || kRowTiles == 1);
    const FusedLinearParams& p = block.p.linear;
    if (!kWhole && own_row(row) + half * 8 >= p.num_tokens) return;
#pragma unroll
    for (int piece = 0; piece < Shape::kColumns / 4; ++piece)
      if (kWhole || column + piece * 8 + threadIdx.x % 4 * 2 < p.num_outputs)
        visit(*reinterpret_cast<float2*>(&sums[0][piece * 4 + half * 2]), piece * 8);
  }
  // Opens the gates of rows from the thread's first one on for a given factor, whose elements need not lie in
  // pairs.
  template <bool kWhole>
  __device__ __forceinline__ void open_gates(int64_t first, int row, int column, int half) {
    const FusedLinearParams& p = block.p.linear;
    const Element* factors = static_cast<const Element*>(p.factor) + first;
    each_pair<kWhole>(row, column, half, [&](float2& y, int place) {
      const auto open = [&](float gate, int i) {
        const float opened =
            p.output_float32 ? activate(p.activation, gate) : activate_nearly(p.activation, gate);
        return opened * to_float(factors[place + i]);
      };
      y = {open(y.x, 0), open(y.y, 1)};
    });
  }
  // Adds bias and residual, and opens gates.
  template <bool kWhole>
  __device__ __forceinline__ void add_rest(int row, int column) {
    const FusedLinearParams& p = block.p.linear;
    const auto add_from = [&](const void* from, int64_t first, int half) {
      const Element* values = static_cast<const Element*>(from) + first;
      each_pair<kWhole>(row, column, half, [&](float2& y, int place) {
        const float2 more = Half<Element>::unpack(*reinterpret_cast<const uint32_t*>(values + place));
        y.x += more.x;
        y.y += more.y;
      });
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t first = column + threadIdx.x % 4 * 2;
      if (p.bias) add_from(p.bias, first, half);
      if (p.residual) add_from(p.residual, (own_row(row) + half * 8) * p.num_outputs + first, half);
      if (p.factor)
        open_gates<kWhole>((own_row(row) + half * 8) * p.factor_stride + first, row, column, half);
    }
  }
  // From registers to memory.
  template <typename Output>
  __device__ __forceinline__ void store_pairs(int row, int column) {
    const FusedLinearParams& p = block.p.linear;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto* to = static_cast<Output*>(p.output) + (own_row(row) + half * 8) * p.num_outputs + column +
                 threadIdx.x % 4 * 2;
      each_pair<false>(row, column, half, [&](const float2& y, int place) {
        if constexpr (sizeof(Output) == 4)
          *reinterpret_cast<float2*>(to + place) = y;
        else
          *reinterpret_cast<uint32_t*>(to + place) = Half<Element>::pack(y.x, y.y);
      });
    }
  }
  // To shared memory.
  __device__ __forceinline__ void finish_plain() const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int piece = 0; piece < Shape::kColumns / 4; piece += 2) {
      uint32_t parts[4];  // rows 0 .. 8 and 8 .. 16 of a piece's columns, then of the next's
#pragma unroll
      for (int part = 0; part < 4; ++part)
        parts[part] = Half<Element>::pack(sums[0][piece * 4 + part * 2], sums[0][piece * 4 + part * 2 + 1]);
      store_matrix_x4(swizzled_place(output, 64, row, piece + lane / 16), parts);
    }
  }

  // Stores boxes of 64 columns that finish() puts into shared memory.
  template <typename Finish>
  __device__ __forceinline__ void store_boxes(int row, int column, Finish&& finish) const {
    const bool is_first = threadIdx.x % 128 == 0;
    if (is_first) bulk_wait_read();  // the tile before
    sync();
    finish();
    fence_async_shared();
    sync();
    if (!is_first) return;
    constexpr int kBoxes = kGated ? kRowTiles : 2;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      store_box(block.p.output, column + (kGated ? 0 : box * 64), row + (kGated ? box * 64 : 0), 0,
                output + box * 64 * 128);
    bulk_commit();
  }

  __device__ __forceinline__ void store_plain(int row, int column) {
    const FusedLinearParams& p = block.p.linear;
    if (p.bias || p.residual || p.factor) {
      if (row + 64 <= p.num_tokens && column + Block::kOutputs <= p.num_outputs)
        add_rest<true>(row, column);
      else
        add_rest<false>(row, column);
    }
    if (block.p.stores_boxes)
      store_boxes(row, column, [&] { finish_plain(); });
    else if (p.output_float32)
      store_pairs<float>(row, column);
    else
      store_pairs<Element>(row, column);
  }
  __device__ __forceinline__ void store(int row, int column) {
    row += first_row();
    if constexpr (kGated) {
      const GatedActivation activation = block.p.linear.activation;
      store_boxes(row, column, [&] {
        if (activation == GatedActivation::kSiluMul) finish<GatedActivation::kSiluMul>();
        if (activation == GatedActivation::kGeluMul) finish<GatedActivation::kGeluMul>();
        if (activation == GatedActivation::kGeluTanhMul) finish<GatedActivation::kGeluTanhMul>();
      });
    } else {
      store_plain(row, column);
    }
  }

  // Until the outputs are in memory.
  __device__ __forceinline__ void finish_stores() const {
    if (threadIdx.x % 128 == 0) bulk_wait_written();
  }
};

// Computing: a RowsSm90Outputs with compute(), which ends with finish_stores(), and kReaders, the warpgroups
// that read each stage.
template <typename Computing>
__global__ void __launch_bounds__(RowsSm90Shape::kThreads, 1)
    rows_sm90_kernel(const __grid_constant__ RowsSm90Params p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = RowsSm90Shape;
  extern __shared__ unsigned char shared_memory[];
  __shared__ Handover<Shape::kStages> buffers;
  if (threadIdx.x == 0) {
    buffers.init(Shape::kCluster * 4 * Computing::kReaders);
    fence_barriers();
  }
  cluster_sync();
  wait_for_previous_kernel();
  launch_dependents();

  const typename Computing::Block block{{buffers, shared_memory}, p, cluster_rank()};
  const auto load = [&] {
    if (threadIdx.x % 128 == 0) block.load();
  };
  run_warpgroups<Shape>(load, [&](int group) {
    const uint32_t output = block.stages + Shape::kStages * Shape::kStageBytes + group * Shape::kOutputBytes;
    Computing computing{block, group, output};
    computing.compute();
  });
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
