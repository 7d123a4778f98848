// Decode attention: a few query rows per sequence against all of its keys, at the speed of memory.
//
// Grid: one block per multiprocessor; plan.cuh says which key tiles each takes. One sequence may have its
// blocks in clusters, one per kv head and tile of rows, and no second kernel: see cluster.cuh. The warps of a
// block have three trades, and wait for each other only through barriers in shared memory: load.cuh copies
// tiles to a ring of stages, warp.cuh and code_warp.cuh multiply, merge.cuh merges. The query heads of a
// group and a sequence's tokens are the columns of one matrix product, so keys and values are read once for
// up to 16 of them. Order of sums: fixed by key position, within a tile and above it. Source of the split
// over keys: Dao et al., Flash-Decoding (2023); of the packed heads: the GQA packing of FlashAttention.
#pragma once

#include "cluster.cuh"
#include "code_warp.cuh"
#include "load.cuh"
#include "merge.cuh"
#include "prefetch.cuh"
#include "warp.cuh"

namespace ortolan::cuda {

// Warps that multiply, at most: bounded by registers.
template <int kHeadSize>
constexpr int kMaxDecodeWarps = kHeadSize <= 128   ? 8
                                : kHeadSize <= 256 ? 4
                                                   : 2;

// The tiles of a block, begin .. end on the line.
template <typename Line>
struct DecodePiece {
  const Line& line;
  int begin;
  int end;

  static __device__ __forceinline__ DecodePiece of(const Line& line) {
    const auto block = static_cast<int>(blockIdx.x);
    return {line, line.begin(block), line.begin(block + 1)};
  }
  __device__ __forceinline__ bool is_empty() const { return begin >= end; }
};

// Starts the copies of the cursor's tile.
template <typename Rows>
__device__ __forceinline__ void load_tile(const DecodeLoad<Rows>& self, const DecodeShared& shared,
                                          const DecodeCursor& cursor, bool is_values) {
  using Stage = DecodeStage<Rows>;
  const int tile_keys = self.shape.tile_keys;
  const uint32_t stage = shared_address(shared.stages) + cursor.stage.place * Stage::bytes(tile_keys);
  self.load(cursor, stage + is_values * tile_keys * Stage::kRowBytes);
  if constexpr (Rows::kHasScales) self.load_scales(cursor, stage + Stage::scales(tile_keys, is_values));
}

// Whether a line may be worked on: once the kernel in front has ended, and if what it was counted by holds.
template <typename Line>
struct LineCheck {
  const Line& line;
  bool is_open;  // not yet known

