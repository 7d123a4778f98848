// Decode attention of one sequence in a single kernel: each entry has a cluster of blocks to itself.
//
// The entry's tiles alone form the line that the cluster's blocks share evenly, so nothing is counted.
// Partial sums stay in shared memory (kept.cuh), or go through global memory as they do between two kernels,
// into the places of plan.cuh. They are merged by the same functions in the same order: the bits are those of
// the entry in any batch.
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
  bool keeps;  // blocks keep their sums; see kept.cuh
  static constexpr bool snaps = false;
  static constexpr bool kOfCluster = true;

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
        keeps(shape.kept && cut.quotient + (cut.remainder > 0) <= kKeptTiles) {}
  __device__ __forceinline__ int begin(int block) const { return cut.begin(block - first_block); }
  __device__ __forceinline__ int owner(int tile) const { return first_block + cut.owner(tile); }
  // Says, for each thread once, that the block has read all that others keep.
  __device__ __forceinline__ void let_go() const {
    if (keeps) cluster_arrive();
  }
  __device__ __forceinline__ int entry_of(int) const { return index; }
  __device__ __forceinline__ int first(int) const { return 0; }
  __device__ __forceinline__ int end(int) const { return own.tiles.count(); }
  __device__ __forceinline__ DecodeEntry entry(const SwaAttentionParams&, const DecodeShape&, int) const {
    return own;
  }
};

// Once the blocks of a cluster have stored their partial sums: each merges some columns of some rows, in
// memory that the stages have left.
template <typename Element, int kHeadSize, int kColumns>
__device__ __forceinline__ void combine_columns(const SwaAttentionParams& params, const DecodeShape& shape,
                                                const DecodeWorkspace& workspace, const ClusterLine& line,
                                                unsigned char* memory, int rank) {
  constexpr int kGroups = kHeadSize / kColumns;
  const uint32_t kept = shared_address(memory) + shape.kept;
  const SpanRound spans = SpanRound::of(memory, kRoundSpans, kColumns);
  const int units = line.own.rows * kGroups;
  for (int unit = rank; unit < units; unit += shape.cluster) {
    if (unit != rank) __syncthreads();  // what the unit before has read may be overwritten
    const int first_column = unit % kGroups * kColumns;
    const PartialRow<kHeadSize, ClusterLine> partial{
        workspace,  line,           line.own.tiles,
        line.index, unit / kGroups, first_column + static_cast<int>(threadIdx.x) % (kColumns / 4) * 4,
        kept};
    const bool is_last = unit + shape.cluster >= units;
    combine_row<Element, kColumns>(params, shape, line.own, partial, spans, kRoundSpans, first_column,
                                   is_last);
  }
  if (rank >= units) line.let_go();
}

// For all threads of the cluster.
template <typename Element, int kHeadSize>
__device__ __forceinline__ void combine_cluster(const SwaAttentionParams& params, const DecodeShape& shape,
                                                const DecodeWorkspace& workspace, const ClusterLine& line,
                                                unsigned char* memory) {
  constexpr int kWide = kHeadSize < 128 ? kHeadSize : 128;
  const KeyTiles& tiles = line.own.tiles;
  const PartialRow<kHeadSize, ClusterLine> first_row{workspace, line, tiles, line.index, 0, 0, 0};
  if (first_row.is_stored(SpanTiles::of(tiles, tiles.at(0) / shape.span_tiles, shape.span_tiles))) return;
  cluster_sync();
  __syncthreads();  // says nothing new, but to racecheck
  const int rank = static_cast<int>(blockIdx.x) - line.first_block;
  if (line.own.rows * (kHeadSize / 32) <= shape.cluster)
    combine_columns<Element, kHeadSize, 32>(params, shape, workspace, line, memory, rank);
  else
    combine_columns<Element, kHeadSize, kWide>(params, shape, workspace, line, memory, rank);
  if (line.keeps) cluster_wait();  // others may still read what this block keeps
}

}  // namespace ortolan::cuda
