// Brings the first tiles of decode attention to L2 while the kernel in front still runs.
//
// That kernel may still write the length and any row, so both are a guess: nothing that is found here is used
// but for the prefetch, and rows that are written later are written through L2.
#pragma once

#include "kernels/cuda/attention/key_rows.cuh"
#include "plan.cuh"

namespace ortolan::cuda {

// The lengths of the only sequence. No rows where they cannot be right: nothing may be read by them.
__device__ __forceinline__ EntryLengths guess_lengths(const SwaAttentionParams& params) {
  constexpr int32_t kMostPast = 1 << 30;
  const int32_t past = load_relaxed(params.past_len.values);
  const int32_t first = load_relaxed(params.packing.query_start);
  const int32_t tokens = load_relaxed(params.packing.query_start + 1) - first;
  const bool may_be = 0 <= past && past < kMostPast && first == 0 && tokens == params.packing.num_tokens;
  return may_be ? EntryLengths{first, tokens, past} : EntryLengths{};
}

// A block's first tile: its keys by one thread, its values by another. For shapes with one length for all
// entries and caches without pages. `kElementBytes`: of caches.
template <int kElementBytes>
__device__ __forceinline__ void prefetch_first_tile(const SwaAttentionParams& params,
                                                    const DecodeShape& shape) {
  const auto thread = static_cast<int>(threadIdx.x) - shape.warps * 32;
  if (thread != 0 && thread != 1) return;
  const int32_t past = load_relaxed(params.past_len.values);
  if (past < 0) return;
  const auto last = past + static_cast<int32_t>(params.packing.num_tokens) - 1;
  const SeenPositions seen = Visibility::of(params, 0, last).of_queries(past, last);
  const KeyTiles tiles = KeyTiles::of(seen, PowerOfTwo{shape.tile_shift});
  const int count = tiles.count(), pieces = shape.cluster ? shape.cluster : shape.blocks;
  const EvenCut cut = EvenCut::of(shape, shape.cluster ? count : count * shape.entries, pieces);
  const auto block = static_cast<int>(blockIdx.x);
  const int piece = block % pieces, tile = cut.begin(piece);
  if (tile >= cut.begin(piece + 1)) return;
  const int entry = block / pieces + tile / count;
  if (entry >= shape.entries) return;  // a length that no cache has
  const KeyRows rows(params.cache, 0, entry - shape.by_kv_heads.divide(entry) * shape.kv_heads);
  const int32_t first = tiles.at(tile % count) * shape.tile_keys, slot = rows.first_slot(first);
  const int32_t num_rows = min(min(shape.tile_keys, last + 1 - first), rows.capacity - slot);
  const auto* cache = static_cast<const char*>(thread == 0 ? params.key_cache : params.value_cache);
  prefetch_bulk(cache + rows.offset(slot) * kElementBytes,
                static_cast<uint32_t>(num_rows * params.cache.head_size * kElementBytes));
}

}  // namespace ortolan::cuda
