// Host side of decode attention: sizes from shapes, then one launch in clusters, or one to sum and one to
// combine.
#pragma once

#include <algorithm>

#include "combine.cuh"
#include "combine_rows.cuh"
#include "decode.cuh"
#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/common/element_dispatch.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace ortolan::cuda {

template <typename Rows, int kRowTiles>
int decode_shared_bytes(const DecodeShape& shape) {
  return DecodeShared::bytes<Rows>(shape, kDecodeTileRows * kRowTiles);
}

// As many warps as leave three stages in shared memory beside the sums of four rows; with few, fewer stages
// will do. Sums depend on the size of a tile, so it is the same for any number of rows and sequences.
template <typename Rows>
int decode_warps(const Device& device) {
  constexpr int kGoodStages = 3, kOtherBytes = 4096;
  int warps = kMaxDecodeWarps<Rows::kHeadSize>;
  for (; warps > 1; warps /= 2) {
    const int sums = warps * DecodeSums<Rows>::floats(4) * static_cast<int>(sizeof(float));
    const int stage = DecodeStage<Rows>::bytes(warps * Rows::kWarpKeys);
    if (std::min(kGoodStages, 1 + warps) * stage + sums + kOtherBytes <= device.shared_bytes_per_block) break;
  }
  return warps;
}

// Sets stages and buffers to what there is room for, stages first; they are 0 where not even one fits.
template <typename Rows, int kRowTiles>
void fill_shared(DecodeShape& shape, const Device& device) {
  constexpr int kMaxStages = 6, kStaticBytes = 2048;
  const auto fits = [&] {
    return decode_shared_bytes<Rows, kRowTiles>(shape) + kStaticBytes <= device.shared_bytes_per_block;
  };
  shape.buffers = 1;
  for (shape.stages = kMaxStages; shape.stages > 0 && !fits();) --shape.stages;
  shape.buffers = 2;
  if (!fits()) shape.buffers = 1;
}

// Whether a block can tell its first tile from a length and its own number.
inline bool can_guess(const SwaAttentionParams& params, const Device& device) {
  return device.compute_capability >= 90 && params.packing.num_sequences == 1 &&
         params.past_len.head_stride == 0 && !params.cache.block_table && !params.prefix_end;
}

// Whether blocks may count tiles by lengths that the kernel in front could still change, to compare them with
// what they are when it has ended.
inline bool can_guess_all(const SwaAttentionParams& params, const DecodeShape& shape) {
  return shape.sequences <= kMostGuessed && !shape.counted_strips && params.past_len.head_stride == 0 &&
         !params.prefix_end;
}

// Rows of an entry that has room for so many: whole quads, in which sums lie.
inline int whole_quads(int rows) { return (rows + 3) / 4 * 4; }

// A shape but for what lies in shared memory: entries of `most_rows` query rows at most.
inline DecodeShape plan_entries(const SwaAttentionParams& params, const Device& device, int most_tokens,
                                int most_rows, int tile_keys, PowerOfTwo span_tiles) {
  const auto kv_heads = static_cast<int>(params.cache.num_kv_heads);
  const auto tokens = static_cast<int>(std::min<int64_t>(most_new_tokens(params), most_tokens));
  DecodeShape shape{};
  shape.most_tokens = most_tokens;
  shape.kv_heads = kv_heads;
  shape.group = static_cast<int>(params.num_heads) / kv_heads;
  shape.entry_rows = std::min(most_rows, whole_quads(shape.group * tokens));
  shape.row_tiles = (shape.group * tokens + shape.entry_rows - 1) / shape.entry_rows;
  shape.sequences = static_cast<int>(params.packing.num_sequences);
  if (shape.row_tiles > 1 && shape.sequences > 1)
    shape.counted_strips = static_cast<int>(most_row_tiles(shape.sequences, params.packing.num_tokens,
                                                           most_tokens, shape.group, shape.entry_rows));
  shape.entries =
      kv_heads * (shape.counted_strips ? shape.counted_strips : shape.sequences * shape.row_tiles);
  shape.tile_keys = tile_keys;
  shape.span_tiles = span_tiles;
  const int64_t tiles = params.cache.capacity / tile_keys + 4;  // of an entry, at most
  shape.max_spans = static_cast<int>(tiles >> span_tiles.shift) + 4;
  shape.blocks = static_cast<int>(std::min<int64_t>(device.num_multiprocessors, shape.entries * tiles));
  while (1 << shape.tile_shift < tile_keys) ++shape.tile_shift;
  shape.guesses = can_guess(params, device);
  shape.by_group = Divisor::of(shape.group);
  shape.by_kv_heads = Divisor::of(kv_heads);
  shape.by_sequences = Divisor::of(shape.sequences);
  shape.by_line = Divisor::of(shape.blocks);
  return shape;
}

