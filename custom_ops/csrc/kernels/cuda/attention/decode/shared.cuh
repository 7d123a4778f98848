// The shared memory of a block of decode attention, and the barriers by which its warps wait for each other.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// A stage holds a tile's keys, then its values, then the scales of both where rows have some. Of each eight
// 16-byte pieces, 128 bytes of a row or of two, the order depends on the row, so that a column of eight rows
// is spread over all banks.
template <typename Rows>
struct DecodeStage {
  static constexpr int kRowBytes = Rows::kHeadSize * static_cast<int>(sizeof(typename Rows::Stored));
  static constexpr int kScaleBytes = Rows::kHasScales ? static_cast<int>(sizeof(float)) : 0;

  static __host__ __device__ constexpr int bytes(int tile_keys) {
    return 2 * tile_keys * (kRowBytes + kScaleBytes);
  }
  // Where scales of keys, or of values, lie in a stage.
  static __host__ __device__ constexpr int scales(int tile_keys, bool is_values) {
    return tile_keys * (2 * kRowBytes + is_values * kScaleBytes);
  }

  // What the numbers of a row's pieces are combined with, by exclusive or.
  static __device__ __forceinline__ int turn(int row) { return kRowBytes < 128 ? row / 2 % 4 : row % 8; }
  // Where a piece of a row lies, from the tile's first row; rows are counted from a multiple of 8.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * kRowBytes + piece / 8 * 128 + (piece % 8 ^ turn(row)) * 16;
  }
};

// The sums of one warp's keys of a tile, in float32: [quads of rows, columns, 4].
template <typename Rows>
struct DecodeSums {
  // Quads lie in different banks; a warp's columns are neighbours, or every other one of codes.
  static constexpr int kQuadFloats = 4 * Rows::kHeadSize + (Rows::kHasScales ? 4 : 16);

  static __host__ __device__ constexpr int floats(int entry_rows) { return entry_rows / 4 * kQuadFloats; }
  static __device__ __forceinline__ int at(int quad, int column) { return quad * kQuadFloats + column * 4; }
};

struct DecodeShared {
  unsigned char* stages;  // [stages, DecodeStage::bytes]
  float* sums;            // [buffers, warps, DecodeSums::floats]
  float* maxima;          // [buffers, warps, rows]
  float* totals;          // [buffers, warps, rows]
  Barrier* loaded;        // [stages]
  Barrier* multiplied;    // [stages]: by all warps, so the stage may be loaded again
  Barrier* summed;        // [buffers]: sums, maxima and totals of all warps are there
  Barrier* merged;        // [buffers]: and have been read
  Barrier* received;      // what the cluster's blocks send to this one
  int* starts;            // [DecodeShape::table_size]

  template <typename Rows>
  static __host__ __device__ int bytes(const DecodeShape& shape, int rows) {
    const int warp_floats = DecodeSums<Rows>::floats(shape.entry_rows) + 2 * rows;
    return shape.stages * DecodeStage<Rows>::bytes(shape.tile_keys) +
           shape.buffers * shape.warps * warp_floats * static_cast<int>(sizeof(float)) +
           (2 * (shape.stages + shape.buffers) + 1) * static_cast<int>(sizeof(Barrier)) +
           shape.table_size() * static_cast<int>(sizeof(int));
  }
  template <typename Rows>
  static __device__ __forceinline__ DecodeShared of(unsigned char* memory, const DecodeShape& shape,
                                                    int rows) {
    const int buffered_warps = shape.buffers * shape.warps;
    DecodeShared shared{.stages = memory};
    shared.sums = reinterpret_cast<float*>(memory + shape.stages * DecodeStage<Rows>::bytes(shape.tile_keys));
    shared.maxima = shared.sums + buffered_warps * DecodeSums<Rows>::floats(shape.entry_rows);
    shared.totals = shared.maxima + buffered_warps * rows;
    shared.loaded = reinterpret_cast<Barrier*>(shared.totals + buffered_warps * rows);
    shared.multiplied = shared.loaded + shape.stages;
    shared.summed = shared.multiplied + shape.stages;
    shared.merged = shared.summed + shape.buffers;
    shared.received = shared.merged + shape.buffers;
    shared.starts = reinterpret_cast<int*>(shared.received + 1);
    return shared;
  }
};

}  // namespace ortolan::cuda
