// Grid: (pieces of a row / threads, sequences). Its launch overlaps those of its neighbours, so that the
// weights of the head stream while the last layer still runs.
#include "gather_rows.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/row_vectors.cuh"

namespace ortolan::cuda {
namespace {

constexpr int kThreads = 128;

// Piece: the elements that a thread moves.
template <typename Piece>
__global__ void __launch_bounds__(kThreads) last_rows_kernel(const LastRowsParams p) {
  launch_dependents();
  const int64_t pieces = p.row_bytes / static_cast<int64_t>(sizeof(Piece));
  const int64_t piece = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  if (piece >= pieces) return;
  for (int64_t sequence = blockIdx.y; sequence < p.num_sequences; sequence += gridDim.y) {
    const int64_t first = p.query_start[sequence], end = p.query_start[sequence + 1];
    const bool has_rows = first < end && end <= p.num_tokens;
    static_cast<Piece*>(p.output)[sequence * pieces + piece] =
        has_rows ? static_cast<const Piece*>(p.input)[(end - 1) * pieces + piece] : Piece{};
  }
}

template <typename Piece>
cudaError_t launch_pieces(const LastRowsParams& p, const Launch& launch) {
  constexpr int64_t kMaxGridY = 65535;
  const int64_t pieces = p.row_bytes / static_cast<int64_t>(sizeof(Piece));
  const dim3 grid(static_cast<unsigned>(divide_up(pieces, kThreads)),
                  static_cast<unsigned>(p.num_sequences < kMaxGridY ? p.num_sequences : kMaxGridY));
  return launch_overlapped(last_rows_kernel<Piece>, grid, dim3(kThreads), 0, launch, p);
}

}  // namespace

cudaError_t last_rows(const LastRowsParams& p, const Launch& launch) {
  if (p.num_sequences == 0 || p.row_bytes == 0) return cudaSuccess;
  const auto bits = static_cast<uint64_t>(p.row_bytes) | reinterpret_cast<uint64_t>(p.input) |
                    reinterpret_cast<uint64_t>(p.output);
  return bits % sizeof(uint4) == 0 ? launch_pieces<uint4>(p, launch) : launch_pieces<uint16_t>(p, launch);
}

}  // namespace ortolan::cuda