// Whether a sequence's kv heads have the same tiles, and strips are sequences.
inline bool are_heads_alike(const SwaAttentionParams& params, const DecodeShape& shape) {
  return !shape.counted_strips && shape.row_tiles == 1 && params.past_len.head_stride == 0;
}

// Entries of a block where each may have whole ones: as many as keep nine tenths of the blocks busy.
inline int own_entries(const SwaAttentionParams& params, const DecodeShape& shape) {
  const int each = divide_up(shape.entries, shape.blocks);
  return are_heads_alike(params, shape) && 10 * shape.entries >= 9 * each * shape.blocks ? each : 0;
}

template <typename Rows, int kRowTiles>
DecodeShape plan_decode(const SwaAttentionParams& params, const Device& device) {
  const int warps = decode_warps<Rows>(device);
  DecodeShape shape = plan_entries(params, device, decode_tokens(params, kDecodeTokens),
                                   kDecodeTileRows * kRowTiles, warps * Rows::kWarpKeys, PowerOfTwo{3});
  shape.warps = warps;
  shape.own_entries = own_entries(params, shape);
  fill_shared<Rows, kRowTiles>(shape, device);
  return shape;
}

// A cluster's few blocks are slow to combine long rows, or many: entries in clusters have one tile of rows.
template <int kHeadSize>
constexpr bool kHasClusters = kHeadSize <= 256;

// Tiles that an entry visits, at most. The kernel that clusters do without takes its places from the
// capacity.
inline int most_tiles(const SwaAttentionParams& params, const DecodeShape& shape) {
  const int64_t capacity = params.cache.capacity;
  const int64_t tokens = params.max_kv_len > 0 ? std::min(capacity, params.max_kv_len) : capacity;
  const int64_t all = divide_up(static_cast<int32_t>(tokens), shape.tile_keys);
  if (params.window < 0 || params.prefix_end) return static_cast<int>(all);
  const int64_t window = (params.window + shape.most_tokens) / shape.tile_keys + 2;
  return static_cast<int>(std::min(all + 1, window)) +
         divide_up(static_cast<int32_t>(params.cache.sink), shape.tile_keys);
}

// The largest cluster that is of use to each entry, or 0 where the entries do without. Blocks without tiles
// are of use where rows are many: they combine some.
template <typename Rows>
int largest_cluster(const SwaAttentionParams& params, const DecodeShape& shape, const Device& device) {
  if (device.compute_capability < 90 || params.packing.num_sequences != 1) return 0;
  const int combine_bytes = SpanRound::bytes(kRoundSpans, std::min(Rows::kHeadSize, 128));
  if (shape.stages * DecodeStage<Rows>::bytes(shape.tile_keys) < combine_bytes) return 0;
  const int combined = shape.entry_rows * divide_up(Rows::kHeadSize, 128);
  return std::min({kMaxCluster, device.num_multiprocessors / shape.entries,
                   std::max(most_tiles(params, shape), combined)});
}

