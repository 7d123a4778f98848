// The shared memory of a block of decode attention, and the barriers by which its warps wait for each other.
#pragma once

#include "decode_plan.cuh"
#include "ptx.cuh"

namespace ortolan::cuda {

// A stage holds a tile's keys and then its values, rows of kStride elements. Once a warp has multiplied its
// rows of both, they become its sums, in float32: first half of the columns in the rows of keys, second half
// in the rows of values.
template <int kHeadSize>
struct DecodeStage {
  static constexpr int kStride = kHeadSize + 8;  // elements; spreads rows over all banks

  static __host__ __device__ constexpr int bytes(int tile_keys) { return 2 * tile_keys * kStride * 2; }

  // Float number, in the warp's rows of keys or of values, of a quad of rows in a column.
  static __device__ __forceinline__ int sum_at(int quad, int column) {
    column %= kHeadSize / 2;
    if constexpr (kHeadSize <= 128) return quad * (2 * kHeadSize + 16) + column * 4;
    // Values whose columns are still to be read must stay: 8 columns of a pass take the start of one row of
    // 128 or, where a half is 256 columns, one half of it.
    const int row = column % 128 / 8, part = column / 128;
    return row * (kStride / 2) + part * 128 + quad * 32 + column % 8 * 4;
  }
};

struct DecodeShared {
  unsigned char* stages;  // [stages, DecodeStage::bytes]
  float* maxima;          // [stages, warps, rows]
  float* totals;          // [stages, warps, rows]
  Barrier* loaded;        // [stages]
  Barrier* summed;        // [stages]: sums, maxima and totals of all warps are there
  Barrier* merged;        // [stages]: and have been read
  int* starts;            // [entries + 1]

  static __host__ __device__ int bytes(const DecodeShape& shape, int stage_bytes, int rows) {
    return shape.stages * (stage_bytes + 2 * shape.warps * rows * static_cast<int>(sizeof(float)) +
                           3 * static_cast<int>(sizeof(Barrier))) +
           (shape.entries + 1) * static_cast<int>(sizeof(int));
  }
  static __device__ __forceinline__ DecodeShared of(unsigned char* memory, const DecodeShape& shape,
                                                    int stage_bytes, int rows) {
    DecodeShared shared{.stages = memory};
    shared.maxima = reinterpret_cast<float*>(memory + shape.stages * stage_bytes);
    shared.totals = shared.maxima + shape.stages * shape.warps * rows;
    shared.loaded = reinterpret_cast<Barrier*>(shared.totals + shape.stages * shape.warps * rows);
    shared.summed = shared.loaded + shape.stages;
    shared.merged = shared.summed + shape.stages;
    shared.starts = reinterpret_cast<int*>(shared.merged + shape.stages);
    return shared;
  }
};

}  // namespace ortolan::cuda