  explicit __device__ __forceinline__ LineCheck(const Line& line) : line(line), is_open(false) {
    if constexpr (!Line::kOfCluster) is_open = line.guessed;
  }
  // For whole warps: before the first read of what the kernel in front may write, and after it.
  __device__ __forceinline__ void wait() const {
    if (is_open) wait_for_previous_kernel();
  }
  __device__ __forceinline__ bool holds(const SwaAttentionParams& params, const DecodeShape& shape) {
    if constexpr (!Line::kOfCluster)
      if (is_open && !are_lengths(line.guessed, params, shape)) return false;
    is_open = false;
    return true;
  }
  __device__ __forceinline__ bool end(const SwaAttentionParams& params, const DecodeShape& shape) {
    wait();
    return holds(params, shape);
  }
};

// `has_first`: the copies of the first tile have started. Returns whether the line holds.
template <typename Rows, typename Line>
__device__ __forceinline__ bool load_tiles(const DecodeLoad<Rows>& self, const DecodeShared& shared,
                                           const DecodePiece<Line>& piece, bool is_values, bool has_first) {
  const DecodeShape& shape = self.shape;
  DecodeCursor cursor{.tile = piece.begin};
  LineCheck<Line> check(piece.line);
  for (; cursor.tile < piece.end; cursor.advance(shape)) {
    cursor.settle(self.params, shape, piece.line);
    check.wait();
    shared.multiplied[cursor.stage.place].wait(cursor.stage.parity ^ 1);
    if (!has_first) load_tile(self, shared, cursor, is_values);
    has_first = false;
    if (!check.holds(self.params, shape)) break;
    shared.loaded[cursor.stage.place].arrive_after_copies();
  }
  const bool holds = check.end(self.params, shape);
  copy_async_commit();
  copy_async_wait<0>();
  if (holds) launch_dependents();  // not before: weights of the layers behind would come in these tiles' way
  return holds;
}

template <typename Rows, typename Line, typename Confirm>
__device__ __forceinline__ bool load_piece(const DecodeLoad<Rows>& self, const DecodeShared& shared,
                                           const Line& line, bool is_values, const Confirm& confirm) {
  using Piece = DecodePiece<Line>;
  bool has_first = false;
  if constexpr (Line::kOfCluster) {
    const Piece piece = Piece::of(line);
    DecodeCursor cursor{.tile = piece.begin};
    cursor.settle(self.params, self.shape, line);
    has_first = !piece.is_empty();
    if (has_first) load_tile(self, shared, cursor, is_values);
  }
  if (!confirm()) {
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();  // all lanes' copies, before others go to the same place
    has_first = false;
  }
  return load_tiles(self, shared, Piece::of(line), is_values, has_first);
}

template <typename Rows, int kRowTiles, typename Line>
__device__ __forceinline__ bool multiply_tiles(DecodeWarp<Rows, kRowTiles>& self,
                                               const DecodePiece<Line>& piece) {
  DecodeCursor cursor{.tile = piece.begin};
  LineCheck<Line> check(piece.line);
  for (; cursor.tile < piece.end; cursor.advance(self.shape)) {
    const bool is_new = cursor.settle(self.params, self.shape, piece.line);
    check.wait();
    if (is_new && !Line::kOfCluster) self.take_queries(cursor.of);
    if (!check.holds(self.params, self.shape)) return false;
    self.shared.loaded[cursor.stage.place].wait(cursor.stage.parity);
    __syncwarp();
    self.sum(cursor);
    self.shared.summed[cursor.buffer.place].arrive_once(self.lane);
  }
  return check.end(self.params, self.shape);
}

// Where a tile's sums go, or those that it is merged into.
__device__ __forceinline__ int64_t partial_place(const DecodeWorkspace& workspace, const DecodeCursor& cursor,
                                                 const DecodeSpan& span) {
  if (span.is_whole) return workspace.span_place(cursor.entry, span.number);
  return workspace.tile_place(span.owner,
                              cursor.of.tiles.at(span.is_merged ? span.tiles.begin : cursor.number));
}

// What a block knows of how its line's partial sums are merged.
template <typename Rows, typename Line>
__device__ __forceinline__ auto merge_of(const DecodeShape& shape, const Line& line,
                                         const DecodeShared& shared) {
  if constexpr (Line::kOfCluster)
    return ClusterMerge::of<Rows::kHeadSize>(shape, line, shared.stages);
  else
    return 0;
}

template <typename Rows, int kRowTiles, typename Line>
__device__ __forceinline__ bool merge_tiles(DecodeMerge<Rows, kRowTiles>& self,
                                            const DecodePiece<Line>& piece) {
  __shared__ TileFactors<kDecodeTileRows * kRowTiles> factors;
  DecodeCursor cursor{.tile = piece.begin};
  DecodeSpan span;
  LineCheck<Line> check(piece.line);
  if (!check.end(self.params, self.shape)) return false;
  self.clear();
  const auto merge = merge_of<Rows>(self.shape, piece.line, self.shared);
  if constexpr (Line::kOfCluster)
    if (piece.line.sends && self.thread == 0)
      self.shared.received->arrive_expecting(merge.received_bytes(self.shape, piece.line.own.tiles.count()));
  for (; cursor.tile < piece.end; cursor.advance(self.shape)) {
    const bool is_new = cursor.settle(self.params, self.shape, piece.line);
    span.settle(cursor, is_new, piece.line, piece.begin, piece.end, self.shape);
    bool sends = false;
    if constexpr (Line::kOfCluster) sends = piece.line.sends && !piece.line.is_stored();
    const int buffer = cursor.buffer.place;
    self.shared.summed[buffer].wait(cursor.buffer.parity);
    sync_warps<kMergeThreads>(1);  // all have read the last tile's factors
    self.find_factors(factors, buffer, span.is_merged && !sends);
    sync_warps<kMergeThreads>(1);
    if (!sends) {
      self.merge_tile(factors, cursor, span, partial_place(self.workspace, cursor, span));
    } else if constexpr (Line::kOfCluster) {
      self.send_tile(factors, merge, cursor.number, cursor.of.rows, buffer);
    }
    self.shared.merged[buffer].arrive_once(self.thread % 32);
  }
  return true;
}

// A block's piece of a line, by the trade of each warp. `confirm` says whether a cluster's line holds, which
// may have been a guess, and sets it right; what a guess allows is begun before. Returns whether another line
// holds: if not, nothing has been summed.
template <typename Rows, int kRowTiles, typename Line, typename Confirm>
__device__ __forceinline__ bool sum_piece(const SwaAttentionParams& params, const DecodeShape& shape,
                                          const DecodeWorkspace& workspace, const DecodeShared& shared,
                                          const Line& line, const Confirm& confirm) {
  using Piece = DecodePiece<Line>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < shape.warps) {
    DecodeWarp<Rows, kRowTiles> self{params, shape, shared, Logits::of(params.scale, params.softcap),
                                     warp,   lane};
    if constexpr (Line::kOfCluster) {  // of one entry
      if (!Piece::of(line).is_empty()) self.take_queries(line.own);
      if (!confirm()) self.take_queries(line.own);
    }
    return multiply_tiles(self, Piece::of(line));
  } else if (warp < shape.warps + kLoadWarps<Rows>) {
    const int loader = warp - shape.warps;
    const bool is_values = loader >= Rows::kLoadParts;
    const void* cache = is_values ? params.value_cache : params.key_cache;
    const float* scales = is_values ? params.value_scale : params.key_scale;
    const DecodeLoad<Rows> self{params,
                                shape,
                                static_cast<const typename Rows::Stored*>(cache),
                                scales,
                                evict_first_policy(),
                                loader % Rows::kLoadParts,
                                lane};
    return load_piece(self, shared, line, is_values, confirm);
  } else {
    confirm();
    const int thread = static_cast<int>(threadIdx.x) - (shape.warps + kLoadWarps<Rows>)*32;
    DecodeMerge<Rows, kRowTiles> self{params, shape, shared, workspace, thread};
    return merge_tiles(self, Piece::of(line));
  }
}

