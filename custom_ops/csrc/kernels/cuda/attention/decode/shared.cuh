// The shared memory of a block of decode attention, and the barriers by which its warps wait for each other.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// A stage holds a tile's keys and then its values. Of each eight 16-byte pieces of a row, 128 bytes, the
// order depends on the row, so that a column of eight rows is spread over all banks.
template <int kHeadSize>
struct DecodeStage {
  static constexpr int kRowBytes = kHeadSize * 2;

  static __host__ __device__ constexpr int bytes(int tile_keys) { return 2 * tile_keys * kRowBytes; }

  // Where a piece of a row lies, from the tile's first row; rows are counted from a multiple of 8.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * kRowBytes + piece / 8 * 128 + (piece % 8 ^ row % 8) * 16;
  }
};

// The sums of one warp's keys of a tile, in float32: [quads of rows, columns, 4].
template <int kHeadSize>
struct DecodeSums {
  static constexpr int kQuadFloats = 4 * kHeadSize + 16;  // quads lie in different banks

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
  int* starts;            // [DecodeShape::table_size]

  template <int kHeadSize>
  static __host__ __device__ int bytes(const DecodeShape& shape, int rows) {
    const int warp_floats = DecodeSums<kHeadSize>::floats(shape.entry_rows) + 2 * rows;
    return shape.stages * DecodeStage<kHeadSize>::bytes(shape.tile_keys) +
           shape.buffers * shape.warps * warp_floats * static_cast<int>(sizeof(float)) +
           2 * (shape.stages + shape.buffers) * static_cast<int>(sizeof(Barrier)) +
           shape.table_size() * static_cast<int>(sizeof(int));
  }
  template <int kHeadSize>
  static __device__ __forceinline__ DecodeShared of(unsigned char* memory, const DecodeShape& shape,
                                                    int rows) {
    const int buffered_warps = shape.buffers * shape.warps;
    DecodeShared shared{.stages = memory};
    shared.sums =
        reinterpret_cast<float*>(memory + shape.stages * DecodeStage<kHeadSize>::bytes(shape.tile_keys));
    shared.maxima = shared.sums + buffered_warps * DecodeSums<kHeadSize>::floats(shape.entry_rows);
    shared.totals = shared.maxima + buffered_warps * rows;
    shared.loaded = reinterpret_cast<Barrier*>(shared.totals + buffered_warps * rows);
    shared.multiplied = shared.loaded + shape.stages;
    shared.summed = shared.multiplied + shape.stages;
    shared.merged = shared.summed + shape.buffers;
    shared.starts = reinterpret_cast<int*>(shared.merged + shape.buffers);
    return shared;
  }
};

}  // namespace ortolan::cuda
