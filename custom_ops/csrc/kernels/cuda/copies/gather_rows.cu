// GatherRows: copies rows by their indices, byte for byte. The indices are read on the device.
//
// Grid: (pieces of a row / threads, gathered rows). Its launch overlaps those of its neighbours, so that the
// weights of the head stream while the last layer still runs. An index outside the rows gives zeros: nothing
// outside the input is read.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"
#include "kernels/cuda/operators.generated.h"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;

// Piece: the elements that a thread moves.
template <typename Piece>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const GatherRowsParams p, int64_t pieces) {
  launch_dependents();
  const int64_t piece = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  if (piece >= pieces) return;
  for (int64_t r = blockIdx.y; r < p.num_indices; r += gridDim.y) {
    const int64_t row = p.row_indices[r];
    const bool exists = row >= 0 && row < p.num_rows;
    static_cast<Piece*>(p.output)[r * pieces + piece] =
        exists ? static_cast<const Piece*>(p.rows)[row * pieces + piece] : Piece{};
  }
}

template <typename Piece>
cudaError_t launch_pieces(const GatherRowsParams& p, int64_t row_bytes, const Launch& launch) {
  constexpr int64_t kMaxGridY = 65535;
  const int64_t pieces = row_bytes / static_cast<int64_t>(sizeof(Piece));
  const dim3 grid(static_cast<unsigned>(divide_up(pieces, kThreads)),
                  static_cast<unsigned>(p.num_indices < kMaxGridY ? p.num_indices : kMaxGridY));
  return launch_overlapped(gather_rows_kernel<Piece>, grid, dim3(kThreads), 0, launch, p, pieces);
}

}  // namespace

cudaError_t gather_rows(const GatherRowsParams& p, const Launch& launch) {
  const int64_t row_bytes = p.row_size * element_bytes(p.element);
  if (p.num_indices == 0 || row_bytes == 0) return cudaSuccess;
  return has_whole_pieces(row_bytes, {p.rows, p.output}) ? launch_pieces<uint4>(p, row_bytes, launch)
                                                         : launch_pieces<uint16_t>(p, row_bytes, launch);
}

}  // namespace ortolan::cuda
