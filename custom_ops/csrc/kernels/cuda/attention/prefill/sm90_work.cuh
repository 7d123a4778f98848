// What the warps of an sm_90a prefill block share: shapes, barriers, and which rows and keys come next.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/attention/key_tiles.cuh"
#include "kernels/cuda/common/softmax.cuh"
#include "kernels/cuda/common/tile_copy_sm90.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "query_tiles.cuh"
#include "sm90_exchange.cuh"
#include "sm90_short.cuh"

namespace ortolan::cuda {

// For heads of at most kHeadSize columns: what is missing of it is zeros. `kIsShort_`: for short chunks, see
// sm90_short.cuh.
template <int kHeadSize, int kKeyRows, bool kIsShort_>
struct Sm90Shape {
  static constexpr bool kIsShort = kIsShort_;
  using Chunks = std::conditional_t<kIsShort, ShortChunks, LongChunks>;
  static constexpr int kKeys = kKeyRows;                   // of a tile
  static constexpr int kBlocks = kHeadSize > 256 ? 2 : 1;  // a cluster's, which share a work's columns
  static constexpr int kColumns = kHeadSize / kBlocks;     // a block's
  static constexpr int kGroups = kColumns <= 96 ? 3 : 2;   // warpgroups that compute
  static constexpr int kRows = kGroups * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kBoxes = (kColumns + 63) / 64;  // of 64 columns, 128 bytes
  static constexpr int kTileBytes = kKeys * kBoxes * 128;
  static constexpr int kQueryBytes = kRows * kBoxes * 128;
  static constexpr int kExchangeBytes = kBlocks > 1 ? kRows * kKeys * 4 : 0;
  static constexpr int kStages = kTileBytes <= 16384 ? 4 : 2;
  static constexpr bool kTakesTurns = kGroups == 2;  // with three, another is always at its softmax
  static constexpr int kQueryStages = kColumns <= 128 ? 2 : 1;
  static constexpr int kSharedBytes =
      kQueryStages * kQueryBytes + 2 * kStages * kTileBytes + kExchangeBytes + 1024;
  // Of a thread; together what the block is launched with.
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : 232;
};

// What the host prepares: tensor maps, and how many rows of a tile one copy takes (pages may be smaller than
// tiles).
struct Sm90Maps {
  CUtensorMap query;   // [T, Hq, D], boxes of a warpgroup's rows
  CUtensorMap keys;    // [N * Hkv, P, D], boxes of box_rows slots
  CUtensorMap values;  // the same
  int box_rows;
};

constexpr int kQueueCounters = 2;

// All works of a launch, the longest first. A block begins with the one of its own number, and then takes
// whatever is next, as works differ in length. The blocks of a cluster need the same works: clusters deal
// them among themselves, to and fro, which is nearly as even.
struct WorkQueue {
  int section_heads;
  OwnTokens own;
  bool is_behind;   // as Launch says
  unsigned* taken;  // [kQueueCounters], zero between launches: works taken, blocks that have left

  // For a whole warp; `round`: how many the block has taken.
  template <int kBlocks>
  __device__ __forceinline__ unsigned take(unsigned round) const {
    const unsigned clusters = gridDim.x / kBlocks, cluster = blockIdx.x / kBlocks;
    if (kBlocks > 1) return round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
    if (round == 0) return blockIdx.x;
    unsigned number = 0;
    if (threadIdx.x % 32 == 0) number = gridDim.x + atomicAdd(taken, 1);
    return __shfl_sync(~0u, number, 0);
  }
  // For one thread of a block that takes no more.
  template <int kBlocks>
  __device__ __forceinline__ void leave() const {
    if (kBlocks > 1) return;
    __threadfence();
    if (atomicInc(taken + 1, gridDim.x - 1) == gridDim.x - 1) *taken = 0;
  }
};

// The keys of a work that a warpgroup's rows see.
struct Sm90OwnKeys {
  KeyTiles tiles;        // that some of them see
  SeenPositions common;  // what each of them sees, sinks apart
};

// One tile of tokens and the keys it meets; the same for all warps.
template <typename Shape>
struct Sm90Work {
  QueryTile tile;  // a sequence of -1: no more
  int head;        // the first of those that share the tile
  int kv_head;
  int32_t first;  // position of the tile's first token
  int32_t end;    // positions of the sequence
  Visibility visibility;
  KeyTiles visits;
  SpanOfKeys span;  // of a short chunk

  // For whole warps.
  __device__ __forceinline__ void find(const SwaAttentionParams& params, const TileAndHead& place,
                                       int tile_tokens, const OwnTokens& own) {
    tile = find_query_tile(params.packing, place.tile, tile_tokens, own);
    head = place.head;
    kv_head = head / static_cast<int>(params.num_heads / params.cache.num_kv_heads);
    const auto past = static_cast<int32_t>(params.past_len.at(tile.sequence, kv_head));
    first = past + tile.offset;
    end = past + static_cast<int32_t>(params.packing.count(tile.sequence));
    visibility = Visibility::of(params, tile.sequence, end - 1);
    visits = of_tokens(0, tile.count);
  }
  // Key tiles of some of the tokens.
  __device__ __forceinline__ KeyTiles of_tokens(int begin, int count) const {
    return KeyTiles::of(visibility.of_queries(first + begin, first + begin + count - 1), Shape::kKeys);
  }
  // Of a warpgroup, how many of the tokens; none may be left for it. `tokens`: as many as one has at most.
  __device__ __forceinline__ int count_tokens(int group, int tokens) const {
    return min(tokens, tile.count - group * tokens);
  }
  __device__ __forceinline__ Sm90OwnKeys own_keys(int group, int tokens) const {
    const int begin = group * tokens, count = count_tokens(group, tokens);
    return {count > 0 ? of_tokens(begin, count) : KeyTiles{},
            visibility.of_each(first + begin, first + begin + tokens - 1)};
  }
};

// The works of a launch, by their numbers.
template <typename Shape>
struct Sm90WorkList {
  int tiles;
  int heads;            // that have tiles of their own
  int spans = 1;        // of each tile that are works of their own
  bool splits = false;  // whether spans are
  unsigned count;

