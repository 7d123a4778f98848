// Launches the kernels of the gated delta rule by chunks, round after round.
#pragma once

#include "delta_prepare.cuh"
#include "delta_scan.cuh"
#include "instances.h"
#include "kernels/cuda/common/launch.cuh"

namespace ortolan::cuda {

template <typename Element, int kKeySize>
cudaError_t launch_chunks_of(const GatedDeltaRuleParams& p, const Launch& launch) {
  constexpr auto kPrepare = prepare_chunks<Element, kKeySize>;
  constexpr auto kScan = scan_chunks<Element, kKeySize>;
  constexpr size_t kStage = sizeof(ScanStage<Element, kKeySize>);
  constexpr size_t kShared = sizeof(ScanShared<Element, kKeySize>);
  cudaError_t error = allow_shared_memory<kPrepare>(launch.device);
  if (error == cudaSuccess) error = allow_shared_memory<kScan>(launch.device);
  const auto limit = static_cast<size_t>(launch.device.shared_bytes_per_block);
  const int stages = kShared + 2 * kStage <= limit ? 2 : 1;
  const auto heads = static_cast<unsigned>(p.num_value_heads);
  const int64_t bytes = ChunkScratch<Element>::bytes(p) * p.num_value_heads;
  const int64_t in_round = static_cast<int64_t>(launch.workspace_bytes) / bytes;
  const int64_t numbers = count_chunks(p);
  for (int64_t first = 0; error == cudaSuccess && first < numbers; first += in_round) {
    const ChunkRound round{first, in_round < numbers - first ? in_round : numbers - first};
    error =
        launch_overlapped(kPrepare, dim3(heads, static_cast<unsigned>(round.count)), dim3(kPrepareThreads),
                          sizeof(PrepareShared<Element, kKeySize>), launch, p, round, launch.workspace);
    if (error != cudaSuccess) break;
    const dim3 grid(static_cast<unsigned>(p.value_size / kScanColumns), heads,
                    static_cast<unsigned>(p.packing.num_sequences));
    error = launch_overlapped(kScan, grid, dim3(kScanThreads), kShared + stages * kStage, launch, p, round,
                              launch.workspace, stages);
  }
  return error;
}

template <typename Element>
cudaError_t launch_delta_chunks(const GatedDeltaRuleParams& p, const Launch& launch) {
  switch (p.key_size) {
    case 64:
      return launch_chunks_of<Element, 64>(p, launch);
    case 96:
      return launch_chunks_of<Element, 96>(p, launch);
    default:
      return launch_chunks_of<Element, 128>(p, launch);
  }
}

}  // namespace ortolan::cuda
