// LowBitLinear on the CPU. A task is a block of rows of the weight, which it reads once for all tokens. A
// product has one order of sums, whatever the other tokens.
#pragma once

#include "low_bit_codes.h"

namespace ortolan::cpu::ORTOLAN_ISA {

template <typename Element>
class LowBitLayer {
 public:
  explicit LowBitLayer(const LowBitLinearParams& p)
      : p_(p), inputs_(p.num_tokens), x_(new float[p.num_tokens * p.num_inputs]) {}

  void run(ParallelFor& parallel) {
    parallel.each(p_.num_tokens, [&](int64_t token) { prepare(token); });
    const int64_t tasks = (p_.num_outputs + kUnpackedRows - 1) / kUnpackedRows;
    parallel.each(tasks, [&](int64_t task) { multiply(task * kUnpackedRows); });
  }

 private:
  static float element_at(const void* values, int64_t index) {
    return values ? to_float(static_cast<const Element*>(values)[index]) : 0.0f;
  }

  // A row of inputs in float32, normalised and rounded where there is a norm.
  void prepare(int64_t token) {
    const int64_t size = p_.num_inputs;
    std::unique_ptr<float[]> values(new float[size]);
    float* row = values.get();
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) {
      row[i] = element_at(p_.input, token * size + i);
      squares += static_cast<double>(row[i]) * row[i];
    }
    if (p_.norm_weight) normalise(row, squares);
    inputs_.rows[token] = x_.get() + token * size;
    place_input(p_.weight, row, size, x_.get() + token * size);
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
    const int64_t count = std::min(kUnpackedRows, p_.num_outputs - first);
    if (p_.activation == GatedActivation::kNone) {
      products(first, count, [&](int64_t t, int64_t row, float sum) { put(t, row, sum); });
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
    multiply_codes<Element>(p_.weight, first, count, inputs_, [&](int64_t t, int64_t row, float sum) {
      take(t, first + row, sum + element_at(p_.bias, first + row));
    });
  }

  void put(int64_t token, int64_t row, float value) {
    const int64_t place = token * p_.num_outputs + row;
    value += element_at(p_.residual, place);
    if (p_.output_float32)
      static_cast<float*>(p_.output)[place] = value;
    else
      from_float(value, static_cast<Element*>(p_.output)[place]);
  }

  const LowBitLinearParams& p_;
  InputRows inputs_;
  const std::unique_ptr<float[]> x_;  // [T, K], where codes want it
};

inline void low_bit_linear(const LowBitLinearParams& p, ParallelFor& parallel) {
  if (p.num_tokens == 0) return;  // products read a first row
  if (p.element == ElementType::kFloat32) return LowBitLayer<float>(p).run(parallel);
  LowBitLayer<Half>(p).run(parallel);
}

}  // namespace ortolan::cpu::ORTOLAN_ISA
