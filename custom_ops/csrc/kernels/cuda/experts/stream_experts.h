// Which experts of low-bit weights stream.cuh and bytes.cuh take.
#pragma once

#include "instances.h"
#include "kernels/cuda/low_bit/stream_layers.h"

namespace ortolan::cuda {

// One of the two products of expert 0.
inline LowBitLinearParams expert_layer(const LowBitExpertsParams& p, bool gated) {
  LowBitLinearParams layer;
  layer.element = p.element;
  layer.num_outputs = gated ? p.inner_size : p.hidden_size;
  layer.num_inputs = gated ? p.hidden_size : p.inner_size;
  layer.weight = gated ? p.gate_up.first : p.down.first;
  layer.activation = gated ? p.activation : GatedActivation::kNone;
  layer.input = gated ? p.x : nullptr;
  return layer;
}

inline bool takes_expert_stream(const LowBitExpertsParams& p, const Device& device) {
  return p.inner_size > 0 && takes_low_bit_stream(expert_layer(p, true), device) &&
         takes_low_bit_stream(expert_layer(p, false), device) && has_whole_pieces(0, {p.residual, p.y});
}

// Of what streams: codes of 4 bits, as long as most experts have a pair or two. Zero points of short groups
// are rare.
inline bool takes_expert_bytes(const LowBitExpertsParams& p) {
  constexpr int64_t kMostTiles = 1 << 22;  // times the blocks of a launch they have 32 bits
  const auto takes = [](const LowBitWeight& w) {
    return w.format == LowBitFormat::kMxfp4 ||
           (w.format == LowBitFormat::kInt4 && !(w.zero_points && has_short_groups(w)));
  };
  const int64_t pairs = p.num_tokens * p.top_k;
  return takes(p.gate_up.first) && takes(p.down.first) && 2 * pairs <= 3 * p.num_experts &&
         pairs * (p.hidden_size + p.inner_size) / 8 < kMostTiles;
}

template <typename Element>
cudaError_t launch_expert_bytes(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool is_shared,
                                const Launch& launch);
template <typename Element>
cudaError_t launch_expert_streams(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool is_shared,
                                  const Launch& launch);

}  // namespace ortolan::cuda
