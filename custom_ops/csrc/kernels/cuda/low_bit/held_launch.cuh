// Host side of held.cuh: how its blocks share a layer.
#pragma once

#include <algorithm>

#include "held.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_maps.h"
#include "stream_kinds.cuh"

namespace ortolan::cuda {

// All but the blocks and stages.
template <typename Kind>
HeldPlan plan_held(const LowBitLinearParams& p) {
  const LowBitPlan steps = plan_low_bit(p);
  HeldPlan plan{};
  plan.gated = p.activation != GatedActivation::kNone;
  plan.tiles = steps.tiles;
  plan.row_bytes = steps.row_bytes;
  plan.units = static_cast<int>(divide_up(plan.row_bytes, HeldPlan::kRowBytes));
  plan.scale_row_bytes = steps.scale_row_bytes;
  plan.zero_row_bytes = steps.zero_row_bytes;
  plan.scale_rows_shift = steps.scale_rows_shift;
  plan.step_groups = steps.step_groups;
  plan.group_steps_shift = steps.group_steps_shift;
  plan.input_share = 1.0f / static_cast<float>(p.num_inputs);
  plan.wide_outputs =
      p.num_outputs % 4 == 0 &&
      (reinterpret_cast<uintptr_t>(p.output) | reinterpret_cast<uintptr_t>(p.residual)) % 8 == 0;
  return plan;
}

// Shares the columns among the warps of a cluster's blocks. False where there are too many.
template <typename Kind>
bool share_held_columns(HeldPlan& plan, const LowBitWeight& w, int multiprocessors) {
  constexpr int kUnits = HeldProducts<Kind>::kUnits;
  const auto warps = static_cast<int>(divide_up(plan.units, kUnits));
  for (plan.cluster = 1; divide_up(warps, plan.cluster) > HeldPlan::kMostWarps; plan.cluster *= 2)
    if (plan.cluster == 8) return false;
  plan.span = static_cast<int>(divide_up(warps, plan.cluster));
  plan.teams = 1;
  if (plan.cluster == 1)  // where there are tiles for all blocks
    plan.teams = std::clamp(plan.tiles / multiprocessors, 1, HeldPlan::kMostWarps / plan.span);
  // Groups of a stage, and where they may begin.
  const int steps = 2 * plan.span, shift = plan.group_steps_shift;
  const int groups = shift == 0 ? steps * plan.step_groups : shift < 31 ? ((steps - 1) >> shift) + 2 : 1;
  const int scales = groups * Kind::kScaleBytes;
  const int zeros = Kind::kFormat == LowBitFormat::kInt4 ? groups / 2 + 1 : groups;
  const bool in_one = plan.cluster * kUnits == 1;  // all stages begin with a line
  plan.copy_bytes = plan.scale_row_bytes % 16 == 0 && (in_one || (shift == 0 && scales % 16 == 0)) &&
                            !Kind::kZeros && reinterpret_cast<uintptr_t>(Kind::scales(w)) % 16 == 0
                        ? 16
                        : 4;
  const auto reserved = [&](int bytes) {
    return (bytes + (plan.copy_bytes == 16 ? 15 : 6)) / plan.copy_bytes * plan.copy_bytes;
  };
  plan.scale_bytes = reserved(scales);
  plan.zero_bytes = Kind::kZeros ? reserved(zeros) : 0;
  plan.line_bytes = ((plan.scale_bytes + plan.zero_bytes) / plan.copy_bytes | 1) * plan.copy_bytes;
  return true;
}

template <typename Kind>
bool launch_held_kind(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                      cudaError_t& error) {
  constexpr auto kKernel = low_bit_held_kernel<Kind>;
  HeldParams params{dense_params(p), p.weight, plan_held<Kind>(p), pass, {}};
  HeldPlan& plan = params.plan;
  if (launch.device.compute_capability != 90 ||
      !share_held_columns<Kind>(plan, p.weight, launch.device.num_multiprocessors))
    return false;
  const int limit = launch.device.shared_bytes_per_block;
  error = allow_shared_memory<kKernel>(launch.device);
  if (error == cudaSuccess)
    error =
        make_tensor_map(params.codes, p.element, p.weight.codes,
                        TensorShape{plan.row_bytes / 2, p.num_outputs, plan.gated ? 2 : 1},
                        TensorShape{HeldPlan::kRowBytes / 2, plan.gated ? 8 : 16, plan.gated ? 2 : 1}, true);
  if (error != cudaSuccess) return true;
  plan.clusters = launch.device.num_multiprocessors;
  if (plan.cluster > 1)
    plan.clusters =
        std::max(resident_clusters<kKernel>(dim3(HeldPlan::kThreads), plan.cluster, limit, launch.device), 1);
  plan.clusters = std::min(plan.clusters, static_cast<int>(divide_up(plan.tiles, plan.teams)));
  plan.stages = HeldPlan::kMostStages;
  while (plan.stages > 2 && HeldLayout(plan).bytes > limit) --plan.stages;
  const int bytes = HeldLayout(plan).bytes;
  if (bytes > limit) return false;
  error = launch_clusters(kKernel, dim3(static_cast<unsigned>(plan.clusters * plan.cluster)),
                          dim3(HeldPlan::kThreads), plan.cluster, static_cast<size_t>(bytes), launch, params);
  return true;
}

template <typename Element>
bool launch_low_bit_held(const LowBitLinearParams& p, const GemvPass& pass, const Launch& launch,
                         cudaError_t& error) {
  bool launched = false;
  error = with_low_bit_kind<Element>(p.weight, [&]<typename Kind>() {
    cudaError_t result = cudaSuccess;
    launched = launch_held_kind<Kind>(p, pass, launch, result);
    return result;
  });
  return launched;
}

}  // namespace ortolan::cuda
