// Decode attention of one sequence in a single kernel: each entry has a cluster of blocks to itself.
//
// The entry's tiles alone form the line that the cluster's blocks share evenly, so nothing is counted.
// Partial sums are sent to the block that merges them (received.cuh), or go through global memory as they do
// between two kernels, into the places of plan.cuh. They are merged by the same functions in the same order:
// the bits are those of the entry in any batch.
#pragma once

#include "combine.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

// The line of one entry's tiles, cut for the blocks of its cluster.
struct ClusterLine {
  DecodeEntry own;
  int index;        // of the entry, and of the cluster
  int first_block;  // of the cluster
  EvenCut cut;
  bool sends;  // blocks send their sums; see received.cuh
  static constexpr bool snaps = false;
  static constexpr bool kOfCluster = true;

  ClusterLine() = default;
  __device__ __forceinline__ ClusterLine(const SwaAttentionParams& params, const DecodeShape& shape,
                                         int index)
      : ClusterLine(DecodeEntry::of(params, shape, index), shape, index) {}
  // Lengths of the only sequence.
  __device__ __forceinline__ ClusterLine(const SwaAttentionParams& params, const DecodeShape& shape,
                                         int index, const EntryLengths& lengths)
      : ClusterLine(DecodeEntry::of(params, shape, 0, shape.by_kv_heads.divide(index), kv_head(shape, index),
                                    lengths),
                    shape, index) {}
  static __device__ __forceinline__ int kv_head(const DecodeShape& shape, int index) {
    return index - shape.by_kv_heads.divide(index) * shape.kv_heads;
  }
  __device__ __forceinline__ ClusterLine(const DecodeEntry& own, const DecodeShape& shape, int index)
      : own(own),
        index(index),
        first_block(index * shape.cluster),
        cut(EvenCut::of(shape, own.tiles.count(), shape.cluster)),
        sends(shape.received && cut.quotient + (cut.remainder > 0) <= kSentTiles) {}
  __device__ __forceinline__ int begin(int block) const { return cut.begin(block - first_block); }
  __device__ __forceinline__ int owner(int tile) const { return first_block + cut.owner(tile); }
  // Whether a block has all of the entry, and has stored its output: blocks take no second tile before each
  // has one.
  __device__ __forceinline__ bool is_stored() const { return own.tiles.count() <= 1; }
  __device__ __forceinline__ int entry_of(int) const { return index; }
  __device__ __forceinline__ int first(int) const { return 0; }
  __device__ __forceinline__ int end(int) const { return own.tiles.count(); }
  __device__ __forceinline__ DecodeEntry entry(const SwaAttentionParams&, const DecodeShape&, int) const {
    return own;
  }
};

// Where a block's cluster merges, and what.
struct ClusterMerge {
  int rank;  // of the block
  ClusterUnits units;
  ReceivedSums received;

  template <int kHeadSize>
  static __device__ __forceinline__ ClusterMerge of(const DecodeShape& shape, const ClusterLine& line,
                                                    const unsigned char* stages) {
    ClusterMerge merge;
    merge.rank = static_cast<int>(blockIdx.x) - line.first_block;
    merge.units = ClusterUnits::of<kHeadSize>(line.own.rows, shape.cluster, shape.by_line);
    merge.received =
        ReceivedSums::of(shared_address(stages) + shape.received, merge.units, shape.received_tiles);
    return merge;
  }
  // Bytes that the block is sent, of an entry of so many tiles.
  __device__ __forceinline__ uint32_t received_bytes(const DecodeShape& shape, int tiles) const {
    const int own = shape.by_line.divide(units.count - 1 - rank + shape.cluster);
    return tiles * own * ReceivedSums::unit_bytes(units.columns);
  }
};

// Once the partial sums of the cluster's blocks are there: each merges some columns of some rows, in memory
// that the stages have left.
template <typename Element, int kHeadSize, int kColumns>
__device__ __forceinline__ void combine_columns(const SwaAttentionParams& params, const DecodeShape& shape,
                                                const DecodeWorkspace& workspace, const ClusterLine& line,
                                                const ClusterMerge& merge, unsigned char* memory) {
  constexpr int kGroups = kHeadSize / kColumns;
  const SpanRound spans = SpanRound::of(memory, kRoundSpans, kColumns);
  for (int unit = merge.rank, turn = 0; unit < merge.units.count; unit += shape.cluster, ++turn) {
    if (turn > 0) __syncthreads();  // what the unit before has read may be overwritten
    const int first_column = unit % kGroups * kColumns, column = threadIdx.x % (kColumns / 4) * 4;
    const PartialRow<kHeadSize, ClusterLine> partial{workspace,
                                                     line,
                                                     line.own.tiles,
                                                     line.index,
                                                     unit / kGroups,
                                                     first_column + column,
                                                     ReceivedUnit{merge.received, turn, column}};
    combine_row<Element, kColumns>(params, shape, line.own, partial, spans, kRoundSpans, first_column);
  }
}

// For all threads of the cluster. `received`: counts what others send, where they do.
template <typename Element, int kHeadSize>
__device__ __forceinline__ void combine_cluster(const SwaAttentionParams& params, const DecodeShape& shape,
                                                const DecodeWorkspace& workspace, const ClusterLine& line,
                                                unsigned char* memory, Barrier* received = nullptr) {
  constexpr int kWide = kHeadSize < 128 ? kHeadSize : 128;
  if (line.is_stored()) return;
  const auto merge = ClusterMerge::of<kHeadSize>(shape, line, memory);
  if (line.sends) {
    if (merge.rank >= merge.units.count) return;
    wait_for_cluster(*received, 0);
  } else {
    cluster_sync();
  }
  __syncthreads();  // the stages are no longer read
  if (merge.units.columns.shift == 5)
    combine_columns<Element, kHeadSize, 32>(params, shape, workspace, line, merge, memory);
  else
    combine_columns<Element, kHeadSize, kWide>(params, shape, workspace, line, merge, memory);
}

}  // namespace ortolan::cuda
