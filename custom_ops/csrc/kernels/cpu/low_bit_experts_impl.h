// LowBitExperts on the CPU: MoeExperts's two passes, over codes.
#pragma once

#include "kernels/low_bit_expert_params.h"
#include "low_bit_codes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

// A weight of each expert, in codes.
template <typename Element>
struct CodeStack {
  StackedWeight weights;

  int64_t row_floats() const { return input_floats(weights.first); }
  int64_t place(int64_t column) const { return input_place(weights.first, column); }
  void place(const float* source, int64_t count, float* target) const {
    place_input(weights.first, source, count, target);
    finish(target);
  }
  bool finishes() const { return takes_rounded(weights.first); }
  void finish(float* row) const {
    if (finishes()) round_inputs(weights.first, row, row);
  }

  template <typename Store>
  void multiply(int64_t expert, int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    const LowBitWeight weight = weights.of(expert);
    multiply_codes<Element>(weight, first, count, inputs, store);
  }
};

template <typename Element>
void run_low_bit_experts(const LowBitExpertsParams& p, ParallelFor& parallel) {
  using Stack = CodeStack<Element>;
  ExpertLayer<Element, Stack>(p, Stack{p.gate_up}, Stack{p.down}).run(parallel);
}

inline void low_bit_experts(const LowBitExpertsParams& p, ParallelFor& parallel) {
  if (p.element == ElementType::kFloat32) return run_low_bit_experts<float>(p, parallel);
  run_low_bit_experts<Half>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
