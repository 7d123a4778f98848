// The warps of decode attention that load: one keys, one values, some tiles ahead and across the borders of
// sequences.
#pragma once

#include "decode_cursor.cuh"
#include "decode_shared.cuh"
#include "key_rows.cuh"

namespace ortolan::cuda {

constexpr int kLoadWarps = 2;

template <typename Element, int kHeadSize>
struct DecodeLoad {
  static constexpr int kStride = DecodeStage<kHeadSize>::kStride;
  using Copy = KeyTileCopy<kHeadSize, kWarpKeys, kStride, 32>;

  const SwaAttentionParams& params;
  const DecodeShape& shape;
  Visibility visibility;
  const Element* cache;  // keys or values
  int lane;

  // One tile; the 16 rows of a warp that nobody sees are left as they are.
  __device__ __forceinline__ void load(const DecodeCursor& cursor, Element* target) const {
    const DecodeEntry& entry = cursor.of;
    const KeyRows rows(params.cache, entry.sequence, entry.kv_head);
    const SeenPositions seen = SeenPositions::of(visibility, entry.first_position, entry.last_position);
    const int32_t first = cursor.key_tile() * shape.tile_keys;
    const int32_t slot = rows.first_slot(first);
    if (params.cache.head_size == kHeadSize && seen.hold_all(first, first + shape.tile_keys) &&
        rows.are_adjacent(slot, shape.tile_keys)) {
      Copy::start_rows(target, cache + rows.offset(slot), lane, shape.warps);
      return;
    }
    for (int warp = 0; warp < shape.warps; ++warp) {
      const int32_t key = first + warp * kWarpKeys;
      if (seen.hold_any(key, key + kWarpKeys))
        Copy(rows, seen, key).start(target + warp * kWarpKeys * kStride, cache, lane);
    }
  }
};

}  // namespace ortolan::cuda