// Whether a cluster of so many blocks for each entry is faster than all blocks for all entries and a second
// kernel, which takes about as long as two more tiles in each block do. Lengths may be anything up to what
// the host knows. Several tiles of rows read keys again, for which smaller clusters do not make up.
inline bool clusters_pay(const SwaAttentionParams& params, const DecodeShape& shape, int cluster,
                         const Device& device) {
  if (cluster < (shape.row_tiles > 1 ? 4 : 2)) return false;
  const int tiles = most_tiles(params, shape), alone = divide_up(tiles, cluster);
  const int shared = divide_up(shape.entries * tiles, device.num_multiprocessors);
  return alone <= std::min(2 * shared, shared + 2);
}

// Where blocks receive sums: in the last stage, behind what combining takes.
template <typename Rows>
int received_place(const DecodeShape& shape) {
  const int stage = DecodeStage<Rows>::bytes(shape.tile_keys), place = (shape.stages - 1) * stage;
  int most = 0;  // whatever the number of rows
  for (int rows = 1; rows <= shape.entry_rows; ++rows)
    most = std::max(most,
                    ReceivedSums::bytes(ClusterUnits::of<Rows::kHeadSize>(rows, shape.cluster, shape.by_line),
                                        shape.received_tiles));
  const bool fits = most <= stage && SpanRound::bytes(kRoundSpans, std::min(Rows::kHeadSize, 128)) <= place;
  return shape.stages > kSentTiles && fits ? place : 0;
}

inline DecodeShape in_clusters(DecodeShape shape, int cluster) {
  shape.cluster = cluster;
  shape.blocks = cluster * shape.entries;
  shape.by_line = Divisor::of(cluster);
  return shape;
}

// Two rows a warp: more would follow one another, fewer find what their entry has in common more often.
template <typename Element, int kHeadSize>
cudaError_t combine_rows(const SwaAttentionParams& params, const DecodeShape& shape,
                         const DecodeWorkspace& workspace, const Launch& launch) {
  constexpr int kRowsOfWarp = 2, kWarps = LaneColumns<kHeadSize>::kWarps;
  const int warps = std::min(kCombiningWarps, shape.entry_rows * kWarps);
  const int rows_at_once = std::min(shape.entry_rows, warps / kWarps * kRowsOfWarp);
  const int groups = divide_up(shape.entry_rows, rows_at_once);
  // Blocks count where most of them start before the kernel in front has ended. Else, or where there may be
  // far fewer entries than the host must expect, more blocks than a multiprocessor has at a time would be in
  // vain.
  const int resident = divide_up(4 * launch.device.num_multiprocessors, groups);
  const bool counts = are_heads_alike(params, shape) &&
                      int64_t{shape.entries} * groups * warps <= 32 * launch.device.num_multiprocessors;
  const int blocks = counts ? shape.entries : std::min(shape.entries, resident);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(groups));
  return launch_overlapped(decode_combine_rows_kernel<Element, kHeadSize>, grid, dim3(warps * 32), 0, launch,
                           params, shape, workspace, rows_at_once, counts);
}

// Whether a row is merged by a warp and not by a block: where rows are many, and more so where spans are not
// handed on whole and entries have several tiles of rows.
inline bool combines_by_warps(const SwaAttentionParams& params, const DecodeShape& shape,
                              const Device& device) {
  if (!shape.counted_strips && shape.row_tiles == 1)
    return int64_t{shape.entries} * shape.entry_rows > 4 * device.num_multiprocessors;
  const int64_t rows = params.packing.num_tokens * params.num_heads;
  return params.packing.num_tokens > params.packing.num_sequences &&
         rows >= (shape.may_snap || shape.span_tiles.shift == 0 ? 2048 : 4096);
}

