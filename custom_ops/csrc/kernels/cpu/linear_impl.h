// FusedLinear and LowBitLinear on the CPU. A task is a block of rows of the weight, which it reads once for
// all tokens. A product has one order of sums, whatever the other tokens.
#pragma once

#include "kernels/fused_params.h"
#include "kernels/low_bit_rows.h"
#include "kernels/row_scale.h"
#include "lanes.h"
#include "low_bit_codes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

// A weight [rows, columns] of the element type.
template <typename Element>
struct DenseWeight {
  const Element* elements;
  int64_t columns;

  template <typename Store>
  void multiply(int64_t first, int64_t count, const InputRows& inputs, Store store) const {
    std::unique_ptr<float[]> buffer(std::is_same_v<Element, float> ? nullptr : new float[kDotRows * columns]);
    multiply_rows(elements + first * columns, count, columns, inputs, buffer.get(), store);
  }
};

template <typename Element>
int64_t input_floats(const DenseWeight<Element>& w) {
  return w.columns;
}
template <typename Element>
bool takes_rounded(const DenseWeight<Element>&) {
  return false;
}
template <typename Element>
void round_inputs(const DenseWeight<Element>&, const float*, float*) {}
template <typename Element>
void place_input(const DenseWeight<Element>&, const float* source, int64_t count, float* target) {
  std::memcpy(target, source, count * sizeof(float));
}

// Rounds a row of inputs of one scale to what e4m3 codes stand for.
inline void round_to_fp8(float* values, int64_t count, float given_scale) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(values[i]));
  const Fp8Scale scale = Fp8Scale::of(largest, given_scale);
  for (int64_t i = 0; i < count; ++i) {
    const float unit = values[i] * scale.inverse;
    values[i] = unit == unit ? float8_value(float8_code(unit)) * scale.value : unit;
  }
}

// act(gate) * factor.
inline Vec gated_lanes(GatedActivation activation, Vec gate, Vec factor) {
  if (activation == GatedActivation::kGeluMul) return gelu(gate) * factor;
  return (activation == GatedActivation::kGeluTanhMul ? gelu_tanh(gate) : silu(gate)) * factor;
}

template <typename Element, typename Params, typename Weight>
class LinearLayer {
 public:
  LinearLayer(const Params& p, const Weight& weight)
      : p_(p),
        weight_(weight),
        task_rows_(p.num_tokens <= kFewTokens ? kFewTaskRows : kManyTaskRows),
        row_floats_(input_floats(weight)),
        x_(aligned_floats(p.num_tokens * row_floats_)),
        rows_(p.num_tokens) {
    for (int64_t t = 0; t < p.num_tokens; ++t) rows_[t] = x_.get() + t * row_floats_;
  }

  void run(ParallelFor& parallel) {
    parallel.each(p_.num_tokens, [&](int64_t token) { prepare(token); });
    const int64_t tasks = (p_.num_outputs + task_rows_ - 1) / task_rows_;
    parallel.each(tasks, [&](int64_t task) { multiply(task * task_rows_); });
  }

 private:
  static constexpr int64_t kFewTokens = 8, kFewTaskRows = 32, kManyTaskRows = 64;
  static constexpr int64_t kTileTokens = 384;  // whose products are kept until they are finished

  static const Element* elements(const void* values, int64_t index) {
    return static_cast<const Element*>(values) + index;
  }

  // A row of inputs, normalised and rounded where there is a norm, as the weight takes it.
  void prepare(int64_t token) {
    const int64_t size = p_.num_inputs;
    float* placed = x_.get() + token * row_floats_;
    const Element* input = elements(p_.input, token * size);
    if constexpr (std::is_same_v<Element, float>)
      if (!p_.norm_weight && takes_rounded(weight_)) return round_inputs(weight_, input, placed);
    const FewFloats values(size);
    float* row = values.get();
    load_floats(input, size, row);
    if (p_.norm_weight) normalise(row);
    if constexpr (std::is_same_v<Weight, LowBitWeight>)
      if (p_.input_format == InputFormat::kFp8)
        for (int64_t i = 0; i < size; i += weight_.group_size)
          round_to_fp8(row + i, weight_.group_size, p_.input_scale);
    if (takes_rounded(weight_)) return round_inputs(weight_, row, placed);
    place_input(weight_, row, size, placed);
  }