// For a whole block: makes what rows shorter than the kernel's head lack zeros.
template <typename Rows>
__device__ __forceinline__ void clear_short_rows(const SwaAttentionParams& params, const DecodeShared& shared,
                                                 const DecodeShape& shape) {
  using Stage = DecodeStage<Rows>;
  constexpr int kPiece = 16 / static_cast<int>(sizeof(typename Rows::Stored));
  const int pieces = static_cast<int>(params.cache.head_size) / kPiece, tile_rows = 2 * shape.tile_keys;
#pragma unroll 1
  for (int stage = 0; stage < shape.stages; ++stage)
#pragma unroll 1
    for (auto row = static_cast<int>(threadIdx.x); row < tile_rows; row += static_cast<int>(blockDim.x))
#pragma unroll 1
      for (int piece = pieces; piece < Rows::kHeadSize / kPiece; ++piece)
        store_shared_16(
            shared_address(shared.stages) + stage * Stage::bytes(shape.tile_keys) + Stage::place(row, piece),
            uint4{});
}

// The entry of a cluster. Its lengths are guessed while the kernel in front runs, and read again while the
// first tile and the queries are on their way.
template <typename Rows, int kRowTiles>
__device__ __forceinline__ void decode_cluster(const SwaAttentionParams& params, const DecodeShape& shape,
                                               const DecodeWorkspace& workspace, const DecodeShared& shared) {
  const int entry = static_cast<int>(blockIdx.x) / shape.cluster;
  const int kv_head = ClusterLine::kv_head(shape, entry);
  if (!shape.guesses) wait_for_previous_kernel();
  const EntryLengths lengths = shape.guesses ? guess_lengths(params) : EntryLengths::of(params, 0, kv_head);
  ClusterLine line(params, shape, entry, lengths);
  wait_for_previous_kernel();
  const EntryLengths found = EntryLengths::of(params, 0, kv_head);
  sum_piece<Rows, kRowTiles>(params, shape, workspace, shared, line, [&] {
    if (found == lengths) return true;
    line = ClusterLine(params, shape, entry, found);
    return false;
  });
  combine_cluster<typename Rows::Element, Rows::kHeadSize>(params, shape, workspace, line, shared.stages,
                                                           shared.received);
}