template <typename Element, int kHeadSize>
cudaError_t combine_decode(const SwaAttentionParams& params, const DecodeShape& shape,
                           const DecodeWorkspace& workspace, const Launch& launch) {
  if (combines_by_warps(params, shape, launch.device))
    return combine_rows<Element, kHeadSize>(params, shape, workspace, launch);
  // A window's spans may lie anywhere in their rounds.
  const int spans = params.window < 0 ? std::min(kRoundSpans, shape.max_spans) : kRoundSpans;
  const int64_t rows = params.packing.num_tokens * params.num_heads;
  const int64_t places = int64_t{shape.entries} * shape.entry_rows;
  // A token finds its sequence before the kernel in front has ended, a counted strip after.
  const int64_t resident = 8 * int64_t{launch.device.num_multiprocessors};
  const bool by_token = shape.counted_strips ? rows <= places : rows < places;
  const auto enqueue = [&](auto kernel, int columns, int threads) {
    const int64_t columns_rows = int64_t{shape.entry_rows} * (kHeadSize / columns);
    const int64_t at_once = (resident + columns_rows - 1) / columns_rows;
    const int64_t entries = shape.counted_strips ? std::min<int64_t>(shape.entries, at_once) : shape.entries;
    const dim3 grid(static_cast<unsigned>(by_token ? params.packing.num_tokens : entries),
                    static_cast<unsigned>(by_token ? params.num_heads : shape.entry_rows),
                    kHeadSize / columns);
    return launch_overlapped(kernel, grid, dim3(threads), SpanRound::bytes(spans, columns), launch, params,
                             shape, workspace, spans, by_token);
  };
  const auto enqueue_with = [&]<int kColumns, int kThreads>() {
    return shape.counted_strips && !by_token
               ? enqueue(decode_combine_kernel<Element, kHeadSize, kColumns, kThreads, true>, kColumns,
                         kThreads)
               : enqueue(decode_combine_kernel<Element, kHeadSize, kColumns, kThreads, false>, kColumns,
                         kThreads);
  };
  constexpr int kWide = std::min(kHeadSize, 128);  // columns of a block where rows fill the device
  // Many spans are merged by more threads as long as there is room for them.
  const int filling = spans > kSpanParts ? 4 : 2;
  const int64_t blocks = std::min(rows, places) * (kHeadSize / kWide);
  if (blocks * (kWide / 32) > filling * launch.device.num_multiprocessors) {
    constexpr int kThreads = kWide / 4 * kSpanParts;  // for as many spans at once
    if (!shape.counted_strips && blocks * kThreads <= 2048 * int64_t{launch.device.num_multiprocessors})
      return enqueue(decode_combine_kernel<Element, kHeadSize, kWide, kThreads, false>, kWide, kThreads);
    return enqueue_with.template operator()<kWide, 128>();
  }
  if (spans > 32) return enqueue_with.template operator()<32, 512>();
  return enqueue_with.template operator()<32, 256>();
}

// How a kernel of this shape is launched.
template <typename Rows, int kRowTiles>
struct DecodeLaunch {
  dim3 block;
  int shared_bytes;

  explicit DecodeLaunch(const DecodeShape& shape)
      : block((shape.warps + kLoadWarps<Rows> + kMergeWarps) * 32),
        shared_bytes(decode_shared_bytes<Rows, kRowTiles>(shape)) {}

  template <typename Kernel>
  cudaError_t enqueue(Kernel kernel, const SwaAttentionParams& params, const DecodeShape& shape,
                      const Launch& launch) const {
    const auto cluster = static_cast<unsigned>(std::max(shape.cluster, 1));
    return launch_clusters(kernel, dim3(shape.blocks), block, cluster, shared_bytes, launch, params, shape,
                           DecodeWorkspace::of(launch.workspace, shape));
  }
};

