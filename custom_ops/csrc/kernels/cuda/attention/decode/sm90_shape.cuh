// Sizes of an sm_90a decode block, its shared memory, and the products that only it has.
#pragma once

#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/wgmma_few.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

template <int kHeadSize_>
struct Sm90DecodeShape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kGroups = kHeadSize <= 128 ? 1 : 2;  // warpgroups, each with columns of the sums
  static constexpr int kColumns = kHeadSize / kGroups;      // of a warpgroup
  static constexpr int kKeys = kHeadSize <= 128 ? 128 : kHeadSize <= 256 ? 64 : 32;  // of a step
  static constexpr int kSteps = kHeadSize <= 256 ? 1 : 4;                            // of a tile
  static constexpr int kTileKeys = kKeys * kSteps;
  // Registers hold a span's sums beside those of a tile, or a longer tile's alone.
  static constexpr PowerOfTwo kSpanTiles{kHeadSize <= 256 ? 3 : 0};
  static constexpr int kBoxes = kHeadSize / 64;                        // of 64 columns, 128 bytes
  static constexpr int kBufferBytes = kKeys * kHeadSize * 2;           // keys or values of a step
  static constexpr int kFrontBytes = kSm90DecodeRows * kHeadSize * 2;  // before the ring: queries
  // Two warpgroups multiply, one loads. Without columns to share, each has a stream of spans for itself.
  static constexpr int kStreams = 2 / kGroups;
  static constexpr int kMostTokens = kShortTokens;
  static constexpr int kSnapsFrom = 0;  // of entries of many rows
  // A cluster's few blocks are slow to combine long rows.
  static constexpr bool kHasClusters = kHeadSize <= 256;
  static constexpr int kThreads = 384;
  // Of a thread; together what the block is launched with.
  static constexpr int kEvenRegisters = 168, kLoadRegisters = 56, kComputeRegisters = 224;
};

// What the host prepares: tensor maps, and how many rows of a step one copy takes (pages may be smaller).
struct Sm90DecodeMaps {
  CUtensorMap keys;    // [N * Hkv, P, D], boxes of box_rows slots
  CUtensorMap values;  // the same
  int box_rows;
};

// An address in the block's own shared memory as descriptors hold it: without the block's rank in its
// cluster.
__device__ __forceinline__ uint32_t descriptor_address(uint32_t address) { return address & 0x3ffff; }

// What the warps of a stream share. Streams lie one after another: queries, and what else the rows share,
// then a ring of keys and values by turns.
struct Sm90DecodeShared {
  unsigned char* memory;
  Barrier* full;   // [stages]
  Barrier* empty;  // [stages]

  template <typename Shape>
  static __host__ __device__ int stream_bytes(const DecodeShape& shape) {
    return Shape::kFrontBytes + shape.stages * Shape::kBufferBytes;
  }
  template <typename Shape>
  static __host__ __device__ int bytes(const DecodeShape& shape) {
    constexpr int kAlignment = 1024;
    return kAlignment + shape.table_size() * static_cast<int>(sizeof(int)) +
           shape.streams *
               (stream_bytes<Shape>(shape) + 2 * shape.stages * static_cast<int>(sizeof(Barrier)));
  }
  template <typename Shape>
  static __device__ __forceinline__ Sm90DecodeShared of(unsigned char* memory, const DecodeShape& shape,
                                                        int stream) {
    Sm90DecodeShared shared;
    memory += -shared_address(memory) & 1023u;
    shared.memory = memory + stream * stream_bytes<Shape>(shape);
    shared.full = reinterpret_cast<Barrier*>(memory + shape.streams * stream_bytes<Shape>(shape)) +
                  stream * 2 * shape.stages;
    shared.empty = shared.full + shape.stages;
    return shared;
  }
  // Behind the last stream: [DecodeShape::table_size].
  template <typename Shape>
  static __device__ __forceinline__ int* starts(unsigned char* memory, const DecodeShape& shape) {
    return reinterpret_cast<int*>(of<Shape>(memory, shape, 0).full + shape.streams * 2 * shape.stages);
  }
  __device__ __forceinline__ uint32_t queries() const { return shared_address(memory); }
  template <typename Shape>
  __device__ __forceinline__ uint32_t buffer(int place) const {
    return queries() + Shape::kFrontBytes + place * Shape::kBufferBytes;
  }
};

// Products of 64 rows and as many keys as a step has.
template <typename Element, int kKeys>
struct StepProducts : Wgmma<Element, kKeys> {};

template <typename Element>
struct StepProducts<Element, 32> : FewColumns<Element, 32> {};

}  // namespace ortolan::cuda
