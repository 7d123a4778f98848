// A low-bit layer as the dense one that it stands for.
#pragma once

#include "kernels/low_bit_params.h"

namespace ortolan::cuda {

// All but the weight.
inline FusedLinearParams dense_params(const LowBitLinearParams& p) {
  FusedLinearParams dense;
  dense.element = p.element;
  dense.num_tokens = p.num_tokens;
  dense.num_outputs = p.num_outputs;
  dense.num_inputs = p.num_inputs;
  dense.input = p.input;
  dense.norm_weight = p.norm_weight;
  dense.epsilon = p.epsilon;
  dense.bias = p.bias;
  dense.residual = p.residual;
  dense.activation = p.activation;
  dense.output_float32 = p.output_float32;
  dense.output = p.output;
  dense.cublas = p.cublas;
  return dense;
}

}  // namespace ortolan::cuda
