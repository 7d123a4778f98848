// FusedLinear and LowBitLinear on the CPU. A task is a block of rows of the weight, which it reads once for
// all tokens. A product has one order of sums, whatever the other tokens.
#pragma once

#include "kernels/fused_params.h"
#include "kernels/low_bit_rows.h"
#include "kernels/row_scale.h"
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

template <typename Element, typename Params, typename Weight>
class LinearLayer {
 public:
  LinearLayer(const Params& p, const Weight& weight)
      : p_(p),
        weight_(weight),
        task_rows_(p.num_tokens <= kFewTokens ? kFewTaskRows : kManyTaskRows),
        row_floats_(input_floats(weight)),
        inputs_(p.num_tokens),
        x_(aligned_floats(p.num_tokens * row_floats_)) {}

  void run(ParallelFor& parallel) {
    parallel.each(p_.num_tokens, [&](int64_t token) { prepare(token); });
    const int64_t tasks = (p_.num_outputs + task_rows_ - 1) / task_rows_;
    parallel.each(tasks, [&](int64_t task) { multiply(task * task_rows_); });
  }

 private:
  static constexpr int64_t kFewTokens = 8, kFewTaskRows = 32, kManyTaskRows = 64;

  static float element_at(const void* values, int64_t index) {
    return values ? to_float(static_cast<const Element*>(values)[index]) : 0.0f;
  }

  // A row of inputs in float32, normalised and rounded where there is a norm.
  void prepare(int64_t token) {
    const int64_t size = p_.num_inputs;
    const AlignedFloats values = aligned_floats(size);
    float* row = values.get();
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) {
      row[i] = element_at(p_.input, token * size + i);
      squares += static_cast<double>(row[i]) * row[i];
    }
    if (p_.norm_weight) normalise(row, squares);
    if constexpr (std::is_same_v<Weight, LowBitWeight>)
      if (p_.input_format == InputFormat::kFp8)
        for (int64_t i = 0; i < size; i += weight_.group_size)
          round_to_fp8(row + i, weight_.group_size, p_.input_scale);
    float* placed = x_.get() + token * row_floats_;
    inputs_.rows[token] = placed;
    if (takes_rounded(weight_)) return round_inputs(row, size, placed);
    place_input(weight_, row, size, placed);
  }

  void normalise(float* row, double squares) {
    const int64_t size = p_.num_inputs;
    const float factor = static_cast<float>(1.0 / std::sqrt(squares / size + p_.epsilon));
    for (int64_t i = 0; i < size; ++i) {
      Element rounded;
      from_float(row[i] * factor * element_at(p_.norm_weight, i), rounded);
      row[i] = to_float(rounded);
    }
  }

  void multiply(int64_t first) {
    const int64_t count = std::min(task_rows_, p_.num_outputs - first);
    if (p_.activation == GatedActivation::kNone) {
      products(first, count, [&](int64_t t, int64_t row, float sum) { put(t, row, sum); });
      return;
    }
    if constexpr (std::is_same_v<Params, FusedLinearParams>)
      if (p_.factor) {
        products(first, count, [&](int64_t t, int64_t row, float sum) {
          put(t, row, plain_gate(p_.activation, sum, element_at(p_.factor, t * p_.factor_stride + row)));
        });
        return;
      }
    std::unique_ptr<float[]> gates(new float[p_.num_tokens * count]);
    products(first, count, [&](int64_t t, int64_t row, float sum) { gates[t * count + row - first] = sum; });
    products(p_.num_outputs + first, count, [&](int64_t t, int64_t row, float sum) {
      const int64_t place = row - p_.num_outputs;
      put(t, place, plain_gate(p_.activation, gates[t * count + place - first], sum));
    });
  }

  // Gives take(token, row, sum) the products with rows first .. of the weight, their bias added.
  template <typename Take>
  void products(int64_t first, int64_t count, Take take) {
    multiply_weight(first, count, inputs_, [&](int64_t t, int64_t row, float sum) {
      take(t, first + row, sum + element_at(p_.bias, first + row));
    });
  }

  template <typename Store>
  void multiply_weight(int64_t first, int64_t count, const InputRows& inputs, Store store) {
    if constexpr (std::is_same_v<Weight, LowBitWeight>)
      multiply_codes<Element>(weight_, first, count, inputs, store);
    else
      weight_.multiply(first, count, inputs, store);
  }

  void put(int64_t token, int64_t row, float value) {
    const int64_t place = token * p_.num_outputs + row;
    value += element_at(p_.residual, place);
    if (p_.output_float32)
      static_cast<float*>(p_.output)[place] = value;
    else
      from_float(value, static_cast<Element*>(p_.output)[place]);
  }

  const Params& p_;
  const Weight& weight_;
  const int64_t task_rows_, row_floats_;
  InputRows inputs_;
  const AlignedFloats x_;  // rows of inputs as the weight takes them
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