template <typename Rows, int kRowTiles, bool kClusters>
__device__ __forceinline__ void decode_block(const SwaAttentionParams& params, const DecodeShape& shape,
                                             const DecodeWorkspace& workspace) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  if (!kClusters && is_in_vain(params, shape)) return;
  const DecodeShared shared = DecodeShared::of<Rows>(shared_memory, shape, kDecodeTileRows * kRowTiles);
  if (threadIdx.x < shape.stages) {
    shared.loaded[threadIdx.x].init(kLoadWarps<Rows> * 32);
    shared.multiplied[threadIdx.x].init(shape.warps);
  }
  if (threadIdx.x < shape.buffers) {
    shared.summed[threadIdx.x].init(shape.warps);
    shared.merged[threadIdx.x].init(kMergeWarps);
  }
  if (params.cache.head_size < Rows::kHeadSize) clear_short_rows<Rows>(params, shared, shape);
  if constexpr (kClusters) {  // else while tiles are counted
    if (threadIdx.x == 0) shared.received->init(1);
    fence_barriers();
    cluster_sync();
  }
  if (shape.guesses) prefetch_first_tile<sizeof(typename Rows::Stored)>(params, shape);

  if constexpr (kClusters) {
    decode_cluster<Rows, kRowTiles>(params, shape, workspace, shared);
  } else {
    __shared__ EntryLengths lengths[kMostGuessed];
    EntryLengths* guessed = shape.guesses_all ? lengths : nullptr;
#pragma unroll 1
    while (true) {  // once more, at most
      const CountedTiles counted = count_and_wait(params, shape, shared.starts, guessed);
      const DecodeLine line(shared.starts, shape, counted.cut, guessed);
      if (sum_piece<Rows, kRowTiles>(params, shape, workspace, shared, line, [] { return true; })) {
        if (blockIdx.x == 0) store_counts(shape, workspace, shared.starts, counted);
        break;
      }
      guessed = nullptr;
      __syncthreads();  // all have compared lengths with those that were guessed
    }
  }
}

// `kClusters`: of shape.cluster blocks, one per entry; else the combine kernel comes after this one.
template <typename Rows, int kRowTiles, bool kClusters>
__global__ void __launch_bounds__((kMaxDecodeWarps<Rows::kHeadSize> + kLoadWarps<Rows> + kMergeWarps) * 32, 1)
    decode_kernel(const __grid_constant__ SwaAttentionParams params,
                  const __grid_constant__ DecodeShape shape,
                  const __grid_constant__ DecodeWorkspace workspace) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kIsForOthers = Rows::kHeadSize > 256 && !Rows::kHasScales;  // sm90.cuh is for this one
#else
  constexpr bool kIsForOthers = false;
#endif
  if constexpr (kIsForOthers)
    refuse_architecture();
  else
    decode_block<Rows, kRowTiles, kClusters>(params, shape, workspace);
}

}  // namespace ortolan::cuda
