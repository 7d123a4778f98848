// What stands between products, on the CPU: RmsNormAdd, GateMul and DeltaGates. A task is a token, whose
// result does not depend on the others.
#pragma once

#include "aligned_floats.h"
#include "kernels/cpu/operators.generated.h"
#include "lanes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

// row *= factor * weight.
template <typename Element>
void scale_row(float* row, int64_t size, float factor, const Element* weight) {
  for (int64_t i = 0; i < size; i += kLanes)
    store_part(load_part(row + i, size - i) * factor * load_part(weight + i, size - i), size - i, row + i);
}

template <typename Element>
void normalise_row(const RmsNormAddParams& p, int64_t token) {
  const int64_t size = p.row_size, first = token * size;
  const AlignedFloats buffer = aligned_floats(size);
  float* row = buffer.get();
  load_floats(static_cast<const Element*>(p.x) + first, size, row);
  scale_row(row, size, inverse_root_mean_square(row, size, p.epsilon),
            static_cast<const Element*>(p.norm_weight));
  const auto* residual = static_cast<const Element*>(p.residual);
  const float scale = p.scale ? to_float(*static_cast<const Element*>(p.scale)) : 1.0f;
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec y = load_part(row + i, size - i);
    if (residual) y = load_part(residual + first + i, size - i) + y;
    store_part(y * scale, size - i, static_cast<Element*>(p.y) + first + i);
  }
}

inline float softplus(float x) { return std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

inline Vec opened(GateActivation activation, Vec gate) {
  switch (activation) {
    case GateActivation::kSilu:
      return silu(gate);
    case GateActivation::kSigmoid:
      return sigmoid(gate);
    case GateActivation::kSoftplus:
      return each_lane(gate, [](float x) { return x == x ? softplus(x) : x; });
    case GateActivation::kGelu:
      return gelu(gate);
    default:
      return gelu_tanh(gate);
  }
}

// row *= the opened gates, each for `columns` of its elements.
template <typename Element>
void gate_row(const GateMulParams& p, const Element* gates, float* row) {
  const int64_t count = p.size / p.gate_columns;
  for (int64_t g = 0; g < count; g += kLanes) {
    const Vec gate = opened(p.activation, load_part(gates + g, count - g));
    if (p.gate_columns == 1) {
      store_part(load_part(row + g, count - g) * gate, count - g, row + g);
      continue;
    }
    for (int64_t i = g; i < std::min(g + kLanes, count); ++i) {
      float* group = row + i * p.gate_columns;
      for (int64_t c = 0; c < p.gate_columns; ++c) group[c] *= gate[i - g];
    }
  }
}

template <typename Element>
void gate_token(const GateMulParams& p, int64_t token) {
  const AlignedFloats buffer = aligned_floats(p.size);
  float* row = buffer.get();
  load_floats(static_cast<const Element*>(p.x) + token * p.x_stride, p.size, row);
  for (int64_t i = 0; i < p.size && p.norm_weight; i += p.norm_size)
    scale_row(row + i, p.norm_size, inverse_root_mean_square(row + i, p.norm_size, p.epsilon),
              static_cast<const Element*>(p.norm_weight));
  gate_row(p, static_cast<const Element*>(p.gate) + token * p.gate_stride, row);
  const int64_t first = token * p.size;
  const auto* residual = static_cast<const Element*>(p.residual);
  for (int64_t i = 0; i < p.size; i += kLanes) {
    Vec y = load_part(row + i, p.size - i);
    if (residual) y = load_part(residual + first + i, p.size - i) + y;
    store_part(y, p.size - i, static_cast<Element*>(p.y) + first + i);
  }
}

template <typename Element>
void delta_gates_of_token(const DeltaGatesParams& p, int64_t token) {
  const auto* decays = static_cast<const Element*>(p.decay_rows) + token * p.decay_stride;
  const auto* betas = static_cast<const Element*>(p.beta_rows) + token * p.beta_stride;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const float rate = std::exp(to_float(static_cast<const Element*>(p.a_log)[h]));
    const float given = to_float(decays[h]) + to_float(static_cast<const Element*>(p.dt_bias)[h]);
    const int64_t place = token * p.num_heads + h;
    p.decay[place] = -rate * (given == given ? softplus(given) : given);
    p.beta[place] = p.beta_scale / (1.0f + std::exp(-to_float(betas[h])));
  }
}

inline void rms_norm_add(const RmsNormAddParams& p, ParallelFor& parallel) {
  const bool is_half = p.element == ElementType::kFloat16;
  parallel.each(p.num_tokens, [&](int64_t token) {
    is_half ? normalise_row<Half>(p, token) : normalise_row<float>(p, token);
  });
}

inline void gate_mul(const GateMulParams& p, ParallelFor& parallel) {
  const bool is_half = p.element == ElementType::kFloat16;
  parallel.each(p.num_tokens,
                [&](int64_t token) { is_half ? gate_token<Half>(p, token) : gate_token<float>(p, token); });
}

inline void delta_gates(const DeltaGatesParams& p, ParallelFor& parallel) {
  const bool is_half = p.element == ElementType::kFloat16;
  parallel.each(p.num_tokens, [&](int64_t token) {
    is_half ? delta_gates_of_token<Half>(p, token) : delta_gates_of_token<float>(p, token);
  });
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
