// Decode attention for sm_90a: one to a few tokens of a sequence against all of its keys, by wgmma.
//
// Grid: one block per multiprocessor; plan.cuh says which key tiles each takes. All query rows (token, head
// of the group) of an entry, up to 64, are the columns of one product, so that keys and values are read once
// for them. One warp loads through the tensor unit, two warpgroups multiply: of heads of up to 256 elements
// each has tiles or rows of its own (sm90_few_rows.cuh), of longer ones columns (sm90_wide_rows.cuh). The
// order of sums is fixed by key position alone, and equal for any number of rows. Source of the split over
// keys: Dao et al., Flash-Decoding (2023); of the packed heads: FlashAttention.
#pragma once

#include "prefetch.cuh"
#include "sm90_few_rows.cuh"
#include "sm90_load.cuh"
#include "sm90_wide_rows.cuh"

namespace ortolan::cuda {

// A block's piece of a line, by the trade of each warp. Each warpgroup takes the branch of its registers.
template <typename Rows>
__device__ __forceinline__ void sum_piece_sm90(const SwaAttentionParams& params, const DecodeShape& shape,
                                               const DecodeWorkspace& workspace, const Sm90DecodeMaps& maps,
                                               const Sm90DecodeShared& shared, const DecodeLine& line) {
  using Shape = typename Rows::Shape;
  const auto block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  int begin = 0, end = 0;
#pragma unroll 1  // so that the code is fetched once
  for (int next = block; next <= block + 1; ++next) {
    begin = end;
    end = snapped_begin(params, shape, line, next);
  }
  __syncwarp();
  const int warp = __shfl_sync(~0u, thread / 32, 0);  // known to be uniform
  if (warp < 8) {
    raise_registers<kSm90ComputeRegisters>();
    Rows rows{params,   shape,       workspace, shared, Logits::of(params.scale, params.softcap),
              warp / 4, thread % 128};
    if (begin < end) rows.run(end - begin, line.entry_of(begin + warp / 4 % Shape::kTileStep));
  } else {
    lower_registers<kSm90LoadRegisters>();
    if (warp == 8)
      Sm90DecodeLoad<typename Rows::Element, Shape>{params, shape, workspace, maps, shared, thread % 32}.run(
          line, begin, end);
    // All that load, so that no weights of the layers behind come in these tiles' way.
    sync_warps<128>(5);
    launch_dependents();
  }
}

// The combine kernel comes after this one.
template <typename Rows>
__global__ void __launch_bounds__(kSm90DecodeThreads, 1)
    sm90_decode_kernel(const __grid_constant__ SwaAttentionParams params,
                       const __grid_constant__ DecodeShape shape,
                       const __grid_constant__ DecodeWorkspace workspace,
                       const __grid_constant__ Sm90DecodeMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = typename Rows::Shape;
  extern __shared__ __align__(128) unsigned char memory[];
  if (is_in_vain(params, shape)) return;
  const Sm90DecodeShared shared = Sm90DecodeShared::of<Shape>(memory, shape);
  constexpr int kReaders = 4 * Shape::kRowParts;  // warps, of a buffer
  if (threadIdx.x < 2 * shape.stages + Sm90DecodeShared::kTurns) {
    const bool is_empty = shape.stages <= threadIdx.x && threadIdx.x < 2 * shape.stages;
    shared.full[threadIdx.x].init(is_empty ? kReaders : 1);
    fence_async_proxy();
  }
  __syncthreads();
  if (shape.guesses) prefetch_first_tile<sizeof(typename Rows::Element)>(params, shape);
  int* starts = shared.starts(shape);
  const CountedTiles counted = count_and_wait(params, shape, starts);
  if (blockIdx.x == 0) store_counts(shape, workspace, starts, counted);
  sum_piece_sm90<Rows>(params, shape, workspace, maps, shared, DecodeLine(starts, shape, counted.cut));
#else
  refuse_architecture();
#endif
}

}  // namespace ortolan::cuda