  // Counts of each tile, where spans are works: see SpanOfKeys.
  __device__ __forceinline__ int tile_counts() const {
    return Shape::kGroups * (1 + divide_up(spans, KeySpans<Shape::kKeys>::kMerged));
  }
  // For whole warps, like what follows.
  static __device__ __forceinline__ Sm90WorkList of(const SwaAttentionParams& params,
                                                    const typename Shape::Chunks& chunks,
                                                    const OwnTokens& own) {
    const int tile_tokens = Shape::kGroups * chunks.tokens();
    Sm90WorkList list;
    list.heads = static_cast<int>(params.num_heads) / chunks.heads();
    if constexpr (Shape::kIsShort) {
      const auto totals = chunks.count(params, tile_tokens, own);
      list.tiles = totals.tiles;
      list.spans = KeySpans<Shape::kKeys>::of((totals.end - 1) / Shape::kKeys) + 1;
      const int64_t entries = int64_t{list.tiles} * list.heads;
      list.splits =
          entries * list.spans <= chunks.most_places && entries * list.tile_counts() <= chunks.most_counts;
      if (!list.splits) list.spans = 1;
    } else {
      list.tiles = count_query_tiles(params.packing, tile_tokens, own);
    }
    list.count = static_cast<unsigned>(list.tiles) * list.heads * list.spans;
    return list;
  }
  // False where the tile visits none of the span's keys.
  __device__ __forceinline__ bool find(const SwaAttentionParams& params, const typename Shape::Chunks& chunks,
                                       const WorkQueue& queue, unsigned number, Sm90Work<Shape>& work) const {
    const int tile_tokens = Shape::kGroups * chunks.tokens();
    if constexpr (Shape::kIsShort) {
      const auto entries = static_cast<unsigned>(tiles * heads), entry = number % entries;
      // Neighbours have the same keys.
      const TileAndHead place{static_cast<int>(entry % tiles),
                              static_cast<int>(entry / tiles) * chunks.heads()};
      work.find(params, place, tile_tokens, queue.own);
      work.span = {.number = spans - 1 - static_cast<int>(number / entries),
                   .is_alone = splits,
                   .place = static_cast<int>(entry) * spans,
                   .first_count = static_cast<int>(entry) * tile_counts()};
      return chunks.template cut<Shape::kKeys>(work.span, work.visits);
    } else {
      work.find(params, TileAndHead::of(number, tiles, queue.section_heads), tile_tokens, queue.own);
      return true;
    }
  }
};

template <typename Shape>
struct Sm90Shared {
  static constexpr int kWorks = 3;  // the one under way and the next two: short ones end while two are found
  // A longer work is loaded but for so many tiles when the next one is taken: what one block has taken, no
  // other can begin.
  static constexpr int kTilesAhead = 4;
  Handover<kWorks> handed_works;
  Barrier wants_work, landed, nobody;
  bool is_last[Shape::kGroups];  // of those that share a short chunk's keys
  Handover<Shape::kQueryStages> queries;
  Handover<Shape::kStages> keys, values;
  Sm90Exchange<Shape> exchange;
  Sm90Work<Shape> works[kWorks];
  Sm90OwnKeys own_keys[kWorks][Shape::kGroups];

  __device__ __forceinline__ void init() {
    handed_works.init(Shape::kGroups * 4 + 2);
    wants_work.init(1);
    landed.init(1);
    nobody.init(1);
    queries.init(Shape::kGroups * 4);
    keys.init(Shape::kGroups * 4);
    values.init(Shape::kGroups * 4);
    if constexpr (Shape::kBlocks > 1) exchange.init();
    fence_barriers();
    fence_async_proxy();
  }
};

// Warpgroups take turns at issuing products, so that one is at its softmax while another feeds the tensor
// cores. Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), ping-pong scheduling.
template <typename Shape>
struct Turns {
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kFirstBarrier = 1;  // 0 is __syncthreads'
  int group;

  __device__ __forceinline__ void begin() const {
    if (group == kGroups - 1) pass();
  }
  __device__ __forceinline__ void take() const {
    if constexpr (!Shape::kTakesTurns) return;
    sync_warps<256>(kFirstBarrier + group);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (!Shape::kTakesTurns) return;
    arrive_warps<256>(kFirstBarrier + (group + 1) % kGroups);
  }
  // Leaves no barrier half full.
  __device__ __forceinline__ void end() const {
    if (group == 0) take();
  }
};

}  // namespace ortolan::cuda
