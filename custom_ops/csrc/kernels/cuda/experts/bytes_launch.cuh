// Host side of bytes.cuh: how its blocks share two products.
#pragma once

#include <algorithm>

#include "bytes.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/low_bit/stream_kinds.cuh"

namespace ortolan::cuda {

// Which warps share a tile: as many as leave the fewest of a block's eight without a slice.
inline void share_slices(ByteExpertPlan& plan) {
  int least = plan.slices + ByteExpertPlan::kMostWarps;
  for (int span = ByteExpertPlan::kMostWarps; span > 0; span /= 2)
    if (const int rounds = (plan.slices + span - 1) / span; rounds * span < least) {
      least = rounds * span;
      plan.rounds = rounds;
      plan.span = span;
      plan.teams = ByteExpertPlan::kMostWarps / span;
    }
}

// All but what depends on the pairs.
inline ByteExpertPlan plan_expert_bytes(const LowBitExpertsParams& p, bool gated) {
  const LowBitWeight& w = gated ? p.gate_up.first : p.down.first;
  const int64_t outputs = gated ? p.inner_size : p.hidden_size, groups = w.groups();
  const int64_t columns = ByteExpertPlan::kColumns, group = groups > 1 ? w.group_size : w.columns;
  ByteExpertPlan plan{};
  plan.outputs_shift = gated ? 3 : 4;  // both sizes are multiples of 32
  plan.outputs = 1 << plan.outputs_shift;
  plan.later_row = gated ? static_cast<int>(outputs) : 8;
  plan.tiles = static_cast<int>(outputs) / plan.outputs;
  plan.slices = static_cast<int>(divide_up(w.columns, columns));
  share_slices(plan);
  plan.row_bytes = static_cast<int>(w.columns / 2);
  plan.later_bytes = int64_t{plan.later_row} * plan.row_bytes;
  plan.scale_row_bytes = static_cast<int>(groups * (w.format == LowBitFormat::kMxfp4 ? 1 : 2));
  plan.zero_row_bytes = static_cast<int>(divide_up(groups, 2));
  const bool is_short = w.format == LowBitFormat::kMxfp4 || (groups > 1 && group < columns);
  plan.slice_groups = is_short ? static_cast<int>(columns / w.group_size) : 1;
  plan.piece_shift = is_short ? log2_of(w.group_size / 32) : 3;
  plan.group_shift = is_short ? 0 : groups == 1 ? 31 : log2_of(group / columns);
  return plan;
}

// Plans blocks of which a multiprocessor holds `resident`, with at most `depth` units of a warp on their way.
// False where it does not hold them.
inline bool plan_expert_blocks(ByteExpertPlan& plan, int resident, int depth, const Device& device) {
  constexpr int kReservedBytes = 1024;  // of a block
  constexpr int kTurnBytes = 8192;      // of parts, about
  const int limit = device.shared_bytes_per_block + kReservedBytes;
  const int team_bytes = plan.warps() * plan.pairs * ByteExpertPlan::kLines * 4;
  plan.turn_tiles = plan.teams * std::clamp(kTurnBytes / team_bytes, 1, 8);
  for (plan.depth = depth; plan.depth > 1; --plan.depth)
    if (resident * (ByteExpertLayout(plan).bytes + kReservedBytes) <= limit) return true;
  return false;
}

// Blocks, or 0 where they have too little shared memory. The second product's ring fills while the first one
// ends. The first product has a shorter one: it would wait for all of it, which it asks for at once.
inline int64_t share_expert_bytes(ByteExpertParams& p, const Device& device) {
  const int64_t pairs = p.step.num_tokens * p.step.top_k;
  const int64_t slots = p.is_shared ? std::min(pairs, p.step.num_experts) : pairs;
  const int64_t tiles = slots * p.plan.tiles;
  const int depth = p.gated ? 2 : ByteExpertPlan::kMostDepth;
  for (p.plan.pairs = p.is_shared ? ByteExpertPlan::kMostPairs : 1; p.plan.pairs > 0; p.plan.pairs /= 2) {
    const bool fits_twice = plan_expert_blocks(p.plan, 2, depth, device);
    if (!fits_twice && (p.plan.pairs > 1 || !plan_expert_blocks(p.plan, 1, depth, device))) continue;
    const int64_t most = int64_t{fits_twice ? 2 : 1} * device.num_multiprocessors;
    // No block takes tiles of two pairs, where there are enough blocks.
    return std::min(tiles, p.is_shared || slots > most ? most : most / slots * slots);
  }
  return 0;
}

// One of the two products.
template <typename Kind>
cudaError_t launch_byte_product(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool gated,
                                bool is_shared, const Launch& launch) {
  constexpr auto kKernel = expert_bytes_kernel<Kind>;
  const StackedWeight& weights = gated ? p.gate_up : p.down;
  const auto outputs = static_cast<int>(gated ? p.inner_size : p.hidden_size);
  ByteExpertParams params{weights,
                          p,
                          scratch,
                          plan_expert_bytes(p, gated),
                          outputs,
                          static_cast<int>(weights.first.columns),
                          1.0f / static_cast<float>(p.top_k),
                          gated,
                          is_shared};
  params.plan.line_words = Kind::kScaleWords + Kind::kZeroWords;
  const int64_t blocks = share_expert_bytes(params, launch.device);
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared_memory<kKernel>(launch.device); error != cudaSuccess)
    return error;
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)),
                           dim3(static_cast<unsigned>(32 * params.plan.warps())),
                           static_cast<size_t>(ByteExpertLayout(params.plan).bytes), launch, params);
}

// Calls f.operator()<ByteKind<...>>() for the kind of a weight.
template <typename Element, typename Function>
cudaError_t with_byte_kind(const LowBitWeight& w, Function&& f) {
  constexpr auto kInt4 = LowBitFormat::kInt4;
  if (w.format == LowBitFormat::kMxfp4)
    return f.template operator()<ByteKind<Element, LowBitFormat::kMxfp4, false, true>>();
  if (has_short_groups(w)) return f.template operator()<ByteKind<Element, kInt4, false, true>>();
  return w.zero_points ? f.template operator()<ByteKind<Element, kInt4, true, false>>()
                       : f.template operator()<ByteKind<Element, kInt4, false, false>>();
}

template <typename Element>
cudaError_t launch_expert_bytes(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool is_shared,
                                const Launch& launch) {
  for (const bool gated : {true, false}) {
    const LowBitWeight& first = gated ? p.gate_up.first : p.down.first;
    const cudaError_t error = with_byte_kind<Element>(first, [&]<typename Kind>() {
      return launch_byte_product<Kind>(p, scratch, gated, is_shared, launch);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ortolan::cuda
