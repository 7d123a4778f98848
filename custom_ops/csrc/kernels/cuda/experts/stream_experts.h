// Which experts of low-bit weights stream.cuh takes.
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

template <typename Element>
cudaError_t launch_expert_streams(const LowBitExpertsParams& p, const ExpertScratch& scratch, bool is_shared,
                                  const Launch& launch);

}  // namespace ortolan::cuda
