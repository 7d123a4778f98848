// What all sm_90a decode blocks have alike: warps, registers, shared memory.
#pragma once

#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/wgmma_few.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// What the host prepares: tensor maps, and how many rows of a step one copy takes (pages may be smaller).
struct Sm90DecodeMaps {
  CUtensorMap keys;    // [N * Hkv, P, D], boxes of box_rows slots
  CUtensorMap values;  // the same
  int box_rows;
};

// Of a block: two warpgroups multiply, one loads. Registers of a thread are together what it is launched
// with.
constexpr int kSm90DecodeThreads = 384;
constexpr int kSm90ComputeRegisters = 216, kSm90LoadRegisters = 72;

// What those that multiply know of a tile. The warp that loads tells them, so that they need no cursor.
struct alignas(16) TileWork {
  int32_t first;   // position of its first key
  int next_entry;  // of the tile that its warpgroup takes next
  int place;       // of its sums, or of those that it is merged into; see DecodeWorkspace
  bool is_merged;  // with tiles of its span; see DecodeSpan
  bool begins, ends;
  bool is_all;  // these are all that the entry visits
};

// What the warps of a block share: queries, and what else the rows need, then a ring of keys and values by
// turns.
struct Sm90DecodeShared {
  static constexpr int kTurns = 8;

  unsigned char* memory;
  Barrier* full;    // [stages]
  Barrier* empty;   // [stages]
  Barrier* turns;   // [kTurns]: for each warp that multiplies, what it adds a tile to has been handed on
  TileWork* works;  // [stages], of the tiles whose keys are there

  template <typename Shape>
  static __host__ __device__ int ring_end(const DecodeShape& shape) {
    return Shape::kFrontBytes + shape.stages * Shape::kBufferBytes;
  }
  template <typename Shape>
  static __host__ __device__ int bytes(const DecodeShape& shape) {
    constexpr int kAlignment = 1024;
    return kAlignment + ring_end<Shape>(shape) +
           (2 * shape.stages + kTurns) * static_cast<int>(sizeof(Barrier)) +
           shape.stages * static_cast<int>(sizeof(TileWork)) +
           shape.table_size() * static_cast<int>(sizeof(int));
  }
  template <typename Shape>
  static __device__ __forceinline__ Sm90DecodeShared of(unsigned char* memory, const DecodeShape& shape) {
    Sm90DecodeShared shared;
    shared.memory = memory + (-shared_address(memory) & 1023u);
    shared.full = reinterpret_cast<Barrier*>(shared.memory + ring_end<Shape>(shape));
    shared.empty = shared.full + shape.stages;
    shared.turns = shared.empty + shape.stages;
    shared.works = reinterpret_cast<TileWork*>(shared.turns + kTurns);
    return shared;
  }
  __device__ __forceinline__ int* starts(const DecodeShape& shape) const {  // [DecodeShape::table_size]
    return reinterpret_cast<int*>(works + shape.stages);
  }
  __device__ __forceinline__ uint32_t queries() const { return shared_address(memory); }
  template <typename Shape>
  __device__ __forceinline__ uint32_t buffer(int place) const {
    return queries() + Shape::kFrontBytes + place * Shape::kBufferBytes;
  }
};

}  // namespace ortolan::cuda