// The shape in clusters where that is faster and the device holds them all at once; else one without.
template <typename Rows>
cudaError_t plan_clusters(const SwaAttentionParams& params, DecodeShape& shape, const Device& device) {
  shape = plan_decode<Rows, 1>(params, device);
  int cluster = largest_cluster<Rows>(params, shape, device);
  if (!clusters_pay(params, shape, cluster, device)) return cudaSuccess;
  constexpr auto kernel = decode_kernel<Rows, 1, true>;
  const DecodeLaunch<Rows, 1> how(shape);
  cudaError_t error = allow_shared_memory<kernel>(device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  // One block has a multiprocessor to itself, whatever its size: the clusters are as many for all shapes.
  const auto resident = [&] {
    return resident_clusters<kernel>(how.block, cluster, how.shared_bytes, device);
  };
  while (cluster > 1 && resident() < shape.entries) --cluster;
  if (clusters_pay(params, shape, cluster, device)) {
    shape = in_clusters(shape, cluster);
    shape.received_tiles = kSentTiles * cluster;
    shape.received = received_place<Rows>(shape);
  }
  return cudaSuccess;
}

template <typename Rows, int kRowTiles>
cudaError_t launch_decode(const SwaAttentionParams& params, const Launch& launch) {
  if constexpr (kHasClusters<Rows::kHeadSize>) {
    DecodeShape shape;
    if (const cudaError_t error = plan_clusters<Rows>(params, shape, launch.device); error != cudaSuccess)
      return error;
    if (shape.cluster)
      return DecodeLaunch<Rows, 1>(shape).enqueue(decode_kernel<Rows, 1, true>, params, shape, launch);
  }
  DecodeShape shape = plan_decode<Rows, kRowTiles>(params, launch.device);
  shape.is_behind = launch.is_behind;
  shape.guesses_all = !launch.is_behind && can_guess_all(params, shape);
  if (shape.stages < 1) return cudaErrorInvalidConfiguration;  // too many sequences for shared memory
  constexpr auto kernel = decode_kernel<Rows, kRowTiles, false>;
  cudaError_t error = allow_shared_memory<kernel>(launch.device);
  if (error == cudaSuccess)
    error = DecodeLaunch<Rows, kRowTiles>(shape).enqueue(kernel, params, shape, launch);
  if (error != cudaSuccess) return error;
  const DecodeWorkspace workspace = DecodeWorkspace::of(launch.workspace, shape);
  if constexpr (!Rows::kHasScales)
    return combine_decode<typename Rows::Element, Rows::kHeadSize>(params, shape, workspace, launch);
  else
    return with_half_element(params.element, [&]<typename Element>() {
      return combine_decode<Element, Rows::kHeadSize>(params, shape, workspace, launch);
    });
}

template <typename Rows, int kRowTiles>
size_t decode_workspace_bytes(const SwaAttentionParams& params, const Device& device) {
  const size_t bytes = DecodeWorkspace::bytes(plan_decode<Rows, kRowTiles>(params, device), Rows::kHeadSize);
  if constexpr (kHasClusters<Rows::kHeadSize>) {
    const DecodeShape shape = plan_decode<Rows, 1>(params, device);
    if (const int cluster = largest_cluster<Rows>(params, shape, device))
      return std::max(bytes, DecodeWorkspace::bytes(in_clusters(shape, cluster), Rows::kHeadSize));
  }
  return bytes;
}

// One source file per element type, and one per code, keep a build parallel.
#define ORTOLAN_INSTANTIATE_DECODE(Rows, Type, kHeadSize, kRowTiles)                                  \
  template cudaError_t launch_decode<Rows<Type, kHeadSize>, kRowTiles>(const SwaAttentionParams&,     \
                                                                       const Launch&);                \
  template size_t decode_workspace_bytes<Rows<Type, kHeadSize>, kRowTiles>(const SwaAttentionParams&, \
                                                                           const Device&);

// The combine kernels of codes are those of elements.
#define ORTOLAN_COMBINE_DECODE(linkage, Element, kHeadSize)        \
  linkage template cudaError_t combine_decode<Element, kHeadSize>( \
      const SwaAttentionParams&, const DecodeShape&, const DecodeWorkspace&, const Launch&);

}  // namespace ortolan::cuda