  void normalise(float* row) const {
    const int64_t size = p_.num_inputs;
    const float factor = inverse_root_mean_square(row, size, p_.epsilon);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec y = load_part(row + i, size - i) * factor * load_part(elements(p_.norm_weight, i), size - i);
      Element rounded[kLanes];
      store_lanes(y, rounded);
      store_part(load_lanes(rounded), size - i, row + i);
    }
  }

  void multiply(int64_t first) {
    const int64_t count = std::min(task_rows_, p_.num_outputs - first);
    const int64_t size = std::min(kTileTokens, p_.num_tokens) * count;
    const bool two_parts = is_two_part();
    const FewFloats products(size), factors(two_parts ? size : 0);
    for (int64_t token = 0; token < p_.num_tokens; token += kTileTokens) {
      const InputRows inputs{rows_.data() + token, std::min(kTileTokens, p_.num_tokens - token)};
      multiply_rows_of(first, count, inputs, products.get());
      if (two_parts) multiply_rows_of(p_.num_outputs + first, count, inputs, factors.get());
      for (int64_t t = 0; t < inputs.count; ++t)
        finish(token + t, first, count, products.get() + t * count, factors.get() + t * count);
    }
  }

  bool is_two_part() const {
    if constexpr (std::is_same_v<Params, FusedLinearParams>) return p_.is_two_part();
    return p_.activation != GatedActivation::kNone;
  }

  // sums[token][row] = products with rows first .. of the weight, their bias added.
  void multiply_rows_of(int64_t first, int64_t count, const InputRows& inputs, float* sums) {
    const auto store = [&](int64_t t, int64_t row, float sum) { sums[t * count + row] = sum; };
    if constexpr (std::is_same_v<Weight, LowBitWeight>)
      multiply_codes<Element>(weight_, first, count, inputs, store);
    else
      weight_.multiply(first, count, inputs, store);
    if (!p_.bias) return;
    for (int64_t t = 0; t < inputs.count; ++t)
      for (int64_t i = 0; i < count; i += kLanes) {
        float* place = sums + t * count + i;
        store_part(load_part(place, count - i) + load_part(elements(p_.bias, first + i), count - i),
                   count - i, place);
      }
  }

  // Writes outputs first .. of a token.
  void finish(int64_t token, int64_t first, int64_t count, const float* products, const float* factors) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t rest = count - i, place = token * p_.num_outputs + first + i;
      Vec y = load_part(products + i, rest);
      if (is_two_part()) y = gated_lanes(p_.activation, y, load_part(factors + i, rest));
      if constexpr (std::is_same_v<Params, FusedLinearParams>)
        if (p_.factor) {
          const Element* factor = elements(p_.factor, token * p_.factor_stride + first + i);
          y = gated_lanes(p_.activation, y, load_part(factor, rest));
        }
      if (p_.residual) y = y + load_part(elements(p_.residual, place), rest);
      if (p_.output_float32)
        store_part(y, rest, static_cast<float*>(p_.output) + place);
      else
        store_part(y, rest, static_cast<Element*>(p_.output) + place);
    }
  }

  const Params& p_;
  const Weight& weight_;
  const int64_t task_rows_, row_floats_;
  const AlignedFloats x_;  // rows of inputs as the weight takes them
  std::vector<const float*> rows_;
};

inline void low_bit_linear(const LowBitLinearParams& p, ParallelFor& parallel) {
  if (p.num_tokens == 0) return;  // products read a first row
  using Params = LowBitLinearParams;
  if (p.element == ElementType::kFloat32)
    return LinearLayer<float, Params, LowBitWeight>(p, p.weight).run(parallel);
  LinearLayer<Half, Params, LowBitWeight>(p, p.weight).run(parallel);
}

template <typename Element>
void run_fused_linear(const FusedLinearParams& p, ParallelFor& parallel) {
  const DenseWeight<Element> weight{static_cast<const Element*>(p.weight), p.num_inputs};
  LinearLayer<Element, FusedLinearParams, DenseWeight<Element>>(p, weight).run(parallel);
}

inline void fused_linear(const FusedLinearParams& p, ParallelFor& parallel) {
  if (p.num_tokens == 0) return;
  if (p.element == ElementType::kFloat32) return run_fused_linear<float>(p, parallel);
  run_fused_linear<Half>(p, parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
