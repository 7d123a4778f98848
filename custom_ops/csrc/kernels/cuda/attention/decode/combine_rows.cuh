// Merges decode attention's partial sums where rows or sequences are many: as combine.cuh does, in the same
// order, with a warp for each row. What the rows of an entry have in common a warp finds once for all that it
// takes, and where it can, before the kernel in front has ended.
#pragma once

#include "combine_warp.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace ortolan::cuda {

// An entry's place on the line of tiles, and how that is cut.
struct CountedEntry {
  int start;
  EvenCut cut;
  bool snaps;  // pieces end where spans do

  // From what the kernel in front was given, where kv heads are alike.
  static __device__ __forceinline__ CountedEntry count(const SwaAttentionParams& params,
                                                       const DecodeShape& shape, const DecodeEntry& entry) {
    int before = 0;
    LineCounts counts{};
#pragma unroll 1
    for (auto sequence = static_cast<int>(threadIdx.x) % 32; sequence < shape.sequences; sequence += 32) {
      const KeyTiles tiles = DecodeEntry::of(params, shape, sequence, 0, 0).tiles;
      if (sequence < entry.sequence) before += tiles.count();
      counts.add(shape, tiles, shape.kv_heads);
    }
    before = __reduce_add_sync(~0u, before);
    counts.tiles = __reduce_add_sync(~0u, counts.tiles);
    counts.spans = __reduce_add_sync(~0u, counts.spans);
    counts.most_tiles = __reduce_max_sync(~0u, counts.most_tiles);
    return {before * shape.kv_heads + entry.kv_head * entry.tiles.count(),
            EvenCut::of(shape, counts.tiles, shape.blocks), counts.cut(shape) != Cut::kAnywhere};
  }
  // Once that kernel has ended.
  static __device__ __forceinline__ CountedEntry read(const DecodeShape& shape,
                                                      const DecodeWorkspace& workspace, int index) {
    return {workspace.starts[index], EvenCut::of(shape, workspace.starts[shape.entries], shape.blocks),
            workspace.read_cut(shape) != Cut::kAnywhere};
  }
};

constexpr int kCombiningWarps = 8;  // of a block, at most

// Grid: (entries, groups of `rows_at_once` of their rows); blocks take one entry after another. `counts`:
// warps count tiles, in place of reading what the kernel in front has counted.
template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(kCombiningWarps * 32, 2)
    decode_combine_rows_kernel(const __grid_constant__ SwaAttentionParams params,
                               const __grid_constant__ DecodeShape shape,
                               const __grid_constant__ DecodeWorkspace workspace, int rows_at_once,
                               bool counts) {
  using Columns = LaneColumns<kHeadSize>;
  launch_dependents();  // who comes next waits for this kernel, and so for the one before
  if (is_in_vain(params, shape)) return;
  if (!counts) wait_for_previous_kernel();
  const auto thread = static_cast<int>(threadIdx.x),
             rows_of_block = static_cast<int>(blockDim.x) / 32 / Columns::kWarps;
  const int column = thread % (32 * Columns::kWarps) * Columns::kCount;
  const int* holders = workspace.starts + shape.entries + 1;
  for (auto index = static_cast<int>(blockIdx.x); index < shape.entries; index += gridDim.x) {
    if (shape.counted_strips && holders[shape.by_kv_heads.divide(index)] < 0) return;  // no gaps
    const DecodeEntry entry = DecodeEntry::of(params, shape, index, holders);
    const int first = blockIdx.y * rows_at_once + thread / (32 * Columns::kWarps);
    const int end = min(entry.rows, static_cast<int>(blockIdx.y + 1) * rows_at_once);
    if (first >= end) continue;
    const CountedEntry counted =
        counts ? CountedEntry::count(params, shape, entry) : CountedEntry::read(shape, workspace, index);
    CombiningWarp<kHeadSize> self(shape, workspace, entry.tiles, counted.cut, counted.snaps, counted.start,
                                  index);
    if (self.is_stored()) continue;
    self.find_places(self.first_round());
    wait_for_previous_kernel();
    for (int row = first; row < end; row += rows_of_block) {
      SoftmaxState state;
      const auto sums = self.combine(state, row, column);
      store_columns<Element, kHeadSize>(params, shape, entry, row, column, state, sums);
    }
  }
  if (is_first_block()) wait_for_previous_kernel();
}

}  // namespace ortolan::cuda
