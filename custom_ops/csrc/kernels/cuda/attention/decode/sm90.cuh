// Decode attention for sm_90a: one to a few tokens of a sequence against all of its keys, by wgmma.
//
// Grid: one block per multiprocessor, or clusters of one sequence; plan.cuh says which key tiles each takes.
// All query rows (token, head of the group) of an entry, up to 64, are the rows of one product, so that keys
// and values are read once for them. One warp loads through the tensor unit, one or two warpgroups multiply.
// A tile's logits are brought to the tile's own maximum, tiles are merged into spans in registers, spans by
// the combine kernel: the order of sums is fixed by key position alone, and equal for any number of rows.
// Source of the split over keys: Dao et al., Flash-Decoding (2023); of the packed heads: FlashAttention.
#pragma once

#include "cluster.cuh"
#include "prefetch.cuh"
#include "sm90_few_rows.cuh"
#include "sm90_load.cuh"
#include "sm90_rows.cuh"

namespace ortolan::cuda {

// A block's piece of a line, by the trade of each warp. Each warpgroup takes the branch of its registers.
template <typename Rows, bool kCombines, typename Line>
__device__ __forceinline__ void sum_piece_sm90(const SwaAttentionParams& params, const DecodeShape& shape,
                                               const DecodeWorkspace& workspace, const Sm90DecodeMaps& maps,
                                               unsigned char* memory, const Line& line) {
  using Shape = typename Rows::Shape;
  const auto block = static_cast<int>(blockIdx.x);
  const int begin = snapped_begin(params, shape, line, block);
  const int end = snapped_begin(params, shape, line, block + 1);
  __syncwarp();
  const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // known to be uniform
  if (number < 8) {
    raise_registers<Shape::kComputeRegisters>();
    const int stream = Shape::kGroups == 1 ? number / 4 : 0, group = Shape::kGroups == 1 ? 0 : number / 4;
    if (stream < shape.streams) {
      const Sm90DecodeShared shared = Sm90DecodeShared::of<Shape>(memory, shape, stream);
      Rows rows{params,
                shape,
                workspace,
                shared,
                Logits::of(params.scale, params.softcap),
                stream,
                group,
                static_cast<int>(threadIdx.x) % 128};
      rows.run(line, begin, end);
    }
    __syncwarp();
    if constexpr (kCombines) lower_registers<Shape::kEvenRegisters>();
  } else {
    lower_registers<Shape::kLoadRegisters>();
    if (number - 8 < shape.streams) {
      const Sm90DecodeShared shared = Sm90DecodeShared::of<Shape>(memory, shape, number - 8);
      const Sm90DecodeLoad<typename Rows::Element, Shape> self{params, shape, maps, shared,
                                                               static_cast<int>(threadIdx.x) % 32};
      self.run(line, begin, end, number - 8);
    }
    // All that load, so that no weights of the layers behind come in these tiles' way.
    sync_warps<128>(5);
    launch_dependents();
    // Where the block goes on to combine, all of its threads need registers again.
    if constexpr (kCombines) raise_registers<Shape::kEvenRegisters>();
  }
}

// `kClusters`: of shape.cluster blocks, one per entry; else the combine kernel comes after this one.
template <typename Rows, bool kClusters>
__global__ void __launch_bounds__(Rows::Shape::kThreads, 1)
    sm90_decode_kernel(const __grid_constant__ SwaAttentionParams params,
                       const __grid_constant__ DecodeShape shape,
                       const __grid_constant__ DecodeWorkspace workspace,
                       const __grid_constant__ Sm90DecodeMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = typename Rows::Shape;
  extern __shared__ __align__(128) unsigned char memory[];
  const Sm90DecodeShared first = Sm90DecodeShared::of<Shape>(memory, shape, 0);
  if (threadIdx.x < shape.streams * 2 * shape.stages) {
    const bool is_empty = threadIdx.x / shape.stages % 2;
    first.full[threadIdx.x].init(is_empty ? Shape::kGroups * 4 : 1);
    fence_async_proxy();
  }
  __syncthreads();
  if (shape.guesses) prefetch_first_tile<sizeof(typename Rows::Element)>(params, shape);
  wait_for_previous_kernel();

  if constexpr (kClusters) {
    const ClusterLine line(params, shape, static_cast<int>(blockIdx.x) / shape.cluster);
    sum_piece_sm90<Rows, true>(params, shape, workspace, maps, memory, line);
    combine_cluster<typename Rows::Element, Shape::kHeadSize>(params, shape, workspace, line, first.memory);
  } else {
    int* starts = Sm90DecodeShared::starts<Shape>(memory, shape);
    const int strips = count_tiles(params, shape, starts);
    if (blockIdx.x == 0) store_counts(shape, workspace, starts, strips);
    sum_piece_sm90<Rows, false>(params, shape, workspace, maps, memory, DecodeLine(starts, shape));
  }
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
